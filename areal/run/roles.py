"""The trained models of a run, by role: each has a name, a saver and frequency counters of its own.

    roles.add("actor", engine); roles.add("critic", engine)
    roles.save_if_due(step, tokenizer)     # checkpoints/{role}/..., each when its own timer says so
    write = roles.capture()                # all of them as they are now, copied
    write(point); roles.read(point)        # one recover point: {point}/{role}/

A recover point holds every role or it is none: the manifest over all its files is written last, by
`run/recover.py`. Models that are not trained (reference, teacher) have no state to keep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.engine_api import TrainEngine
from areal.api.io_struct import SaveLoadMeta, StepInfo
from areal.run.checkpoints import Saver
from areal.run.timers import FrequencyTimer


@dataclass(frozen=True, slots=True)
class _Role:
    engine: TrainEngine
    saver: Saver


class Roles:
    def __init__(
        self,
        checkpoints: Path,
        new_timer: Callable[[], FrequencyTimer],
        *,
        keep: int | None = None,
    ) -> None:
        """`new_timer` makes the timer of one role's saver, which keeps its newest `keep`."""
        self._checkpoints = checkpoints
        self._new_timer = new_timer
        self._keep = keep
        self._roles: dict[str, _Role] = {}

    def add(self, role: str, engine: TrainEngine) -> None:
        assert role not in self._roles, f"role {role} is taken"
        saver = Saver(self._checkpoints, role, self._new_timer(), keep=self._keep)
        self._roles[role] = _Role(engine, saver)

    def engine(self, role: str) -> TrainEngine:
        return self._roles[role].engine

    def timers(self) -> dict[str, FrequencyTimer]:
        return {f"saver.{name}": role.saver.timer for name, role in self._roles.items()}

    def save_if_due(self, step: StepInfo, tokenizer: Any) -> None:
        for role in self._roles.values():
            role.saver.save_if_due(role.engine, step, tokenizer)

    def capture(self) -> Callable[[Path], None]:
        """What is returned writes their state of this moment; training may go on meanwhile."""
        writers = {name: role.engine.capture() for name, role in self._roles.items()}

        def write(point: Path) -> None:
            for name, write_role in writers.items():
                write_role(point / name)

        return write

    def read(self, point: Path) -> None:
        for name, role in self._roles.items():
            path = str(point / name)
            role.engine.load(SaveLoadMeta(path=path, weight_format="dcp", with_optim=True))
