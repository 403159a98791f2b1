"""Temporary folders that do not outlive their owners, not even killed ones.

    with ScratchFolder("ranks") as folder:       # or close(); also when it is garbage
        (folder / "rendezvous").touch()
    sweep(root)                                  # removes what killed processes left in `root`

A folder lies in the one that AREAL_SCRATCH names, which a run sets for all its processes to a place
in its own folder, else in the system's temporary folder. Only its user can look into it. Its owner
holds a lock on it, which the kernel frees when the owner ends in any way: a folder whose lock is
free is nobody's. Where the file system knows no locks nothing is swept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "AREAL_SCRATCH"
# The dot tells them from other folders of ours (weight_sync/), whatever a run is called.
_NAME = re.compile(r"areal-[a-z]+\.[A-Za-z0-9_]{8}")


class ScratchFolder:
    """An empty folder in `path`, removed by `close`. `kind` is one word, for its name."""

    def __init__(self, kind: str) -> None:
        self.path, lock = _make(f"areal-{kind}.")
        self.close = weakref.finalize(self, _end, self.path, lock, os.getpid())  # does it once

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@contextlib.contextmanager
def kept_in(root: Path) -> Iterator[None]:
    """Scratch folders of this process and of those it starts meanwhile lie in `root`.

    What killed processes have left there, and in the system's temporary folder, goes first.
    """
    root.mkdir(mode=0o700, exist_ok=True)
    sweep(root)
    sweep(tempfile.gettempdir())
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(root.absolute())
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
        sweep(root)  # of children that were ended, not asked
        with contextlib.suppress(OSError):  # not empty: one of them lives on
            root.rmdir()


def sweep(root: str | Path) -> list[Path]:
    """Remove the folders in `root` whose owners are gone and were this user's."""
    removed = []
    for folder in sorted(Path(root).glob("areal-*")):
        if _NAME.fullmatch(folder.name) and (lock := _lock(folder)) is not None:
            _remove(folder, lock)
            removed.append(folder)
    return removed


def _make(prefix: str) -> tuple[Path, int | None]:
    root = os.environ.get(VARIABLE)
    if root is not None and not os.path.isdir(root):
        root = None  # that of a run on another machine
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        try:
            descriptor = _open(folder)
        except FileNotFoundError:
            continue  # a run that starts has just swept it
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)  # and is doing so now
        except OSError:
            os.close(descriptor)
            return folder, None
        else:
            if folder.is_dir():
                return folder, descriptor
            os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """An open file with the folder's lock; None when it has an owner, or another user's."""
    try:
        descriptor = _open(folder)
    except OSError:  # a link, a file, gone, or not ours to read
        return None
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _end(folder: Path, lock: int | None, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # not a fork of the owner, which ends before it
        _remove(folder, lock)


def _remove(folder: Path, lock: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)
