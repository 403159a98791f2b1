"""Recover points: the state from which a killed run resumes.

    with Recovery(paths.recover, config.recover, identity, database) as recovery:
        point = recovery.read(run.load)                         # None: a fresh run
        recovery.wait()                                         # for the previous write
        recovery.start(step, roles.capture(), state)
        recovery.poll()                                         # once per step

`Recovery` captures the run when `start` is called and writes it in the background
(`BackgroundWriter`, one write at a time). A failed write is raised by the next `poll` or `wait`;
leaving the block waits for the last one.

A point (`RecoverStore`, `RecoverPoint`) is a folder `step_{G}` with the engines' files,
`state.json` (the run's small state) and `manifest.json` (checksums of every other file, the run's
identity, and the point's mark in the ledger). It appears in one rename after everything is on disk;
the previous point stays until then. A point that does not verify is an error, never a silent fresh
start. Engines check their own files when they load them (utils/manifest.py), so each byte is read
once, by the rank that needs it.

A ledger matches a point if it holds the point's mark (run/database.py), which is on disk before the
point: then it has recorded everything in the weights, and later records are undone. With any other
ledger prompts would be trained twice. A ledger with points whose folders are gone is an error too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from areal.api.config.run import RecoverConfig
from areal.run.database import LedgerView, RunDatabase, RunDatabaseError
from areal.utils import logging
from areal.utils.fs import atomic_folder, is_disk_fault, remove_folder, remove_leftovers
from areal.utils.manifest import (
    DamagedError,
    check_files,
    describe,
    list_files,
    read_manifest,
    write_manifest,
)
from areal.utils.waits import waiting

logger = logging.getLogger("Recover")
T = TypeVar("T")
_STATE = "state.json"
_POINT_NAME = re.compile(r"step_(\d+)")


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
        """ValueError or RecoverError if the newest point is of another run or ledger, or lost."""
        if self._reads:
            self._store.read_newest(RecoverPoint.check_origin)

    def read(self, load: Callable[[RecoverPoint], RecoverPoint]) -> RecoverPoint | None:
        """The newest point, after `load` has loaded it."""
        point = self._store.read_newest(load) if self._reads else None
        if point is not None:  # its writer may have been killed before confirming it
            self._database.confirm_recover_point(point.global_step)
        return point

    def start(
        self, global_step: int, write_roles: Callable[[Path], None], state: Mapping[str, Any]
    ) -> None:
        """Start writing the point after `global_step`, which the ledger has recorded."""
        frozen = json.loads(json.dumps(state))
        mark = self._database.mark_recover_point(global_step)

        def write() -> None:
            self._database.flush()
            self._store.save(global_step, mark, write_roles, frozen)
            self._database.confirm_recover_point(global_step)

        self._writer.start(write)

    def oldest_step(self) -> int | None:
        """No recovery goes back before this step."""
        return self._store.oldest_step()

    @contextmanager
    def stopping_in_order(self, num_steps_done: int) -> Iterator[None]:
        """A disk fault ends the run with an error that names the last good recover point."""
        try:
            yield
        except (OSError, RunDatabaseError) as error:
            if isinstance(error, OSError) and not is_disk_fault(error):
                raise
            self._writer.close()  # the point being written may still become the last good one
            newest = self._store.newest_path()
            good = "no recover point was written"
            if newest is not None:
                good = f"a restart resumes from {newest}, the last good recover point"
            cause = getattr(error, "strerror", None) or str(error)
            text = f"{cause}. Training stopped after step {num_steps_done}; {good}"
            if isinstance(error, OSError):
                raise OSError(error.errno, text) from error
            raise RunDatabaseError(text) from error

    def __enter__(self) -> Recovery:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._writer.close()


class RecoverError(RuntimeError):
    """A recover point exists but cannot be used; the text says why and what to do."""


class ForeignLedgerError(DamagedError):
    """An intact recover point of another ledger, or of a later state of this one."""


class RecoverStore:
    """The recover points of one run, under `root`; one process owns it.

    `ledger` reads the view of the run's database. `identity` holds the config values that must not
    change on resume (JSON values by dotted key): weights of one model must not be loaded into
    another. `on_damage`: if the newest point is damaged, or of another ledger, raise an error or
    take the previous point.
    """

    def __init__(
        self,
        root: Path,
        ledger: Callable[[], LedgerView],
        *,
        identity: Mapping[str, Any],
        keep: int = 2,
        on_damage: Literal["stop", "previous"] = "stop",
    ) -> None:
        if keep < 1:
            raise ValueError(f"recover.keep must be at least 1, got {keep}")
        self._root = root
        self._ledger = ledger
        self._identity = json.loads(json.dumps(identity))  # in its form after a round trip
        self._keep = keep
        self._on_damage = on_damage

    def save(
        self,
        global_step: int,
        mark: str,
        write_files: Callable[[Path], None],
        state: Mapping[str, Any],
    ) -> Path:
        """Write the point after `global_step`, then delete older points beyond `keep`.

        The ledger must have `mark` on disk already.
        """
        path = self._root / f"step_{global_step}"
        with atomic_folder(path) as scratch:
            write_files(scratch)
            (scratch / _STATE).write_text(json.dumps(state), encoding="utf-8")
            files = describe(scratch, list_files(scratch))
            facts = {"global_step": global_step, "identity": self._identity, "mark": mark}
            write_manifest(scratch, files, facts)
        self._prune(global_step)
        return path

    def read_newest(self, read: Callable[[RecoverPoint], T]) -> T | None:
        """The result of `read` on the newest point; None if the run never had one.

        A DamagedError in `read` becomes a RecoverError, or moves on to the previous point.
        """
        if self._root.is_dir():
            remove_leftovers(self._root)
        points = self.points()
        for number, point in enumerate(points, start=1):
            try:
                return read(point)
            except DamagedError as error:
                is_last = self._on_damage == "stop" or number == len(points)
                if is_last:
                    raise _refusal(point, error, has_previous=number < len(points)) from error
                logger.warning("%s; using the previous recover point", error)
        self._check_nothing_is_lost()
        return None

    def newest_path(self) -> Path | None:
        """Path of the newest point, unverified."""
        return next(reversed(self._paths()), None)

    def points(self) -> list[RecoverPoint]:
        """Newest first, unverified."""
        ledger = self._ledger()
        return [RecoverPoint(path, self._identity, ledger) for path in reversed(self._paths())]

    def oldest_step(self) -> int | None:
        """The step of the oldest point kept; data before it is not needed any more."""
        paths = self._paths()
        return _step_of(paths[0]) if paths else None

    def _paths(self) -> list[Path]:
        return _points_in(self._root)

    def _check_nothing_is_lost(self) -> None:
        """Only a run that was killed before its first point may start over."""
        ledger = self._ledger()
        if ledger.whole is not None:
            lost = f"its recover point after step {ledger.whole + 1}"
        elif ledger.is_finished:
            lost = "its end, without recover points"
        else:
            return
        raise RecoverError(
            f"{ledger.path} records a run of {ledger.num_steps} steps and {lost}, and {self._root} "
            "holds no recover point to resume from: restore that folder, choose another "
            f"trial_name, or remove {ledger.path.parent} to start over"
        )

    def _prune(self, newest_step: int) -> None:
        """Also deletes points after the newest: damaged ones that recovery skipped."""
        past = [path for path in self._paths() if _step_of(path) <= newest_step]
        for path in self._paths():
            if path not in past[-self._keep :]:
                remove_folder(path)


@dataclass(frozen=True, slots=True)
class RecoverPoint:
    """One recover point on disk."""

    path: Path
    identity: dict[str, Any]  # of the resuming run
    ledger: LedgerView  # likewise

    @property
    def global_step(self) -> int:
        """The last step whose update is in the weights."""
        return _step_of(self.path)

    def load(self) -> dict[str, Any]:
        """Verify the point, except files listed in the engines' manifests; returns the state."""
        self.check_origin()
        manifest = read_manifest(self.path)
        check_files(self.path, manifest, manifest.files)
        if _STATE not in manifest.files:
            raise DamagedError(str(self.path), _STATE, "missing")
        return json.loads((self.path / _STATE).read_text(encoding="utf-8"))

    def check_origin(self) -> None:
        """ValueError if the resuming run differs from the saved one, DamagedError if its ledger
        does."""
        facts = read_manifest(self.path).facts
        saved = facts.get("identity")
        if not isinstance(saved, dict) or not {"global_step", "mark"} <= facts.keys():
            raise DamagedError(str(self.path), "manifest.json", "written by another areal")
        changed = [
            f"{key} was {saved.get(key)!r}, now {self.identity.get(key)!r}"
            for key in sorted(saved.keys() | self.identity.keys())
            if saved.get(key) != self.identity.get(key)
        ]
        if changed:
            raise ValueError(
                f"{self.path} was written under another config: {'; '.join(changed)}. Restore the "
                "old values, or choose a new trial_name"
            )
        if facts["global_step"] != self.global_step:
            fault = f"foreign, of step {facts['global_step']}"
            raise DamagedError(str(self.path), "manifest.json", fault)
        if self.ledger.marks.get(self.global_step) != facts["mark"]:
            raise ForeignLedgerError(str(self.path), "manifest.json", self._ledger_fault())

    def _ledger_fault(self) -> str:
        """Why the ledger does not match this point."""
        ledger, num_steps = self.ledger, self.global_step + 1
        if ledger.num_steps == 0:
            return f"{ledger.path} is empty"
        if ledger.num_steps < num_steps:
            found = f"ends after step {ledger.num_steps}"
            return f"{ledger.path} {found}, the point was written after step {num_steps}"
        return (
            f"{ledger.path} belongs to another run, or is a copy from before the point was written"
        )


