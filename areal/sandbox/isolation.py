"""How the namespaces of a sandbox session are made: by bubblewrap, or by ourselves.

In: limits and a folder to mount on. Out: the command that becomes the session, or SandboxError with
what to change. As root our own namespaces come first, because they give commands a user of their
own; for other users bubblewrap does, which may have rights that we have not.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal.sandbox import session_init
from areal.sandbox.addresses import Address, inside_ips
from areal.sandbox.limits import SessionLimits, is_below

# `areal` itself is not imported inside: that would need its packages, and time.
_BOOT = """
import sys, types
for name, folder in (("areal", sys.argv[1] + "/.."), ("areal.sandbox", sys.argv[1])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
sys.modules["areal"].sandbox = sys.modules["areal.sandbox"]
"""
_OWN = _BOOT + "from areal.sandbox import namespaces\nnamespaces.main(*map(int, sys.argv[2:]))\n"
_INSIDE = _BOOT + "from areal.sandbox import session_init\nsession_init.boot(int(sys.argv[2]))\n"
_HERE = str(Path(__file__).parent)
_INSIDE_HERE = "/.areal/sandbox"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_SYSTEM_FILES = ("/etc/alternatives", "/etc/localtime")
# For TLS; the folders beside them may hold private keys.
_CERTIFICATES = (
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/certs",
    "/etc/pki/ca-trust",
)
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_LINKS = (
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
    ("/tmp", f"{session_init.WORKSPACE}/.tmp"),
)
ADVICE = (
    "install bubblewrap (apt-get install bubblewrap), or allow user namespaces: sysctl "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0 and a "
    "user.max_user_namespaces above 0; in a container, start it with --security-opt "
    "seccomp=unconfined and without a masked /proc; Linux 5.12 or later is needed"
)


class SandboxError(RuntimeError):
    """A session could not be started, or was lost: never a result of the code in it."""


def ways() -> list[str]:
    """Names of the ways to try, in order."""
    if sys.platform != "linux":
        raise SandboxError(f"sandbox sessions need Linux, and this is {sys.platform}")
    own, other = ["namespaces"], ["bubblewrap"] if shutil.which("bwrap") else []
    return own + other if os.geteuid() == 0 else other + own


def command(way: str, settings: dict[str, Any], fd: int) -> list[str]:
    """A program that becomes the session, and dies with this process."""
    program = [interpreter(), "-I", "-S", "-c"]
    if way == "namespaces":
        return [*program, _OWN, _HERE, str(fd), str(os.getpid())]
    return [*_bubblewrap(settings), *program, _INSIDE, _INSIDE_HERE, str(fd)]


def settings_of(limits: SessionLimits, folder: Path) -> dict[str, Any]:
    """What the session has to know; plain data."""
    shown, links = _shown(limits)
    python = limits.python or interpreter()
    path = [str(Path(python).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    environment = {
        "PATH": ":".join(path),
        "HOME": session_init.WORKSPACE,
        "TMPDIR": f"{session_init.WORKSPACE}/.tmp",
        "LANG": "C.UTF-8",
    }
    # A shell asks for it to say where it is: the folder may be a link.
    where = {"PWD": limits.workdir} if limits.writable else {}
    return {
        **asdict(limits),
        "env": {**environment, **where, **limits.env},
        "folder": str(folder),
        "folders": _own_folders(limits),
        **_network(limits),
        "shown": shown,
        "links": links,
        "devices": [path for path in _DEVICES if os.path.exists(path)],
    }


def interpreter() -> str:
    """Of areal's own Python, not of its virtual environment."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return os.path.realpath(os.path.join(sys.base_exec_prefix, "bin", version))


def _shown(limits: SessionLimits) -> tuple[list[str], list[tuple[str, str]]]:
    """(paths to bind, links to make): system folders, Python, and what the user lists."""
    wanted = [*_SYSTEM, *_SYSTEM_FILES, *limits.readable]
    wanted += _CERTIFICATES if limits.network else ()
    for prefix in _prefixes(limits.python):
        wanted.append(prefix)
    shown: list[str] = []
    links = list(_LINKS)
    for path in wanted:
        path, real = os.path.normpath(path), os.path.realpath(path)
        if os.path.islink(path):  # to be shown with what it leads to
            links.append((path, real))
            path = real
        if os.path.exists(path) and not _is_below(path, shown):
            shown.append(path)
    for path in limits.writable:
        if not any(path != other and is_below(path, other) for other in limits.writable):
            inside = [one for one in shown if is_below(one, path) or is_below(path, one)]
            if inside:
                raise ValueError(f"sandbox.writable: {path} would hide {inside[0]}")
            links.append((path, session_init.own_folder(path)))
    # A folder that holds something to show cannot be a link.
    places = [*shown, *(path for path, _ in links)]
    return shown, [
        (path, to)
        for path, to in links
        if not any(place != path and is_below(place, path) for place in places)
    ]


def _network(limits: SessionLimits) -> dict[str, Any]:
    """Sockets to listen on inside, and the files by which names lead to them."""
    addresses = [Address.of(entry) for entry in limits.network]
    ips = inside_ips(addresses)
    hosts = "".join(f"{ip} {name}\n" for name, ip in ips.items())
    files = {"/etc/hosts": hosts, "/etc/nsswitch.conf": "hosts: files\n"} if addresses else {}
    return {"files": files, "listen": [(ips[one.name], one.port) for one in addresses]}


def _own_folders(limits: SessionLimits) -> list[str]:
    """To be made in the session; `workdir` may lie in one of them."""
    wanted = [*limits.writable, limits.workdir]
    return [
        path if is_below(path, session_init.WORKSPACE) else session_init.own_folder(path)
        for path in wanted
        if path != session_init.WORKSPACE
    ]


def _prefixes(python: str) -> list[str]:
    own = [os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)]
    if not python:
        return own
    environment = Path(python).parent.parent  # of bin/python
    real = Path(os.path.realpath(python)).parent.parent
    return [*own, str(environment), str(real)]


def _is_below(path: str, shown: list[str]) -> bool:
    return any(is_below(path, one) for one in shown)


def _bubblewrap(settings: dict[str, Any]) -> list[str]:
    agent = str(session_init.AGENT_ID)
    argv = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        "--unshare-user",  # `all` goes on without, and then fails at the next option
        "--die-with-parent",
        "--as-pid-1",
        "--new-session",
    ]
    argv += ["--hostname", "sandbox", "--uid", agent, "--gid", agent, "--cap-drop", "ALL"]
    for path in settings["shown"]:
        argv += ["--ro-bind", path, path]
    argv += ["--ro-bind", _HERE, _INSIDE_HERE]
    for number, (path, text) in enumerate(settings["files"].items()):
        copy = Path(settings["folder"]) / str(number)
        copy.write_text(text, encoding="utf-8")
        argv += ["--ro-bind", str(copy), path]
    if settings["listen"]:  # on ports below 1024, by process 1 alone
        argv += ["--cap-add", "CAP_NET_BIND_SERVICE"]
    zeros = Path(settings["folder"]) / "zeros"
    session_init.write_zeros(str(zeros))
    argv += ["--ro-bind", str(zeros), session_init.ZEROS]
    for path in settings["devices"]:
        argv += ["--dev-bind", path, path]
    for path, target in settings["links"]:
        argv += ["--symlink", target, path]
    size = str(settings["disk_mb"] << 20)
    argv += ["--proc", "/proc", "--size", size, "--tmpfs", session_init.WORKSPACE]
    return [*argv, "--remount-ro", "/", "--chdir", "/", "--"]
