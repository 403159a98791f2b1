"""A sandbox session: a file tree of its own, and commands that run in it one after another.

    async with await Session.start(SessionLimits(wall_s=5)) as session:
        await session.write_file("data.txt", b"1 2 3")
        result = await session.python("print(sum(map(int, open('data.txt').read().split())))")
        result.output                          # "6\\n"
        await session.shell("ls -l")

In: code that nobody trusts. Out: a Result, whatever the code did: its exit code, its output (cut at
`output_bytes`), and the limit that ended it. SandboxError is never the code's doing alone: the
session could not be started, or its first process is gone, and it cannot be used any more.

The session sees system folders and Python, read-only, and its own files; no network, no process,
file or variable of ours. Commands run in /workspace. Nothing but files survives a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from areal.api.scratch import ScratchFolder
from areal.sandbox.addresses import Address
from areal.sandbox.isolation import ADVICE, SandboxError, command, settings_of, ways
from areal.sandbox.limits import SessionLimits
from areal.sandbox.output import printable
from areal.sandbox.session_init import frame
from areal.sandbox.tunnels import Tunnels
from areal.utils.child_process import describe_exit, spawn

_START_S = 60.0  # on a busy machine
MAX_FILE_BYTES = 1 << 20  # that `read_file` returns
_MAX_NAMES = 64 << 20  # what an archive of `read_tree` has beside the contents of its files
_GRACE_S = 10.0  # beyond a call's time, until a session counts as lost
_MAX_LINE = 1 << 16  # of a reply, without its output
_PIECE = 1 << 20  # of input, sent at once: the event loop has more to do
# -S: sparse files are packed as such. The session's own folders belong to nobody's tree. A folder
# that its owner has closed is opened: tar would leave it out, or fail.
_PACK = (
    '[ -d "$1" ] || exit 44; chmod u+rx "$1" && find "$1/" -type d ! -perm -500 '
    '-exec chmod u+rx {} ";" && exec tar -C "$1" -cSf - --ignore-failed-read --exclude=./.root '
    "--exclude=./.tmp . 2>/dev/null"
)
_NO_FOLDER = 44
_UNPACK = 'mkdir -p "$1" && exec tar -C "$1" -xSf - --no-same-owner'
_WRITE = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
_known_way: list[str] = []  # the first that worked in this process


@dataclass(frozen=True, slots=True)
class Result:
    exit_code: int  # negative: the signal that ended it
    output: str  # of stdout and stderr together
    is_cut: bool  # the output was longer
    limit: str | None  # the key of SessionLimits that it exceeded

    @property
    def text(self) -> str:
        """For the model: the output, and in words what else happened."""
        parts = [self.output.rstrip("\n")]
        if self.is_cut:
            parts.append("[the output is longer]")
        if self.limit is not None:
            parts.append(f"[ended: more than {self.limit} allows]")
        elif self.exit_code != 0:
            parts.append(f"[it {describe_exit(self.exit_code)}]")
        return "\n".join(part for part in parts if part)


class Session:
    """Made by `start`. One call at a time; further ones wait."""

    def __init__(
        self, process: subprocess.Popen[bytes], folder: ScratchFolder, limits: SessionLimits
    ) -> None:
        self._process = process
        self._folder = folder
        self._limits = limits
        self._lock = asyncio.Lock()
        self._tunnels: Tunnels | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, limits: SessionLimits | None = None) -> Session:
        """SandboxError, with what to change, where the system allows no sandbox."""
        limits = limits or SessionLimits()
        failures: list[str] = []
        for way in _known_way or ways():
            try:
                session = await cls._start(way, limits)
            except SandboxError as error:
                failures.append(f"{way}: {error}")
                continue
            _known_way[:] = [way]
            return session
        raise SandboxError(f"no sandbox can be started ({'; '.join(failures)}); {ADVICE}")

    @classmethod
    async def _start(cls, way: str, limits: SessionLimits) -> Session:
        folder = ScratchFolder("sandbox")
        with ExitStack() as on_failure, ExitStack() as theirs:
            on_failure.callback(folder.close)
            ours, their_end = socket.socketpair()
            on_failure.enter_context(ours)
            theirs.enter_context(their_end)
            settings, fds = settings_of(limits, folder.path), [their_end.fileno()]
            handed = None
            if limits.network:
                handed, giving = socket.socketpair()
                on_failure.enter_context(handed)
                fds.append(theirs.enter_context(giving).fileno())
                settings["network_fd"] = giving.fileno()
            argv = command(way, settings, their_end.fileno())
            try:
                process = await _spawned(argv, fds)
            except OSError as error:
                raise SandboxError(f"{argv[0]}: {error.strerror}") from error
            theirs.close()
            session = cls(process, folder, limits)
            on_failure.callback(session._kill)
            await session._shake_hands(ours, frame(settings))
            if handed is not None:
                session._tunnels = _receive_tunnels(handed, limits)
                handed.close()
            on_failure.pop_all()
        return session

    async def _shake_hands(self, channel: socket.socket, settings: bytes) -> None:
        channel.setblocking(False)
        self._reader, self._writer = await asyncio.open_connection(sock=channel, limit=_MAX_LINE)
        self._writer.write(settings)
        await self._receive(_START_S)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", wall_s: float | None = None
    ) -> Result:
        """Run a program; `wall_s` shortens its time."""
        return await self._call({"argv": list(argv)}, stdin, wall_s)

    async def shell(self, script: str, *, wall_s: float | None = None) -> Result:
        return await self.run(["sh", "-c", script], wall_s=wall_s)

    async def python(self, code: str, *, wall_s: float | None = None) -> Result:
        if self._limits.python:
            source = code.encode(errors="surrogatepass")  # Python refuses half a character itself
            return await self.run([self._limits.python, "-"], stdin=source, wall_s=wall_s)
        return await self._call({"code": code}, b"", wall_s)

    async def write_file(self, path: str, data: bytes) -> None:
        """OSError if the session has no room for it, or `path` cannot be written."""
        result = await self.run(["sh", "-c", _WRITE, "sh", path], stdin=data)
        if result.exit_code != 0:
            raise OSError(f"{path}: {result.output.strip() or result.text}")

    async def read_file(self, path: str) -> bytes:
        """OSError if it cannot be read, or has more than MAX_FILE_BYTES."""
        command = {"argv": ["cat", "--", path], "output_bytes": MAX_FILE_BYTES}
        reply, data = await self._exchange(command, b"", None)
        if reply["exit"] != 0 or reply["cut"]:
            too_long = f"has more than {MAX_FILE_BYTES} bytes"
            why = too_long if reply["cut"] else data.decode(errors="replace")
            raise OSError(f"{path}: {why.strip()}")
        return data

    async def read_tree(self, folder: str) -> bytes:
        """All of a folder, for `write_tree` of another session.

        FileNotFoundError if it does not exist, OSError if it cannot be read, or has names of many
        megabytes. Files that commands themselves cannot read are left out.
        """
        argv = ["sh", "-c", _PACK, "sh", folder]
        most = (self._limits.disk_mb << 20) + _MAX_NAMES
        command = {"argv": argv, "output_bytes": most, "workdir": "/"}
        reply, packed = await self._exchange(command, b"", None)
        if reply["exit"] == _NO_FOLDER:
            raise FileNotFoundError(f"{folder} is no folder")
        if reply["exit"] != 0 or reply["cut"] or reply["limit"]:
            why = "it is too large" if reply["cut"] else f"more than {reply['limit']} allows"
            exit_code = f"tar {describe_exit(reply['exit'])}"
            raise OSError(f"{folder}: {why if reply['cut'] or reply['limit'] else exit_code}")
        return packed

    async def write_tree(self, folder: str, data: bytes) -> None:
        """OSError if the session has no room for it, or `data` is none of `read_tree`."""
        result = await self.run(["sh", "-c", _UNPACK, "sh", folder], stdin=data)
        if result.exit_code != 0:
            raise OSError(f"{folder}: {result.output.strip() or result.text}")

    async def close(self) -> None:
        """End every process of the session, and remove its files."""
        self._kill()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _call(self, what: dict[str, Any], stdin: bytes, wall_s: float | None) -> Result:
        reply, data = await self._exchange(what, stdin, wall_s)
        output = printable(data.decode(errors="backslashreplace"))
        return Result(reply["exit"], output, reply["cut"], reply["limit"])

    async def _exchange(
        self, what: dict[str, Any], stdin: bytes, wall_s: float | None
    ) -> tuple[dict[str, Any], bytes]:
        """The reply, and the output."""
        wall_s = min(wall_s or self._limits.wall_s, self._limits.wall_s)
        request = {
            "output_bytes": self._limits.output_bytes,
            "stdin": len(stdin),
            "wall_s": wall_s,
            **what,
        }
        async with self._lock:
            try:
                self._writer.write(json.dumps(request).encode() + b"\n")
                reply, output = await self._receive(wall_s + _GRACE_S, stdin)
            except BaseException:  # also a cancelled call: its reply would be read by the next one
                self._kill()
                raise
            if self._tunnels is not None:  # who used them is gone
                self._tunnels.hang_up()
            return reply, output

    async def _receive(self, timeout_s: float, stdin: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Send the rest of a request; the reply, and the bytes that follow it."""
        reply, data = None, b""
        try:
            async with asyncio.timeout(timeout_s):
                for start in range(0, len(stdin), _PIECE):
                    self._writer.write(stdin[start : start + _PIECE])
                    await self._writer.drain()
                line = await self._reader.readline()
                reply = json.loads(line) if line else None
                if isinstance(reply, dict) and "output" in reply:
                    data = await self._reader.readexactly(reply["output"])
        except TimeoutError:
            raise SandboxError(f"the session did not answer for {timeout_s:g} s") from None
        except (OSError, EOFError):  # it ended before it had read or said all
            reply = None
        except ValueError as error:
            raise SandboxError(f"the session sent a reply that is not JSON: {error}") from error
        if not isinstance(reply, dict) or not ({"ready", "fatal", "exit"} & reply.keys()):
            raise SandboxError(f"the session ended{self._last_words()}")
        if "fatal" in reply:
            raise SandboxError(printable(str(reply["fatal"]), 500))
        return reply, data

    def _last_words(self) -> str:
        self._kill()
        assert self._process.stderr is not None  # a pipe
        said = self._process.stderr.read(4096).decode(errors="replace").strip()
        return f": {printable(said, 500)}" if said else ""

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()  # the kernel ends the rest: see namespaces.py
            self._process.wait()
        if hasattr(self, "_writer"):
            self._writer.close()
        if self._tunnels is not None:
            self._tunnels.close()
        self._folder.close()


