"""Temporary folders that do not outlive their owners, not even killed ones.

    with ScratchFolder("ranks") as folder:       # or close(), or garbage collection
        (folder / "rendezvous").touch()
    ScratchFolder("weights", place="/dev/shm", label="my-run").path
                                                 # /dev/shm/areal-weights.my-run-x7_k2m1p
    sweep(root)                                  # removes what killed processes left in `root`

A folder is created in `place`, by default in AREAL_SCRATCH (set by a run, for all its processes, to
a folder of its own), else in the system's temporary folder. Its name is random and its mode
private. The owner holds a lock on it, which the kernel releases however the owner ends: a folder
without a held lock is abandoned. On file systems without locks nothing is swept.
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
        self.close = weakref.finalize(self, _end, self.path, lock, os.getpid())  # runs once

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@contextlib.contextmanager
def kept_in(root: Path) -> Generator[None]:
    """Scratch folders of this process and of those it starts meanwhile are created in `root`.

    Abandoned ones there and in the system's temporary folder are removed first.
    """
    root.mkdir(mode=0o700, exist_ok=True)
    sweep(root)
    sweep(tempfile.gettempdir())
    try:
        with variable_set(VARIABLE, str(root.absolute())):
            yield
    finally:
        sweep(root)  # folders of children that were killed
        with contextlib.suppress(OSError):  # not empty: a child still runs
            root.rmdir()


@contextlib.contextmanager
def variable_set(name: str, value: str) -> Generator[None]:
    """Set an environment variable, for this process and those it starts meanwhile."""
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
    """Remove the abandoned folders of this user in `root`."""
    removed: list[Path] = []
    for folder in sorted(Path(root).glob("areal-*")):
        if _NAME.fullmatch(folder.name) and (lock := _lock(folder)) is not None:
            _remove(folder, lock)
            removed.append(folder)
    return removed


def _default_place() -> str:
    root = os.environ.get(VARIABLE)
    # The variable may come from a run on another machine.
    return root if root is not None and os.path.isdir(root) else tempfile.gettempdir()


def _make(prefix: str, place: str | Path) -> tuple[Path, int | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        try:
            descriptor = _open(folder)
        except FileNotFoundError:
            continue  # a starting run has just swept it
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)  # a starting run is sweeping it
        except OSError:
            os.close(descriptor)
            return folder, None
        else:
            if folder.is_dir():
                return folder, descriptor
            os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """A descriptor holding the folder's lock; None if it has an owner or is another user's."""
    try:
        descriptor = _open(folder)
    except OSError:  # a link, a file, removed, or not readable
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
    """Whether no other user can have written there."""
    found = os.fstat(descriptor)
    return found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077 == 0


def _open(folder: Path) -> int:
    return os.open(folder, _OPEN_FOLDER)


def _end(folder: Path, lock: int | None, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # not in a fork of the owner, which may end before it
        _remove(folder, lock)


def _remove(folder: Path, lock: int | None) -> None:
    with contextlib.suppress(OSError):  # a folder still written to is removed by the next sweep
        remove_tree(folder)
    if lock is not None:
        os.close(lock)


def remove_tree(path: str | Path) -> None:
    """Remove a folder with any contents: links are not followed, any depth and mode.

    OSError if a process still writes there.
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
    """Remove one entry of the folder `top`; folders inside it become entries of `top`."""
    if _unlink(name, top):
        return []
    os.chmod(name, 0o700, dir_fd=top)
    folder = os.open(name, _OPEN_FOLDER, dir_fd=top)
    moved: list[str] = []
    try:
        for inner in os.listdir(folder):
            if not _unlink(inner, folder):
                moved.append(secrets.token_hex(16))
                os.chmod(inner, 0o700, dir_fd=folder)  # required to move a folder
                os.rename(inner, moved[-1], src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)
    return moved


def _unlink(name: str, folder: int) -> bool:
    """False if it is a folder."""
    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        return False
    os.unlink(name, dir_fd=folder)
    return True
