"""Pixels for trajectories that name their images by hash, when a batch is about to be trained on.

In: trajectories as workflows write them and run.db keeps them. Out: the same with `pixel_values`
(run/images.py), cut as the actor's folder says. Trajectories without images pass through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from areal.models.vision.processor import ImageProcessor, load_processor
from areal.run.images import ImageStore, with_pixels
from areal.run.paths import RunPaths
from areal.utils.data import MULTI_MODAL_KEY

if TYPE_CHECKING:
    from areal.api.config.experiment import PPOConfig


class ShownImages:
    """The images of the run of `config`."""

    def __init__(self, config: PPOConfig) -> None:
        self._store = ImageStore(RunPaths.of(config).images)
        self._path = config.actor.path

    def fill_in(self, trajectories: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [self._filled(trajectory) for trajectory in trajectories]

    def _filled(self, trajectory: Mapping[str, Any]) -> Mapping[str, Any]:
        rows = trajectory.get(MULTI_MODAL_KEY)
        if not rows or not any(rows):
            return trajectory
        pixels = with_pixels(rows, self._store, lambda data: self._processor.cut(data))
        return {**trajectory, MULTI_MODAL_KEY: pixels}

    @cached_property
    def _processor(self) -> ImageProcessor:
        # Not before it is needed: a workflow may bring pixels of a model we have no processor for.
        return load_processor(self._path, None, key="actor.path")
