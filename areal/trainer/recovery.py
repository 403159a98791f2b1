"""Recover points of a run: copied at the end of a step, written beside the steps that follow.

    with Recovery(paths.recover, config.recover, identity) as recovery:
        point = recovery.read(run.load)                         # None: a fresh run
        recovery.wait()                                         # for the point before
        recovery.start(step, roles.capture(), state, before=database.flush)
        recovery.poll()                                         # once per step

A point is everything or nothing (utils/recover.py), and what it says is the run when `start` was
called, however long the writing takes. Until a point is whole on the disk the one before it counts.
A write that failed is raised by the next `poll` or `wait`; leaving the block waits for the last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal.api.config.timers import RecoverConfig
from areal.utils.background import BackgroundWriter
from areal.utils.recover import RecoverPoint, RecoverStore


class Recovery:
    def __init__(self, root: Path, config: RecoverConfig, identity: Mapping[str, Any]) -> None:
        self._reads = config.mode == "on"
        self._store = RecoverStore(
            root, identity=identity, keep=config.keep, on_damage=config.on_damage
        )
        self._writer = BackgroundWriter("recover")
        self.poll, self.wait = self._writer.poll, self._writer.wait

    def check_identity(self) -> None:
        """ValueError when the newest point is of another run."""
        if self._reads:
            self._store.read_newest(RecoverPoint.check_identity)

    def read(self, load: Callable[[RecoverPoint], RecoverPoint]) -> RecoverPoint | None:
        """The newest point, which `load` has taken over."""
        return self._store.read_newest(load) if self._reads else None

    def start(
        self,
        global_step: int,
        write_roles: Callable[[Path], None],
        state: Mapping[str, Any],
        *,
        before: Callable[[], None],
    ) -> None:
        """Begin to write the point after `global_step`.

        before: what must be on the disk first, for the point to be true.
        """
        frozen = json.loads(json.dumps(state))

        def write() -> None:
            before()
            self._store.save(global_step, write_roles, frozen)

        self._writer.start(write)

    def oldest_step(self) -> int | None:
        """No recovery goes back behind this step."""
        return self._store.oldest_step()

    @contextmanager
    def stopping_in_order(self, num_steps_done: int) -> Iterator[None]:
        """A disk that is full or cannot be written ends the run with a word on where it stands."""
        try:
            yield
        except OSError as error:
            self._writer.close()  # the point being written may still become the last good one
            points = self._store.points()
            good = "no recover point was written"
            if points:
                good = (
                    f"started again it goes on from {points[0].path}, the last good recover point"
                )
            cause = error.strerror or str(error)
            text = f"{cause}. Training stopped after step {num_steps_done}; {good}"
            raise OSError(error.errno, text) from error

    def __enter__(self) -> Recovery:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._writer.close()
