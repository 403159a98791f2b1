"""Checkpoints in Hugging Face format, whole or not at all.

A Saver belongs to one role (`actor`, `critic`) and has its own timer. The engine writes into a
hidden sibling folder that gets its name only when everything is on the disk, so a full disk or a
kill leaves no folder that looks like a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal.api.engine_api import TrainEngine
from areal.api.io_struct import SaveLoadMeta, StepInfo
from areal.utils import logging
from areal.utils.fs import atomic_folder
from areal.utils.timers import FrequencyTimer

logger = logging.getLogger("Saver")


class Saver:
    """Saves `engine` under `{checkpoints}/{role}/` whenever its timer is due.

    saver = Saver(paths.checkpoints, "actor", FrequencyTimer(freq_steps=10))
    saver.save_if_due(engine, step, tokenizer)      # once per finished step
    """

    def __init__(self, checkpoints: Path, role: str, timer: FrequencyTimer) -> None:
        self.timer = timer
        self._folder = checkpoints / role

    def save_if_due(
        self, engine: TrainEngine, step: StepInfo, tokenizer: Any = None
    ) -> Path | None:
        """The new checkpoint, or None when it was not time."""
        if not self.timer.tick(step):
            return None
        path = self._folder / checkpoint_name(step)
        save_checkpoint(engine, path, tokenizer)
        return path


def checkpoint_name(step: StepInfo) -> str:
    return f"epoch{step.epoch}epochstep{step.epoch_step}globalstep{step.global_step}"


def save_checkpoint(engine: TrainEngine, path: Path, tokenizer: Any = None) -> None:
    """Write `engine`'s weights to `path`; a checkpoint already there is replaced."""
    with atomic_folder(path) as scratch:
        engine.save(SaveLoadMeta(path=str(scratch), weight_format="hf", tokenizer=tokenizer))
    logger.info("saved %s", path)
