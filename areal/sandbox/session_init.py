"""Process 1 of a sandbox session, until the session is ready: the parent waits for that.

`isolation` starts it, inside of new namespaces (`namespaces.py` or bubblewrap). It is the only
process that lives between calls. In: its settings, as one frame on its socket. Out: a JSON line:

    {"ready": true} | {"fatal": text}

Then it becomes `session_calls`. The imports of that take longer than all that is done here: they
come after the line, so that they overlap with what the parent does with it. Its code is read ahead:
the session does not show our files.

Standard library only, and as little of it as possible: it is loaded by its path, without
site-packages.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # the module takes longer to import than ours
    from typing import Any

AGENT_ID = 1000  # user and group of commands, inside
WORKSPACE = "/workspace"
ZEROS = "/dev/zero"
OWN_ROOT = f"{WORKSPACE}/.root"  # holds folders that appear elsewhere, so that all share one limit
_PR_SET_DUMPABLE = 4
_NUM_ZEROS = 1 << 42  # hours of reading; ext4 has files of up to 16 TiB
_SIZE_BYTES = 4  # of a frame, before it
_PACKAGE = "areal.sandbox"
_FOR_CALLS = ("confine", "cpu_clock", "session_calls")  # each imports those before it


class Order:
    """What the parent sent, and the code to carry it out."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self.fd = fd
        self.settings = _receive(fd)
        if self.settings["listen"]:
            import areal.sandbox.listeners  # noqa: F401 (while it can be read)
        self._code = {name: _code_of(name) for name in _FOR_CALLS}

    def import_calls(self) -> Any:
        """The module `session_calls`."""
        package = sys.modules[_PACKAGE]
        for name, code in self._code.items():
            module = types.ModuleType(f"{_PACKAGE}.{name}")
            sys.modules[module.__name__] = module
            setattr(package, name, module)
            exec(code, module.__dict__)
        return sys.modules[f"{_PACKAGE}.session_calls"]


def boot(fd: int) -> None:
    """Where another program has built the namespaces."""
    main(Order(fd))


def main(order: Order) -> None:
    """Serve calls until the parent closes its end."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)  # its memory and files are closed to commands
    if os.getpgid(0) != os.getpid():  # else it leads a session already
        os.setsid()
    os.chdir(WORKSPACE)
    _make_folders([f"{WORKSPACE}/.tmp", *order.settings["folders"]])
    if order.settings["listen"]:
        from areal.sandbox import listeners

        try:
            listeners.hand_out(order.settings)
        except OSError as error:
            say_fatal(order.fd, f"sandbox.network: {error}")
            return
    _say(order.fd, b'{"ready": true}')
    order.import_calls().serve(order.fd, order.settings)


def write_zeros(path: str) -> None:
    """What stands for /dev/zero: a file of holes. A mapping of the device that several processes
    share is memory that no limit counts."""
    with open(path, "wb") as file:
        os.fchmod(file.fileno(), 0o444)
        file.truncate(_NUM_ZEROS)


def own_folder(path: str) -> str:
    """Where a folder of the session's own that appears at `path` lies."""
    return OWN_ROOT + path


def _make_folders(paths: list[str]) -> None:
    """With their parents, all of them the agent's."""
    for path in paths:
        parts = path.removeprefix(f"{WORKSPACE}/").split("/")
        for count in range(1, len(parts) + 1):
            folder = os.path.join(WORKSPACE, *parts[:count])
            try:
                os.mkdir(folder, 0o755)
            except FileExistsError:
                continue
            if os.getuid() == 0:
                os.chown(folder, AGENT_ID, AGENT_ID)


def frame(settings: dict[str, Any]) -> bytes:
    """For `Order`, which trusts its parent, of the same version of Python."""
    data = marshal.dumps(settings)
    return len(data).to_bytes(_SIZE_BYTES, "little") + data


def _receive(fd: int) -> dict[str, Any]:
    size = int.from_bytes(_read(fd, _SIZE_BYTES), "little")
    return marshal.loads(_read(fd, size))


def _read(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(fd, size - len(data))
        if not piece:
            os._exit(0)  # the parent has exited
        data += piece
    return data


def _code_of(name: str) -> Any:
    loader = type(__loader__)(f"{_PACKAGE}.{name}", f"{os.path.dirname(__file__)}/{name}.py")
    return loader.get_code(loader.name)


def say_fatal(fd: int, what: str) -> None:
    """`json` takes long to import, and this is rare."""
    import json

    _say(fd, json.dumps({"fatal": what}).encode())


def _say(fd: int, line: bytes) -> None:
    try:
        os.write(fd, line + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent has exited
