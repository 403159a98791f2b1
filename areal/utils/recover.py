"""Recover points: what a killed run goes on from.

A point is a folder `step_{G}` with the engine's files, `state.json` (the run's small state) and
`manifest.json` (size and checksum of every other file, and the run's identity). It appears in one
rename after everything is on the disk; the point before it stays until then, so no crash destroys
the only copy. A point that does not verify is an error, never a silent fresh start.

    store = RecoverStore(paths.recover, identity={"actor.path": "..."}, keep=2)
    store.save(step, lambda folder: engine.save(meta_of(folder)), {"timer": timer.state_dict()})
    point = store.latest()                 # None: a fresh run
    state = point.load()                   # verified; then read the engine's files in point.path
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.utils import logging
from areal.utils.fs import atomic_folder, checksum, remove_leftovers

logger = logging.getLogger("Recover")

_FORMAT = 1
_MANIFEST = "manifest.json"
_STATE = "state.json"
_POINT_NAME = re.compile(r"step_(\d+)")


class RecoverError(RuntimeError):
    """A recover point exists but cannot be used; the text says why and what to do."""


class RecoverStore:
    """The recover points of one run, under `root`; one process owns it.

    `identity` holds the config values that must be the same when the run goes on (JSON values by
    dotted key): weights of one model must not be loaded into another.
    """

    def __init__(self, root: Path, *, identity: Mapping[str, Any], keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"recover.keep must be at least 1, got {keep}")
        self._root = root
        self._identity = json.loads(json.dumps(identity))  # as it will be read back
        self._keep = keep

    def save(
        self, global_step: int, write_files: Callable[[Path], None], state: Mapping[str, Any]
    ) -> Path:
        """Write the point after `global_step`; older points beyond `keep` go afterwards."""
        path = self._root / f"step_{global_step}"
        with atomic_folder(path) as scratch:
            write_files(scratch)
            (scratch / _STATE).write_text(json.dumps(state), encoding="utf-8")
            manifest = {
                "format": _FORMAT,
                "global_step": global_step,
                "identity": self._identity,
                "files": _describe_files(scratch),
            }
            (scratch / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        self._prune()
        return path

    def latest(self) -> RecoverPoint | None:
        """The newest point, unverified; None when the run has none."""
        if self._root.is_dir():
            remove_leftovers(self._root)
        points = self._points()
        return RecoverPoint(points[-1], self._identity) if points else None

    def oldest_step(self) -> int | None:
        """The step of the oldest point kept: nobody will ask for anything before it."""
        points = self._points()
        return _step_of(points[0]) if points else None

    def _points(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        found = [p for p in self._root.iterdir() if _POINT_NAME.fullmatch(p.name)]
        return sorted(found, key=_step_of)

    def _prune(self) -> None:
        for path in self._points()[: -self._keep]:
            # Renamed first: a kill in the middle of the deletion must not leave half a point.
            doomed = path.with_name(f".deleting-{path.name}")
            path.rename(doomed)
            shutil.rmtree(doomed)
        for doomed in self._root.glob(".deleting-*"):
            shutil.rmtree(doomed)


@dataclass(frozen=True, slots=True)
class RecoverPoint:
    """One recover point on disk."""

    path: Path
    identity: dict[str, Any]  # of the run that wants to go on

    @property
    def global_step(self) -> int:
        """The last step whose update is in the weights."""
        return _step_of(self.path)

    def load(self) -> dict[str, Any]:
        """Verify every byte of the point and return the run's state."""
        self.check_identity()
        self._check_files(self._manifest()["files"])
        logger.info("going on from %s", self.path)
        return self._read_json(_STATE)

    def check_identity(self) -> None:
        """ValueError when the run that wants to go on is another one than was saved."""
        saved = self._manifest()["identity"]
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

    def _manifest(self) -> dict[str, Any]:
        manifest = self._read_json(_MANIFEST)
        if manifest.get("format") != _FORMAT:
            raise self._error(_MANIFEST, f"format {manifest.get('format')}, expected {_FORMAT}")
        return manifest

    def _check_files(self, expected: dict[str, dict[str, int]]) -> None:
        for name, facts in expected.items():
            file = self.path / name
            if not file.is_file():
                raise self._error(name, "missing")
            size = file.stat().st_size
            if size != facts["nbytes"]:
                raise self._error(name, f"{size} bytes, expected {facts['nbytes']}")
            if checksum(file) != facts["crc32"]:
                raise self._error(name, "its checksum differs from the manifest")

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise self._error(name, "missing") from None
        except ValueError as err:  # bad UTF-8 or bad JSON
            raise self._error(name, f"unreadable ({err})") from err

    def _error(self, name: str, fault: str) -> RecoverError:
        return RecoverError(
            f"recover point {self.path} is damaged: {name}: {fault}. Delete that folder to go on "
            "from the point before it, or choose a new trial_name to start afresh"
        )


def _step_of(path: Path) -> int:
    match = _POINT_NAME.fullmatch(path.name)
    assert match, path
    return int(match[1])


def _describe_files(folder: Path) -> dict[str, dict[str, int]]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {
        str(p.relative_to(folder)): {"nbytes": p.stat().st_size, "crc32": checksum(p)}
        for p in files
    }
