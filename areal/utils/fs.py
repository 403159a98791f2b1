"""Files and folders that appear whole or not at all.

Everything is written to a hidden sibling (`.NAME.tmp-PID-RANDOM`), flushed to disk and renamed to
its final name, so neither a reader nor a full disk nor `kill -9` leads to a partial file: the name
refers to the old contents or to everything that was written. On an error the sibling is removed and
the OSError names the target. A process killed midway leaves only a hidden sibling, which
`remove_leftovers` deletes.

New files and folders are private to their user whatever the umask (folders 0700, files 0600),
except folders that are meant to be shared.
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

# Errors of a disk that is full, broken, read-only or not ours. Network errors, which are OSErrors
# too, have other numbers or none.
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

    A folder already at `path` is replaced in one step. `durable=False` skips the flush, for folders
    in memory and others that need not survive a power failure. `private=False` leaves the modes to
    the umask, for folders its user may want to share.

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
            flush_to_disk(target.parent)


def atomic_write_bytes(path: str | Path, data: bytes, *, durable: bool = True) -> None:
    """Write `data` to `path`, replacing what was there."""
    target = Path(path)
    with _leaving_nothing_behind(target, private=True) as scratch:
        with open_private(scratch, "xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(scratch, target)
        if durable:
            flush_to_disk(target.parent)


def atomic_write_text(path: str | Path, text: str, *, durable: bool = True) -> None:
    """`atomic_write_bytes` of `text` in UTF-8."""
    atomic_write_bytes(path, text.encode(), durable=durable)


def private_folder(path: str | Path) -> Path:
    """Create the folder and its missing parents, private to this user; returns it."""
    path = Path(path)
    if not path.is_dir():
        private_folder(path.parent)
        path.mkdir(mode=_FOLDER_MODE, exist_ok=True)
        _set_mode(path, _FOLDER_MODE)
    return path


def set_private(path: str | Path) -> None:
    """Set the mode of one existing file or folder."""
    _set_mode(path, _FOLDER_MODE if Path(path).is_dir() else _FILE_MODE)


def open_private(path: str | Path, mode: str, **options: Any) -> IO[Any]:
    """`open` for writing: the file becomes private to this user, also if it existed before."""

    def opener(path: str, flags: int) -> int:
        descriptor = os.open(path, flags, _FILE_MODE)
        _set_mode(descriptor, _FILE_MODE)
        return descriptor

    return open(path, mode, opener=opener, **options)


def flush_to_disk(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_disk_fault(error: OSError) -> bool:
    """Whether the error comes from a disk, not from a network or another process."""
    return error.errno in _DISK_FAULTS


def raise_file_limit() -> None:
    """Raise the limit of open files and sockets to the maximum: the default is often 1,024, fewer
    than a run has requests in flight."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def remove_leftovers(folder: str | Path) -> list[Path]:
    """Remove what killed writers left in `folder`; returns the removed paths.

    Siblings of processes alive on this machine are kept. Call it only where one process owns the
    folder, since process ids of another machine mean nothing here.
    """
    removed = []
    for entry in sorted(Path(folder).iterdir()):
        if is_leftover(entry):
            _remove(entry)
            removed.append(entry)
    return removed


def is_leftover(path: Path) -> bool:
    """Whether a writer began it that is not alive on this machine any more."""
    match = _LEFTOVER.match(path.name)
    return match is not None and not _is_alive(int(match[1]))


def remove_folder(path: Path) -> None:
    """Remove a folder; a kill midway leaves only a hidden leftover, never part of the folder."""
    doomed = _sibling(path)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


@contextlib.contextmanager
def _leaving_nothing_behind(target: Path, private: bool) -> Iterator[Path]:
    """Yields a fresh sibling name of `target`; if it still exists at the end, it is removed."""
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
    """The error number if writing failed, else None."""
    if isinstance(err, OSError) and err.errno is not None:
        # A failed write to an open file names no file.
        is_about = err.filename is None or str(scratch) in str(err.filename)
        return err.errno if is_about and is_disk_fault(err) else None
    # safetensors and tokenizers write in Rust, where a full disk is not an OSError.
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
            if not os.path.islink(path):  # the target of a link is not ours to change
                _set_mode(path, _FILE_MODE)


def _set_mode(path: int | str | Path, mode: int) -> None:
    # Some file systems have no modes; protection there is up to the mount.
    with contextlib.suppress(OSError):
        os.chmod(path, mode)


def _flush_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            flush_to_disk(Path(parent) / name)
        flush_to_disk(Path(parent))


def _move_onto(scratch: Path, target: Path) -> None:
    """Rename a folder to `target`; the old folder gets the scratch name."""
    if not target.exists():
        os.rename(scratch, target)
    elif not _exchange(scratch, target):
        # No atomic exchange (not Linux, or not this file system): the old folder is moved away
        # first, so a kill between the two renames leaves no `target`, but never part of one.
        aside = _sibling(target)
        os.rename(target, aside)
        os.rename(scratch, target)
        _remove(aside)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically; False where unsupported."""
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
