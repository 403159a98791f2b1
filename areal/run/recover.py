"""Recover points: what a killed run goes on from.

A point is a folder `step_{G}` with the engines' files, `state.json` (the run's small state) and
`manifest.json` (checksums of every other file, the run's identity, and the mark of its place in the
ledger). It appears in one rename after everything is on the disk; the point before it stays until
then, so no crash destroys the only copy. A point that does not verify is an error, never a silent
fresh start.

    store = RecoverStore(paths.recover, database.ledger_view, identity={"actor.path": "..."})
    mark = database.mark_recover_point(step)
    store.save(step, mark, lambda folder: write(folder / "actor"), {"timer": timer.state_dict()})
    state = store.read_newest(lambda point: point.load())      # None: a fresh run

A ledger goes with a point if it holds the point's mark: then it has recorded all that is in the
weights, and what it has recorded since is undone. Any other ledger would have its prompts trained
twice. And a ledger that knows of points whose folder is gone belongs to no fresh run.

Engines check their own files when they load them (see utils/manifest.py), so that each byte is read
once, by the rank that wants it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from areal.run.database import LedgerView
from areal.utils import logging
from areal.utils.fs import atomic_folder, remove_folder, remove_leftovers
from areal.utils.manifest import (
    DamagedError,
    check_files,
    describe,
    list_files,
    read_manifest,
    write_manifest,
)

logger = logging.getLogger("Recover")

T = TypeVar("T")

_STATE = "state.json"
_POINT_NAME = re.compile(r"step_(\d+)")


class RecoverError(RuntimeError):
    """A recover point exists but cannot be used; the text says why and what to do."""


class ForeignLedgerError(DamagedError):
    """A recover point is whole, and belongs to another ledger, or to a later one."""


class RecoverStore:
    """The recover points of one run, under `root`; one process owns it.

    `ledger` tells what the run's database knows. `identity` holds the config values that must be
    the same when the run goes on (JSON values by dotted key): weights of one model must not be
    loaded into another. `on_damage` says what happens when the newest point is damaged, or of
    another ledger: an error, or the point before it is taken.
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
        self._identity = json.loads(json.dumps(identity))  # as it will be read back
        self._keep = keep
        self._on_damage = on_damage

    def save(
        self,
        global_step: int,
        mark: str,
        write_files: Callable[[Path], None],
        state: Mapping[str, Any],
    ) -> Path:
        """Write the point after `global_step`; older points beyond `keep` go afterwards.

        The ledger has `mark`, on the disk.
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
        """What `read` makes of the newest point; None when the run has none and never had.

        A DamagedError that `read` meets is a RecoverError, or sends it to the point before.
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
                logger.warning("%s; taking the recover point before it", error)
        self._check_nothing_is_lost()
        return None

    def newest_path(self) -> Path | None:
        """Of the newest point, unverified."""
        return next(reversed(self._paths()), None)

    def points(self) -> list[RecoverPoint]:
        """Newest first, unverified."""
        ledger = self._ledger()
        return [RecoverPoint(path, self._identity, ledger) for path in reversed(self._paths())]

    def oldest_step(self) -> int | None:
        """The step of the oldest point kept: nobody will ask for anything before it."""
        paths = self._paths()
        return _step_of(paths[0]) if paths else None

    def _paths(self) -> list[Path]:
        return _points_in(self._root)

    def _check_nothing_is_lost(self) -> None:
        """A run that was killed before its first point starts over; others do not."""
        ledger = self._ledger()
        if ledger.whole is not None:
            lost = f"its recover point after step {ledger.whole + 1}"
        elif ledger.is_finished:
            lost = "its end, without recover points"
        else:
            return
        raise RecoverError(
            f"{ledger.path} records a run of {ledger.num_steps} steps and {lost}, and {self._root} "
            f"holds no recover point to go on from: put that folder back, choose another "
            f"trial_name, or remove {ledger.path.parent} to start over"
        )

    def _prune(self, newest_step: int) -> None:
        """Points after the newest are of a future that did not happen: a damaged one was left."""
        past = [path for path in self._paths() if _step_of(path) <= newest_step]
        for path in self._paths():
            if path not in past[-self._keep :]:
                remove_folder(path)


@dataclass(frozen=True, slots=True)
class RecoverPoint:
    """One recover point on disk."""

    path: Path
    identity: dict[str, Any]  # of the run that wants to go on
    ledger: LedgerView  # likewise

    @property
    def global_step(self) -> int:
        """The last step whose update is in the weights."""
        return _step_of(self.path)

    def load(self) -> dict[str, Any]:
        """Verify the point, but for what manifests of engines vouch for, and return the state."""
        self.check_origin()
        manifest = read_manifest(self.path)
        check_files(self.path, manifest, manifest.files)
        if _STATE not in manifest.files:
            raise DamagedError(str(self.path), _STATE, "missing")
        return json.loads((self.path / _STATE).read_text(encoding="utf-8"))

    def check_origin(self) -> None:
        """ValueError when the run that wants to go on is another one than was saved, DamagedError
        when its ledger is."""
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
                f"{self.path} was written under another config: {'; '.join(changed)}. "
                "Put the old values back, or choose a new trial_name"
            )
        if facts["global_step"] != self.global_step:
            fault = f"foreign, of step {facts['global_step']}"
            raise DamagedError(str(self.path), "manifest.json", fault)
        if self.ledger.marks.get(self.global_step) != facts["mark"]:
            raise ForeignLedgerError(str(self.path), "manifest.json", self._ledger_fault())

    def _ledger_fault(self) -> str:
        """How the ledger at hand is known not to be the one of this point."""
        ledger, num_steps = self.ledger, self.global_step + 1
        if ledger.num_steps == 0:
            return f"{ledger.path} is empty"
        if ledger.num_steps < num_steps:
            found = f"ends after step {ledger.num_steps}"
            return f"{ledger.path} {found}, the point was written after step {num_steps}"
        return f"{ledger.path} is of another run, or a copy from before the point was written"


def newest_step(root: Path) -> int | None:
    """The step of the newest point under `root`, unverified; None when there is none."""
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
        advice = f"set recover.on_damage=previous to go on from the point before it, or {advice}"
    if isinstance(error, ForeignLedgerError):
        database = point.ledger.path.name
        return RecoverError(
            f"recover point {point.path} does not belong to the run's ledger: {fault}. Going on "
            f"would train prompts twice. Put its {database} back (with {database}-wal, where there "
            f"is one), or {advice}"
        )
    file = (Path(folder) / name).relative_to(point.path)
    return RecoverError(
        f"recover point {point.path} is damaged: {file}: {fault}. To go on, {advice}"
    )
