"""Files and folders that appear whole or not at all.

Everything is written to a hidden sibling (`.NAME.tmp-PID-RANDOM`), flushed to the disk, and renamed
onto its final name, so a reader, a full disk or `kill -9` never meets half a file: the name holds
either what it held before or everything that was written. On an error the sibling is removed and
the OSError names the target. A process killed in the middle leaves only a hidden sibling behind;
`remove_leftovers` clears those.

What is made here is private to its user whatever the umask says (folders 0700, files 0600), but for
folders that are meant to be passed on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import resource
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

# What a disk answers that is full, broken, read-only or not ours. Faults of a network, which are
# OSErrors too, have other numbers, or none.
_DISK_FAULTS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ENXIO, errno.ENODEV),
    *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP, errno.ESTALE),
}
_FILE_MODE, _FOLDER_MODE = 0o600, 0o700
_RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_LEFTOVER = re.compile(r"^\..+\.tmp-(\d+)-[0-9a-f]{8}$")


@contextlib.contextmanager
def atomic_folder(
    path: str | Path, *, durable: bool = True, private: bool = True
) -> Iterator[Path]:
    """Yields an empty folder to fill; on leaving the block it becomes `path`.

    A folder already at `path` is replaced in one step. `durable=False` skips the flush, for
    folders in memory and others that need not outlive the machine's power. `private=False` leaves
    the modes to the umask, for what its user may want to give to others.

        with atomic_folder(run / "recover" / "step_7") as folder:
            (folder / "state.json").write_text(text)
    """
    target = Path(path)
    with _leaving_nothing_behind(target, private) as scratch:
        if private:
            private_folder(scratch)
        else:
            scratch.mkdir()
        yield scratch
        if private:
            _make_private(scratch)
        if durable:
            _flush_tree(scratch)
        _move_onto(scratch, target)
        if durable:
            _flush(target.parent)


def atomic_write_bytes(path: str | Path, data: bytes, *, durable: bool = True) -> None:
    """Puts `data` at `path`, replacing what was there."""
    target = Path(path)
    with _leaving_nothing_behind(target, private=True) as scratch:
        with open_private(scratch, "xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(scratch, target)
        if durable:
            _flush(target.parent)


def atomic_write_text(path: str | Path, text: str, *, durable: bool = True) -> None:
    """`atomic_write_bytes` of `text` in UTF-8."""
    atomic_write_bytes(path, text.encode(), durable=durable)


def private_folder(path: str | Path) -> Path:
    """Makes the folder and what is missing above it, for this user alone; returns it."""
    path = Path(path)
    if not path.is_dir():
        private_folder(path.parent)
        path.mkdir(mode=_FOLDER_MODE, exist_ok=True)
        _set_mode(path, _FOLDER_MODE)
    return path


def set_private(path: str | Path) -> None:
    """The mode of one file or folder that is there already."""
    _set_mode(path, _FOLDER_MODE if Path(path).is_dir() else _FILE_MODE)


def open_private(path: str | Path, mode: str, **options: Any) -> IO[Any]:
    """`open` for writing: the file is this user's alone, also if it was there before."""

    def opener(path: str, flags: int) -> int:
        descriptor = os.open(path, flags, _FILE_MODE)
        _set_mode(descriptor, _FILE_MODE)
        return descriptor

    return open(path, mode, opener=opener, **options)


def is_disk_fault(error: OSError) -> bool:
    """Whether a disk has refused something; else it is a network, or another process."""
    return error.errno in _DISK_FAULTS


def raise_file_limit() -> None:
    """Let this process have as many open files and sockets as it may: by default that is often
    1,024, fewer than a run has requests in flight."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower bound of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def remove_leftovers(folder: str | Path) -> list[Path]:
    """Removes what writers killed in the middle left in `folder`; returns what it removed.

    Siblings of processes that still live on this machine are spared. Call it where one process
    owns the folder, since the id of a process on another machine means nothing here.
    """
    removed = []
    for entry in sorted(Path(folder).iterdir()):
        match = _LEFTOVER.match(entry.name)
        if match and not _is_alive(int(match[1])):
            _remove(entry)
            removed.append(entry)
    return removed


def remove_folder(path: Path) -> None:
    """Removes a folder; a kill in the middle leaves no half of it, only a hidden leftover."""
    doomed = _sibling(path)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


@contextlib.contextmanager
def _leaving_nothing_behind(target: Path, private: bool) -> Iterator[Path]:
    """Yields a fresh sibling name of `target`; what still has that name at the end is removed."""
    if private:
        private_folder(target.parent)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
    scratch = _sibling(target)
    try:
        yield scratch
    except Exception as err:
        code = _write_fault(err, scratch)
        if code is None:
            raise
        reason = f"{os.strerror(code)}: could not write {target} (it was left as it was)"
        raise OSError(code, reason) from err
    finally:
        _remove(scratch)


def _sibling(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def _write_fault(err: Exception, scratch: Path) -> int | None:
    """The error number if the fault lies in the writing, else None."""
    if isinstance(err, OSError) and err.errno is not None:
        # A failed write of an open file names no file.
        is_about = err.filename is None or str(scratch) in str(err.filename)
        return err.errno if is_about and is_disk_fault(err) else None
    # safetensors and tokenizers write in Rust, and a full disk is no OSError there.
    match = _RUST_OS_ERROR.search(str(err))
    return int(match[1]) if match and int(match[1]) in _DISK_FAULTS else None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _make_private(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        _set_mode(parent, _FOLDER_MODE)
        for path in (os.path.join(parent, name) for name in names):
            if not os.path.islink(path):  # what it points to is not ours to change
                _set_mode(path, _FILE_MODE)


def _set_mode(path: int | str | Path, mode: int) -> None:
    # Some file systems know no modes; what guards a run there is up to whoever mounted it.
    with contextlib.suppress(OSError):
        os.chmod(path, mode)


def _flush_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            _flush(Path(parent) / name)
        _flush(Path(parent))


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _move_onto(scratch: Path, target: Path) -> None:
    """Renames a folder onto `target`; the old folder ends up under the scratch name."""
    if not target.exists():
        os.rename(scratch, target)
    elif not _exchange(scratch, target):
        # No atomic exchange here (not Linux, or a file system without it): the old folder steps
        # aside first, so a kill between the two renames leaves no `target`, but never half of one.
        aside = _sibling(target)
        os.rename(target, aside)
        os.rename(scratch, target)
        _remove(aside)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two names in one atomic step; False where the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # a C library without the call
        return False
    at_cwd, exchange = -100, 2
    return renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
