"""A folder of a random name that only this user may enter, gone with the process that made it.

    folder = PrivateFolder("/dev/shm", prefix="areal-weights-", name="my-run")
    folder.path                # /dev/shm/areal-weights-my-run-x7_k2m1p, mode 0700
    folder.close()             # removes it, whatever it holds

A process that is killed removes nothing. The next one that makes a folder of the same prefix in the
same place does: a folder of this user whose owner no longer holds its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import tempfile
import time
from pathlib import Path

LOCK = ".owner.lock"
_UNLOCKED_S = 3600.0  # older ones without a lock were left by a process killed just then
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateFolder:
    def __init__(self, place: str | Path, *, prefix: str, name: str = "") -> None:
        remove_abandoned(place, prefix=prefix)
        start = f"{prefix}{name}-" if name else prefix
        while True:
            # mkdtemp never takes a folder that is there already, and makes it 0700.
            self.path = Path(tempfile.mkdtemp(prefix=start, dir=place))
            self._lock = take_lock(self.path)
            if self._lock is not None and (self.path / LOCK).exists():
                return
            # Another process took it for abandoned before it was locked.
            self.close()

    def close(self) -> None:
        """Calling it twice is fine."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                remove_tree(self.path)
            os.close(self._lock)
            self._lock = None


def take_lock(folder: Path) -> int | None:
    """An open file whose lock dies with this process, or None when another process holds it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(folder / LOCK, flags, 0o600)
    except FileNotFoundError:  # the folder itself has just been removed
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def remove_abandoned(place: str | Path, *, prefix: str) -> None:
    """Folders of this user whose owners were killed."""
    for folder in Path(place).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # somebody else is faster
            if _is_ours(folder) and (fd := _abandoned_lock(folder)) is not None:
                remove_tree(folder)
                os.close(fd)


def _is_ours(folder: Path) -> bool:
    """Nobody else can have put something there, or a link in its place."""
    found = os.lstat(folder)
    private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) & 0o077 == 0
    return private and found.st_uid == os.geteuid()


def _abandoned_lock(folder: Path) -> int | None:
    is_new = time.time() - os.lstat(folder).st_mtime < _UNLOCKED_S
    if not (folder / LOCK).exists() and is_new:
        return None
    return take_lock(folder)


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
    moved = []
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