def newest_step(root: Path) -> int | None:
    """The step of the newest point under `root`, unverified; None if there is none."""
    paths = _points_in(root)
    return _step_of(paths[-1]) if paths else None


def _points_in(root: Path) -> list[Path]:
    """Oldest first."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if _POINT_NAME.fullmatch(p.name)), key=_step_of)


def _step_of(path: Path) -> int:
    match = _POINT_NAME.fullmatch(path.name)
    assert match, path
    return int(match[1])


def _refusal(point: RecoverPoint, error: DamagedError, *, has_previous: bool) -> RecoverError:
    folder, name, fault = error.args
    advice = "choose a new trial_name to start afresh"
    if has_previous:
        advice = f"set recover.on_damage=previous to resume from the previous point, or {advice}"
    if isinstance(error, ForeignLedgerError):
        database = point.ledger.path.name
        return RecoverError(
            f"recover point {point.path} does not belong to the run's ledger: {fault}. Resuming "
            f"would train prompts twice. Restore its {database} (with {database}-wal, where there "
            f"is one), or {advice}"
        )
    file = (Path(folder) / name).relative_to(point.path)
    return RecoverError(
        f"recover point {point.path} is damaged: {file}: {fault}. To resume, {advice}"
    )


class BackgroundWriter:
    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._pending: Future[object] | None = None

    def start(self, write: Callable[[], object]) -> None:
        assert self._pending is None, "wait for the write before"
        self._pending = self._thread.submit(write)

    def poll(self) -> bool:
        """Whether a write has ended since the last call; raises its exception."""
        if self._pending is None or not self._pending.done():
            return False
        return self.wait()

    def wait(self) -> bool:
        """As `poll`, but waits for the write in progress."""
        if self._pending is None:
            return False
        pending = self._pending
        with waiting(f"the write of {self._name}"):
            pending.exception()  # if interrupted, the write stays pending
        self._pending = None
        pending.result()
        return True

    def close(self) -> None:
        """Wait for the last write; its failure is logged."""
        try:
            self.wait()
        except Exception as error:
            # Not raised: an earlier error may be propagating already.
            logger.error("the last write failed: %s", error)
        finally:
            self._thread.shutdown()