def _receive_tunnels(handed: socket.socket, limits: SessionLimits) -> Tunnels:
    """Sent before the session said that it is ready."""
    addresses = [Address.of(entry) for entry in limits.network]
    handed.setblocking(False)
    _, fds, _, _ = socket.recv_fds(handed, 1, len(addresses), socket.MSG_CMSG_CLOEXEC)
    listeners = [socket.socket(fileno=fd) for fd in fds]
    if len(listeners) != len(addresses):  # the kernel leaves out what the process has no room for
        for listener in listeners:
            listener.close()
        raise SandboxError(
            f"sandbox.network: {len(fds)} of {len(addresses)} sockets arrived: too many files are "
            "open; raise the limit (ulimit -n)"
        )
    return Tunnels(listeners, addresses)


async def _spawned(argv: list[str], fds: list[int]) -> subprocess.Popen[bytes]:
    """In a thread: starting a process blocks for milliseconds. Who is cancelled waits for the end
    of that: descriptors that were closed before could be others when the process gets them."""
    starting = asyncio.ensure_future(asyncio.to_thread(_spawn, argv, fds))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait([starting])
        if not starting.cancelled() and starting.exception() is None:
            starting.result().kill()
            starting.result().wait()
        raise


def _spawn(argv: list[str], fds: list[int]) -> subprocess.Popen[bytes]:
    return spawn(
        argv,
        {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"},
        is_wrapped=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=fds,
    )
