"""Temporary folders that do not outlive their owners, not even killed ones.

    with ScratchFolder("ranks") as folder:       # or close(); also when it is garbage
        (folder / "rendezvous").touch()
    ScratchFolder("weights", place="/dev/shm", label="my-run").path
                                                 # /dev/shm/areal-weights.my-run-x7_k2m1p
    sweep(root)                                  # removes what killed processes left in `root`

A folder lies in the one that AREAL_SCRATCH names, which a run sets for all its processes to a place
in its own folder, else in the system's temporary folder; `place` says otherwise. Its name is random
and only its user can look into it. Its owner holds a lock on it, which the kernel frees when the
owner ends in any way: a folder whose lock is free is nobody's. Where the file system knows no locks
nothing is swept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import tempfile
import weakref
from collections.abc import Generator
from pathlib import Path

VARIABLE = "AREAL_SCRATCH"
_NAME = re.compile(r"areal-[a-z]+\.(?:[A-Za-z0-9_.-]+-)?[A-Za-z0-9_]{8}")
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ScratchFolder:
    """An empty folder in `path`, removed by `close`. `kind` is one word, for its name."""

    def __init__(self, kind: str, *, place: str | Path | None = None, label: str = "") -> None:
        label = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', label)[:60]}-" if label else ""
        self.path, lock = _make(f"areal-{kind}.{label}", place or _default_place())
        self.close = weakref.finalize(self, _end, self.path, lock, os.getpid())  # does it once

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@contextlib.contextmanager
def kept_in(root: Path) -> Generator[None]:
    """Scratch folders of this process and of those it starts meanwhile lie in `root`.

    What killed processes have left there, and in the system's temporary folder, goes first.
    """
    root.mkdir(mode=0o700, exist_ok=True)
    sweep(root)
    sweep(tempfile.gettempdir())
    try:
        with variable_set(VARIABLE, str(root.absolute())):
            yield
    finally:
        sweep(root)  # of children that were ended, not asked
        with contextlib.suppress(OSError):  # not empty: one of them lives on
            root.rmdir()


@contextlib.contextmanager
def variable_set(name: str, value: str) -> Generator[None]:
    """An environment variable, for this process and those it starts meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def sweep(root: str | Path) -> list[Path]:
    """Remove the folders in `root` whose owners are gone and were this user's."""
    removed: list[Path] = []
    for folder in sorted(Path(root).glob("areal-*")):
        if _NAME.fullmatch(folder.name) and (lock := _lock(folder)) is not None:
            _remove(folder, lock)
            removed.append(folder)
    return removed


def _default_place() -> str:
    root = os.environ.get(VARIABLE)
    # It may be that of a run on another machine.
    return root if root is not None and os.path.isdir(root) else tempfile.gettempdir()


def _make(prefix: str, place: str | Path) -> tuple[Path, int | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
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
        if _is_private(descriptor):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _is_private(descriptor: int) -> bool:
    """Nobody else can have put something there."""
    found = os.fstat(descriptor)
    return found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077 == 0


def _open(folder: Path) -> int:
    return os.open(folder, _OPEN_FOLDER)


def _end(folder: Path, lock: int | None, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # not a fork of the owner, which ends before it
        _remove(folder, lock)


def _remove(folder: Path, lock: int | None) -> None:
    with contextlib.suppress(OSError):  # what somebody still writes to goes with the next sweep
        remove_tree(folder)
    if lock is not None:
        os.close(lock)


def remove_tree(path: str | Path) -> None:
    """Remove a folder whoever has filled it: no link is followed, no depth or mode is too much.

    OSError when somebody still writes there.
    """
    top = os.open(path, _OPEN_FOLDER)
    try:
        names = os.listdir(top)
        while names:
            names += _remove_entry(top, names.pop())
    finally:
        os.close(top)
    os.rmdir(path)


def _remove_entry(top: int, name: str) -> list[str]:
    """Removes one entry of the folder `top`; the folders inside it become entries of `top`."""
    if _unlink(name, top):
        return []
    os.chmod(name, 0o700, dir_fd=top)
    folder = os.open(name, _OPEN_FOLDER, dir_fd=top)
    moved: list[str] = []
    try:
        for inner in os.listdir(folder):
            if not _unlink(inner, folder):
                moved.append(secrets.token_hex(16))
                os.chmod(inner, 0o700, dir_fd=folder)  # a folder moves only with this right
                os.rename(inner, moved[-1], src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)
    return moved


def _unlink(name: str, folder: int) -> bool:
    """False for a folder."""
    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        return False
    os.unlink(name, dir_fd=folder)
    return True
