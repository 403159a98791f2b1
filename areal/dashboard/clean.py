"""What can be deleted of runs without harm: found first, deleted only when told to.

    found = find_waste(folder, checkpoints=False)     # [Waste], nothing is touched
    delete_waste(found)

Never: anything of a run that is alive, was written to minutes ago, or cannot be read; a recover
point of a run that can resume; the newest checkpoint of a role; the final model; run.db; logs.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from areal.dashboard.reader import RunReader, UnreadableRunError, find_runs
from areal.run.checkpoints import saved_checkpoints
from areal.run.database import lock_run
from areal.run.paths import RunPaths
from areal.run.recover import newest_step
from areal.utils.fs import is_leftover

_QUIET_S = 600.0  # since the last write: a run of another machine cannot be seen otherwise


@dataclass(frozen=True, slots=True)
class Waste:
    run: Path
    path: Path
    why: str
    num_bytes: int


def find_waste(folder: str | Path, *, checkpoints: bool) -> list[Waste]:
    """`checkpoints`: also those that a newer one of their role follows."""
    return [
        Waste(run, path, why, size_of(path))
        for run in find_runs(folder)
        for path, why in _waste_of(RunPaths(run), checkpoints)
    ]


def delete_waste(found: list[Waste]) -> None:
    """RunDatabaseError if a run was started meanwhile; nothing of it is deleted then."""
    for run in dict.fromkeys(one.run for one in found):
        with lock_run(RunPaths(run).database):
            for waste in found:
                if waste.run == run:
                    shutil.rmtree(waste.path)


def size_of(folder: Path) -> int:
    return sum(
        os.lstat(os.path.join(root, name)).st_size
        for root, _, names in os.walk(folder)
        for name in names
    )


def _waste_of(paths: RunPaths, checkpoints: bool) -> Iterator[tuple[Path, str]]:
    state = _state(paths)
    if state not in ("stopped", "finished") or _is_fresh(paths):
        return
    for folder in (paths.scratch, paths.weights, paths.agents):
        if _is_own(folder):
            yield folder, "of processes that have ended"
    has_model = any(paths.model.glob("*.safetensors"))
    parents = [paths.root, *_folders(paths.checkpoints)]
    has_points = _is_own(paths.recover) and newest_step(paths.recover) is not None
    if state == "finished" and has_model and has_points:
        yield paths.recover, "the run has finished; without them it cannot train more steps"
    else:
        parents.append(paths.recover)
    for parent in parents:
        for folder in _folders(parent):
            if is_leftover(folder):
                yield folder, "left half-written by a process that was killed"
    if checkpoints:
        for role in _folders(paths.checkpoints):
            for folder in list(saved_checkpoints(paths.checkpoints, role.name).values())[:-1]:
                yield folder, "a newer checkpoint follows"


def _state(paths: RunPaths) -> str:
    try:
        with RunReader(paths.root) as run:
            return run.summary().state
    except UnreadableRunError:
        return "unreadable"


def _is_fresh(paths: RunPaths) -> bool:
    files = [paths.database, paths.database.with_name(paths.database.name + "-wal")]
    newest = max(file.stat().st_mtime for file in files if file.exists())
    return time.time() - newest < _QUIET_S


def _folders(parent: Path) -> list[Path]:
    if not _is_own(parent):
        return []
    return sorted(one for one in parent.iterdir() if _is_own(one))


def _is_own(folder: Path) -> bool:
    """Not a link, which may lead anywhere."""
    return folder.is_dir() and not folder.is_symlink()
