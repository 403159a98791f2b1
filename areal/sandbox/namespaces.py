"""Builds the world of a sandbox session with user namespaces, then becomes its process 1.

    this process     clones process 1 into new namespaces (users, mounts, processes, network, IPC,
                     host name, cgroups), maps its users, waits for its end
    process 1        builds a root of read-only system folders and one small tmpfs, moves there, and
                     runs `session_init`

Started by root, commands get a user id that no one else has; else they have that of the caller, as
user 1000. Standard library only: `isolation` loads it by its path.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct

from areal.sandbox import session_init

TYPE_CHECKING = False
if TYPE_CHECKING:  # each import delays the start of a session
    from typing import Any

_NEW_ALL = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_MNT_DETACH = 2
_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_READ_ONLY, _NO_SETUID, _NO_DEVICES = 1, 2, 4
_PR_SET_PDEATHSIG, _SIGKILL, _SIGCHLD = 1, 9, 17
# machine -> numbers of system calls that libc has no function for, or one that does more
_NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155},
    "aarch64": {"clone": 220, "pivot_root": 41},
}
_FIRST_AGENT_ID = 1 << 30  # above all that systems hand out

_libc = ctypes.CDLL(None, use_errno=True)


def main(fd: int, parent_pid: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent_pid:  # it ended before this call
        return
    order = session_init.Order(fd)
    mapped, go = os.pipe()
    try:
        pid = _clone()
    except OSError as error:
        session_init.say_fatal(fd, f"user namespace: {error.strerror}")
        return
    if pid == 0:
        os.close(go)
        _libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL)
        if os.read(mapped, 1):  # else the first process is gone
            _serve(order)
        os._exit(1)
    try:
        _map_users(pid)
    except OSError as error:
        session_init.say_fatal(fd, f"user namespace: {error.strerror}")
        os.kill(pid, _SIGKILL)
    os.write(go, b"1")
    os.close(fd)
    os.waitpid(pid, 0)


def _serve(order: session_init.Order) -> None:
    try:
        build_root(order.settings)
    except OSError as error:
        session_init.say_fatal(order.fd, f"{error.filename or 'mount'}: {error.strerror}")
    else:
        session_init.main(order)


def _clone() -> int:
    """fork() into new namespaces. This process has one thread, so that a bare call is enough."""
    number = _NUMBERS[os.uname().machine]["clone"]
    pid = _libc.syscall(number, _NEW_ALL | _SIGCHLD, None, None, None, None)
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "clone")
    return pid


def _map_users(pid: int) -> None:
    """Two users if this process may give a process another id (root), else one."""
    agent, agent_id = session_init.AGENT_ID, _FIRST_AGENT_ID + int.from_bytes(os.urandom(3))
    if os.geteuid() == 0:
        try:
            for kind in ("gid_map", "uid_map"):
                _write(f"/proc/{pid}/{kind}", f"0 0 1\n{agent} {agent_id} 1")
            return
        except OSError:
            pass  # root of a container may have few ids
    if os.path.exists(f"/proc/{pid}/setgroups"):
        _write(f"/proc/{pid}/setgroups", "deny")
    for kind, own in (("gid_map", os.getegid()), ("uid_map", os.geteuid())):
        _write(f"/proc/{pid}/{kind}", f"{agent} {own} 1")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def build_root(settings: dict[str, Any]) -> None:
    """Inside of the new namespaces: `settings["folder"]` becomes the root."""
    root = settings["folder"]
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m,nr_inodes=4k")
    for path in settings["shown"]:
        _show(path, root + path)
    for path in settings["devices"]:
        _show(path, root + path, is_device=True)
    _make_parents(root + session_init.ZEROS)
    session_init.write_zeros(root + session_init.ZEROS)
    for path, text in settings["files"].items():
        _make_parents(root + path)
        _write(root + path, text)
    for path, target in settings["links"]:
        _make_parents(root + path)
        os.symlink(target, root + path)
    os.mkdir(f"{root}/proc")
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _mount("proc", f"{root}/proc", "proc", flags, "subset=pid,hidepid=2")
    agent = session_init.AGENT_ID
    options = f"mode=755,uid={agent},gid={agent},size={settings['disk_mb']}m,nr_inodes=64k"
    os.mkdir(root + session_init.WORKSPACE)
    _mount("tmpfs", root + session_init.WORKSPACE, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    _set_attributes(root, _READ_ONLY)
    _enter(root)
    ctypes.CDLL(None).sethostname(b"sandbox", 7)


def _show(path: str, target: str, *, is_device: bool = False) -> None:
    """Bind `path`, read-only with all that is mounted below it."""
    _make_parents(target)
    if stat.S_ISDIR(os.stat(path).st_mode):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    _mount(path, target, None, _MS_BIND | _MS_REC)
    attributes = 0 if is_device else _READ_ONLY | _NO_DEVICES
    _set_attributes(target, attributes | _NO_SETUID, _AT_RECURSIVE)


def _make_parents(path: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    data = None if options is None else options.encode()
    if _libc.mount(*texts, ctypes.c_ulong(flags), data) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"mount {target}")


def _set_attributes(target: str, attributes: int, flags: int = 0) -> None:
    what = struct.pack("<QQQQ", attributes, 0, 0, 0)
    done = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, target.encode(), flags, what, ctypes.c_size_t(len(what))
    )
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"mount {target}")


def _enter(root: str) -> None:
    """Make `root` the root, and drop what was there."""
    os.chdir(root)
    number = _NUMBERS[os.uname().machine]["pivot_root"]
    if _libc.syscall(number, b".", b".") < 0 or _libc.umount2(b".", _MNT_DETACH) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "pivot_root")
    os.chdir("/")
