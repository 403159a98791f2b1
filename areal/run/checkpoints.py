"""Checkpoints in Hugging Face format, whole or not at all.

A Saver belongs to one role (`actor`, `critic`) and has its own timer. The engine writes into a
hidden sibling folder that gets its name only when everything is on the disk, so a full disk or a
kill leaves no folder that looks like a checkpoint. Older ones beyond `keep` go when a newer one is
whole.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from areal.api.engine_api import TrainEngine
from areal.api.io_struct import SaveLoadMeta, StepInfo
from areal.run.timers import FrequencyTimer
from areal.utils import logging
from areal.utils.fs import atomic_folder, remove_folder, remove_leftovers

logger = logging.getLogger("Saver")

_NAME = re.compile(r"epoch\d+epochstep\d+globalstep(\d+)")


class Saver:
    """Saves `engine` under `{checkpoints}/{role}/` whenever its timer is due.

    saver = Saver(paths.checkpoints, "actor", FrequencyTimer(freq_steps=10))
    saver.save_if_due(engine, step, tokenizer)      # once per finished step
    """

    def __init__(
        self, checkpoints: Path, role: str, timer: FrequencyTimer, *, keep: int | None = None
    ) -> None:
        """`keep`: how many of the newest stay; None: all."""
        self.timer = timer
        self._folder = checkpoints / role
        self._keep = keep
        if self._folder.is_dir():
            remove_leftovers(self._folder)

    def save_if_due(
        self, engine: TrainEngine, step: StepInfo, tokenizer: Any = None
    ) -> Path | None:
        """The new checkpoint, or None when it was not time."""
        if not self.timer.tick(step):
            return None
        path = self._folder / checkpoint_name(step)
        save_checkpoint(engine, path, tokenizer)
        self._prune()
        return path

    def _prune(self) -> None:
        if self._keep is None:
            return
        steps = {p: int(m[1]) for p in self._folder.iterdir() if (m := _NAME.fullmatch(p.name))}
        for path in sorted(steps, key=steps.__getitem__)[: -self._keep]:
            remove_folder(path)


def checkpoint_name(step: StepInfo) -> str:
    return f"epoch{step.epoch}epochstep{step.epoch_step}globalstep{step.global_step}"


def save_checkpoint(engine: TrainEngine, path: Path, tokenizer: Any = None) -> None:
    """Write `engine`'s weights to `path`; a checkpoint already there is replaced."""
    with atomic_folder(path, private=False) as scratch:  # for others, once it is moved to them
        engine.save(SaveLoadMeta(path=str(scratch), weight_format="hf", tokenizer=tokenizer))
    logger.info("saved %s", path)
