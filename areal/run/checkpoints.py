"""Checkpoints in Hugging Face format, complete or absent, and the timers that trigger them.

A `Saver` belongs to one role (`actor`, `critic`) and has its own timer. The engine writes into a
hidden sibling folder that is renamed when everything is on disk, so a full disk or a kill leaves no
folder that looks like a checkpoint. Older checkpoints beyond `keep` are deleted afterwards.

A `FrequencyTimer` says when saving, a recover point or an evaluation is due. Every owner has its
own timer, ticked once per finished step, without torch.distributed. Its state is part of the
recover point, so a resumed run keeps the schedule.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal.api.engine_api import TrainEngine
from areal.api.io_struct import SaveLoadMeta, StepInfo
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
        """`keep`: number of newest checkpoints kept; None: all."""
        self.timer = timer
        self._folder = checkpoints / role
        self._keep = keep
        if self._folder.is_dir():
            remove_leftovers(self._folder)

    def save_if_due(
        self, engine: TrainEngine, step: StepInfo, tokenizer: Any = None
    ) -> Path | None:
        """The new checkpoint, or None if not due."""
        if not self.timer.tick(step):
            return None
        path = self._folder / checkpoint_name(step)
        save_checkpoint(engine, path, tokenizer)
        self._prune()
        return path

    def _prune(self) -> None:
        if self._keep is None:
            return
        for path in list(_saved(self._folder).values())[: -self._keep]:
            remove_folder(path)


def saved_checkpoints(checkpoints: Path, role: str) -> dict[int, Path]:
    """Global step (counted from 0) -> folder, oldest first."""
    return _saved(checkpoints / role) if (checkpoints / role).is_dir() else {}


def _saved(folder: Path) -> dict[int, Path]:
    found = {int(m[1]): p for p in folder.iterdir() if (m := _NAME.fullmatch(p.name))}
    return dict(sorted(found.items()))


def checkpoint_name(step: StepInfo) -> str:
    return f"epoch{step.epoch}epochstep{step.epoch_step}globalstep{step.global_step}"


def save_checkpoint(engine: TrainEngine, path: Path, tokenizer: Any = None) -> None:
    """Write `engine`'s weights to `path`; replaces an existing checkpoint."""
    with atomic_folder(path, private=False) as scratch:  # readable by others once moved out
        engine.save(SaveLoadMeta(path=str(scratch), weight_format="hf"))
        if tokenizer is not None:  # by this process: each rank it is sent to loads transformers
            tokenizer.save_pretrained(scratch)
    logger.info("saved %s", path)


class FrequencyTimer:
    """Up to three clocks; `tick` is True if any of them fires. With none set it never fires.

    A clock that fires is reset; the others continue.
    """

    def __init__(
        self,
        *,
        freq_epochs: int | None = None,
        freq_steps: int | None = None,
        freq_secs: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        frequencies = {"freq_epochs": freq_epochs, "freq_steps": freq_steps, "freq_secs": freq_secs}
        for name, value in frequencies.items():
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0 or null for never, got {value}")
        self._freq_epochs = freq_epochs
        self._freq_steps = freq_steps
        self._freq_secs = freq_secs
        self._clock = clock
        self._epochs = 0
        self._steps = 0
        self._since = clock()

    def tick(self, step: StepInfo) -> bool:
        """Count one finished step; True if the action is due."""
        self._steps += 1
        self._epochs += int(step.epoch_step == step.steps_per_epoch - 1)
        due = False
        if self._freq_epochs is not None and self._epochs >= self._freq_epochs:
            self._epochs, due = 0, True
        if self._freq_steps is not None and self._steps >= self._freq_steps:
            self._steps, due = 0, True
        if self._freq_secs is not None and self._clock() - self._since >= self._freq_secs:
            self._since, due = self._clock(), True
        return due

    def state_dict(self) -> dict[str, float]:
        return {
            "epochs": self._epochs,
            "steps": self._steps,
            "elapsed_s": self._clock() - self._since,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from `state`; the time between the two processes does not count."""
        self._epochs = int(state["epochs"])
        self._steps = int(state["steps"])
        self._since = self._clock() - state["elapsed_s"]
