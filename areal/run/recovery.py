"""Recover points of a run: copied at the end of a step, written beside the steps that follow.

    with Recovery(paths.recover, config.recover, identity, database) as recovery:
        point = recovery.read(run.load)                         # None: a fresh run
        recovery.wait()                                         # for the point before
        recovery.start(step, roles.capture(), state)
        recovery.poll()                                         # once per step

A point is everything or nothing (run/recover.py), and what it says is the run when `start` was
called, however long the writing takes. Until a point is whole on the disk the one before it counts.
A write that failed is raised by the next `poll` or `wait`; leaving the block waits for the last.

The run's ledger marks the place of each point (run/database.py) and is on the disk before the point
is: whatever is lost, no point is ever taken with a ledger that ends before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal.api.config.timers import RecoverConfig
from areal.run.background import BackgroundWriter
from areal.run.database import RunDatabase, RunDatabaseError
from areal.run.recover import RecoverPoint, RecoverStore
from areal.utils.fs import is_disk_fault


class Recovery:
    def __init__(
        self,
        root: Path,
        config: RecoverConfig,
        identity: Mapping[str, Any],
        database: RunDatabase,
    ) -> None:
        self._reads = config.mode == "on"
        self._database = database
        self._store = RecoverStore(
            root,
            database.ledger_view,
            identity=identity,
            keep=config.keep,
            on_damage=config.on_damage,
        )
        self._writer = BackgroundWriter("recover")
        self.poll, self.wait = self._writer.poll, self._writer.wait

    def check_origin(self) -> None:
        """ValueError or RecoverError when the newest point is of another run or ledger, or lost."""
        if self._reads:
            self._store.read_newest(RecoverPoint.check_origin)

    def read(self, load: Callable[[RecoverPoint], RecoverPoint]) -> RecoverPoint | None:
        """The newest point, which `load` has taken over."""
        point = self._store.read_newest(load) if self._reads else None
        if point is not None:  # its writer may have been killed before it did so
            self._database.confirm_recover_point(point.global_step)
        return point

    def start(
        self, global_step: int, write_roles: Callable[[Path], None], state: Mapping[str, Any]
    ) -> None:
        """Begin to write the point after `global_step`, which the ledger has recorded."""
        frozen = json.loads(json.dumps(state))
        mark = self._database.mark_recover_point(global_step)

        def write() -> None:
            self._database.flush()
            self._store.save(global_step, mark, write_roles, frozen)
            self._database.confirm_recover_point(global_step)

        self._writer.start(write)

    def oldest_step(self) -> int | None:
        """No recovery goes back behind this step."""
        return self._store.oldest_step()

    @contextmanager
    def stopping_in_order(self, num_steps_done: int) -> Iterator[None]:
        """A disk that is full or cannot be written ends the run with a word on where it stands."""
        try:
            yield
        except (OSError, RunDatabaseError) as error:
            if isinstance(error, OSError) and not is_disk_fault(error):
                raise
            self._writer.close()  # the point being written may still become the last good one
            newest = self._store.newest_path()
            good = "no recover point was written"
            if newest is not None:
                good = f"started again it goes on from {newest}, the last good recover point"
            cause = getattr(error, "strerror", None) or str(error)
            text = f"{cause}. Training stopped after step {num_steps_done}; {good}"
            if isinstance(error, OSError):
                raise OSError(error.errno, text) from error
            raise RunDatabaseError(text) from error

    def __enter__(self) -> Recovery:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._writer.close()
