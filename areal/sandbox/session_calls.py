"""The calls of a sandbox session, as its process 1 serves them: one command after another.

    serve(fd, limits)                      # until the parent closes its end

Both directions of the socket carry JSON lines, and the bytes whose number a line gives follow it as
they are:

    parent -> child   {"argv": [...]} or {"code": "..."}, with "stdin" (a number of bytes),
                      "wall_s", "output_bytes", and "workdir" if it is another than the session's
    child -> parent   {"fatal": text} or {"exit": code, "output": a number of bytes, "cut": bool,
                      "limit": name or null}

"fatal" is never about what the code did: the command could not be confined, and did not run.

Each call is served by a fork of process 1, which never reads a request itself: what one call
brought is in no other call's memory. Code is run in a fork of that one, which saves the start of
an interpreter. A command runs as another user where there are two (started by root), without
capabilities, under resource limits and `confine`'s filter of system calls. Its processes are
counted every 50 ms, and all are killed when the first one ends: nothing survives a call but files.

Standard library only: it is loaded by its path, without site-packages. What a call needs is
imported here once, not by each fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import linecache
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
import traceback
import types
from typing import Any

from areal.sandbox import confine
from areal.sandbox.cpu_clock import CpuClock
from areal.sandbox.session_init import AGENT_ID, WORKSPACE

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 4, 38, 36
_SO_SNDBUF, _SO_RCVBUF = 7, 8
_POLL_MS = 50
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_READ_BYTES = 1 << 16
_MAX_OPEN_FILES = 256  # of a process
_PIPE_BYTES = 16 * os.sysconf("SC_PAGE_SIZE")  # that one may hold; `confine` lets nobody change it
_MAX_FILES = 50_000  # each takes memory beside its contents


def serve(fd: int, limits: dict[str, Any]) -> None:
    channel, libc = socket.socket(fileno=fd), ctypes.CDLL(None, use_errno=True)
    limits = {**limits, "socket_bytes": _socket_bytes()}
    while channel.recv(1, socket.MSG_PEEK):
        pid = os.fork()
        if pid == 0:
            _serve_call(channel, limits, libc)
        if os.waitpid(pid, 0)[1] != 0:
            return  # without a reply, or with half of one: the parent sees the end of the session


def _serve_call(channel: socket.socket, limits: dict[str, Any], libc: Any) -> None:
    """In a fork: read one request, carry it out and answer. Does not return."""
    code = 1
    try:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command are this process's to count
        requests = channel.makefile("rb")
        request = json.loads(requests.readline())
        call = _Call(request, requests.read(request["stdin"]), limits, libc)
        _send(channel, *call.run())
        code = 0
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}"[:500].encode(errors="replace"))
    finally:
        os._exit(code)


def _socket_bytes() -> int:
    """What the buffers of one socket may hold; `confine` lets nobody change it."""
    pair = socket.socketpair()
    size = sum(pair[0].getsockopt(socket.SOL_SOCKET, kind) for kind in (_SO_SNDBUF, _SO_RCVBUF))
    for one in pair:
        one.close()
    return size


def _send(channel: socket.socket, message: dict[str, Any], data: bytes | bytearray = b"") -> None:
    try:
        channel.sendall(json.dumps(message).encode() + b"\n")
        channel.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent has exited


class _Call:
    """One command: feeds its input, takes its output, counts, and ends all of it."""

    def __init__(
        self, request: dict[str, Any], stdin: bytes, limits: dict[str, Any], libc: Any
    ) -> None:
        self._limits = limits
        self._stdin = memoryview(stdin)  # what is left of it; a slice copies nothing
        self._output = bytearray()
        self._max_output = request["output_bytes"]
        self._is_cut = False
        self._reaped_s = 0.0  # CPU time of ended children
        self._deadline = time.monotonic() + request["wall_s"]
        self._clock = CpuClock.start(libc)
        from_agent, agent_out = os.pipe()
        agent_in, to_agent = os.pipe()
        self._fault, fault = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _become_agent(request, limits, libc, (agent_in, agent_out, fault))
        for fd in (agent_in, agent_out, fault):
            os.close(fd)
        self._from, self._to = from_agent, to_agent

    def run(self) -> tuple[dict[str, Any], bytes | bytearray]:
        for pipe in (self._from, self._to):
            os.set_blocking(pipe, False)
        poller = select.poll()
        poller.register(self._from, select.POLLIN)
        poller.register(self._to, select.POLLOUT)
        end = os.pidfd_open(self._pid)
        poller.register(end, select.POLLIN)
        limit, has_ended = None, False
        while not has_ended and limit is None:
            ready = {fd for fd, _ in poller.poll(_POLL_MS)}
            has_ended = end in ready
            if self._to in ready and not self._feed():
                poller.unregister(self._to)
                os.close(self._to)
            if self._from in ready and not self._take():
                poller.unregister(self._from)
            limit = None if has_ended else self._exceeded()
        code = self._end()
        while self._take():  # what it left in the pipe
            pass
        fault = os.read(self._fault, _READ_BYTES)  # its other end is closed: all have ended
        for fd in {self._from, self._fault, end}:
            os.close(fd)
        with contextlib.suppress(OSError):
            os.close(self._to)
        if fault:
            return {"fatal": fault.decode(errors="replace")}, b""
        told = {"exit": code, "output": len(self._output), "cut": self._is_cut, "limit": limit}
        return told, self._output

    def _feed(self) -> bool:
        """False when all was written, or nobody reads it."""
        try:
            written = os.write(self._to, self._stdin[:_READ_BYTES])
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        self._stdin = self._stdin[written:]
        return bool(self._stdin)

    def _take(self) -> bool:
        """False at the end of the pipe, or when nothing is there."""
        try:
            data = os.read(self._from, _READ_BYTES)
        except BlockingIOError:
            return False
        room = self._max_output - len(self._output)
        self._output += data[:room]
        self._is_cut = self._is_cut or len(data) > room
        return bool(data)

    def _exceeded(self) -> str | None:
        if time.monotonic() > self._deadline:
            return "wall_s"
        if (files := os.statvfs(WORKSPACE)).f_files - files.f_ffree > _MAX_FILES:
            return "disk_mb"
        cpu_s, memory, tasks = self._usage()
        counted_s = self._clock.of_descendants() if self._clock else 0.0
        if max(cpu_s + self._reaped_s, counted_s) > self._limits["cpu_s"]:
            return "cpu_s"
        if memory > self._limits["memory_mb"] << 20:
            return "memory_mb"
        return "max_processes" if tasks > self._limits["max_processes"] else None

    def _usage(self) -> tuple[float, int, int]:
        """(CPU seconds, bytes of memory, tasks) of all processes but ours.

        Memory of files is not counted: it is the session's disk. Page tables are, and sockets and
        pipes, each with all that it may hold: the kernel keeps them outside of a process.
        """
        self._reap()
        cpu_s, memory, tasks = 0.0, _memory_of_sockets(self._limits), 0
        ours, pipes = ("1", str(os.getpid())), set[object]()
        for name in os.listdir("/proc"):
            if name.isdigit() and name not in ours:
                with contextlib.suppress(OSError):  # it has just ended
                    fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
                    cpu_s += sum(map(int, fields[11:15])) / _TICKS_PER_S
                    memory += _memory_of(_read(f"/proc/{name}/status"))
                    tasks += int(fields[17])
                    pipes |= self._pipes_of(name)
        return cpu_s, memory + len(pipes) * _PIPE_BYTES, tasks

    def _pipes_of(self, pid: str) -> set[object]:
        try:
            return _pipes_of(pid)
        except PermissionError:
            # Of a program that may be run and not read, nothing that it has open is shown. Closed
            # to us are also the first process until it has been confined, and those that end.
            is_ending = b"\nVmPTE:" not in _read(f"/proc/{pid}/status")
            hidden = 0 if is_ending or pid == str(self._pid) else _MAX_OPEN_FILES
            return {(pid, number) for number in range(hidden)}

    def _reap(self) -> None:
        """Orphans end as children of this process; the command itself is left for `_end`."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid == self._pid:
                return
            self._count(os.wait4(found.si_pid, 0)[2])

    def _end(self) -> int:
        """Kill what runs; the exit code of the command (negative: a signal)."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # everything here but this process
        _, status, _ = os.wait4(self._pid, 0)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        return os.waitstatus_to_exitcode(status)

    def _count(self, usage: resource.struct_rusage) -> None:
        self._reaped_s += usage.ru_utime + usage.ru_stime


def _memory_of(status: bytes) -> int:
    """Bytes, from lines such as `RssAnon:     1234 kB`; a process that has ended has none."""
    kilobytes = 0
    for key in (b"\nRssAnon:", b"\nVmPTE:", b"\nVmSwap:"):
        _, found, rest = status.partition(key)
        kilobytes += int(rest.split(None, 1)[0]) if found else 0
    return kilobytes << 10


def _pipes_of(pid: str) -> set[object]:
    """Pipes and FIFOs that it has open, by what tells one from another."""
    pipes = set[object]()
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            found = os.stat(f"/proc/{pid}/fd/{number}")
        except PermissionError:  # like a folder that cannot be listed
            pipes.add((pid, number))
        except OSError:  # just closed
            continue
        else:
            if stat.S_ISFIFO(found.st_mode):
                pipes.add((found.st_dev, found.st_ino))
    return pipes


def _memory_of_sockets(limits: dict[str, Any]) -> int:
    """Of all of the session: its network namespace has no others."""
    memory = int(_read("/proc/self/net/sockstat").split(None, 3)[2]) * limits["socket_bytes"]
    for kind in ("tcp", "tcp6") if limits["network"] else ():  # their buffers grow
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in _read(f"/proc/self/net/{kind}").splitlines()[1:]:
                memory += sum(int(queue, 16) for queue in line.split()[4].split(b":"))
    return memory


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _become_agent(
    request: dict[str, Any], limits: dict[str, Any], libc: Any, pipes: tuple[int, int, int]
) -> None:
    """In the fork: confine this process, then run the command. Does not return.

    `pipes`: its input, its output, and where it says that it could not be confined.
    """
    stdin, output, fault = pipes
    try:
        _confine(limits, libc, stdin, output, fault)
    except BaseException as error:
        os.write(fault, f"{type(error).__name__}: {error}"[:500].encode(errors="replace"))
        os._exit(126)
    os.close(fault)
    code = 126
    try:
        os.chdir(request.get("workdir", limits["workdir"]))
        if "code" in request:
            os.environ.clear()
            os.environ.update(limits["env"])
            code = _run_code(request["code"])
        else:
            os.execvpe(request["argv"][0], request["argv"], limits["env"])
    except OSError as error:
        what = error.filename or request.get("argv", ["?"])[0]
        os.write(2, f"{what}: {error.strerror}\n".encode())
        code = 127
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _confine(limits: dict[str, Any], libc: Any, stdin: int, output: int, fault: int) -> None:
    for fd, place in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(fd, place)
    os.closerange(3, fault)
    os.closerange(fault + 1, 65536)
    os.setpgid(0, 0)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    _limit_resources(limits)
    _drop_privileges(libc, limits)


def _limit_resources(limits: dict[str, Any]) -> None:
    memory, disk = limits["memory_mb"] << 20, limits["disk_mb"] << 20
    ours = 2 if os.getuid() == AGENT_ID else 0  # of the same user, and counted with the command's
    for kind, value in (
        (resource.RLIMIT_CORE, confine.NO_CORE),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_STACK, min(memory, 8 << 20)),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_CPU, int(limits["cpu_s"]) + 1),
        (resource.RLIMIT_NPROC, limits["max_processes"] + ours),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _drop_privileges(libc: Any, limits: dict[str, Any]) -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(AGENT_ID, AGENT_ID, AGENT_ID)
        os.setresuid(AGENT_ID, AGENT_ID, AGENT_ID)
    confine.drop_capabilities(libc)
    libc.prctl(_PR_SET_DUMPABLE, 1)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    rules = {"max_processes": limits["max_processes"], "network": bool(limits["network"])}
    program = confine.filter_program(
        os.uname().machine, rules, pid=os.getpid(), parents=(1, os.getppid()), parent_group=1
    )
    if program is None or not confine.install_filter(libc, program):
        raise RuntimeError("the filter of system calls cannot be installed")


def _run_code(code: str) -> int:
    """Run `code` as `python -` does; its exit code."""
    linecache.cache["<code>"] = (len(code), None, code.splitlines(keepends=True), "<code>")
    main_module = types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    sys.argv, sys.path = ["-"], ["", *sys.path]
    options: Any = {"encoding": "utf-8", "errors": "backslashreplace"}
    sys.stdin = open(0, **options)  # noqa: SIM115 (open as long as the process)
    sys.stdout = open(1, "w", **options)  # noqa: SIM115 (likewise)
    sys.stderr = open(2, "w", buffering=1, **options)  # noqa: SIM115 (likewise)
    result = 0
    try:
        exec(compile(code, "<code>", "exec"), main_module.__dict__)
    except SystemExit as error:
        result = _exit_code(error.code)
    except BaseException as error:
        sys.stdout.flush()
        where = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, where)
        result = 1
    if "threading" in sys.modules:
        for thread in sys.modules["threading"].enumerate():
            if not thread.daemon and thread is not sys.modules["threading"].main_thread():
                thread.join()
    sys.stdout.flush()
    return result


def _exit_code(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    sys.stderr.write(f"{value}\n")
    return 1
