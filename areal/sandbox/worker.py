"""Entry point of a sandbox worker: runs a reward function, one request at a time.

`process` starts this file by its path, so it uses only the standard library until the user's
function is loaded. Both directions share one socket:

    parent -> child   frames (size, call id, pickle): first the set-up, then (args, kwargs) per call
    child -> parent   {"ready": true, "unkept": [limits]} | {"fatal": text},
                      then {"id", "value", "s"} | {"id", "error"} | {"id", "unfit"}

`unfit` is an error that no retry can change: a wrong signature, a coroutine. Replies are JSON lines
because the parent does not trust the code that ran here. Each is written at once, so if this
process dies, the oldest unanswered call is the cause. Limits (`confine`) are in force before any
user code runs.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import importlib
import json
import numbers
import os
import pickle
import runpy
import signal
import socket
import struct
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, SupportsFloat, TextIO, TypeGuard, cast

if TYPE_CHECKING:
    from io import TextIOWrapper

FRAME_HEADER = struct.Struct("<QQ")  # payload bytes, call id
MAX_ERROR_CHARS = 4000
MAX_SHOWN_CHARS = 200
EXPECTED = "fn(prompt, completions, prompt_ids, completion_ids, **data) -> float"
PR_SET_CHILD_SUBREAPER = 36
IN_WORKER = "AREAL_REWARD_WORKER"  # holds the pid of this process


def main(fd: int, limits: dict[str, Any] | None, folder: str) -> None:
    """Serve calls until the parent closes its end; without `limits` unconfined."""
    _adopt_orphans()
    os.environ[IN_WORKER] = str(os.getpid())
    faulthandler.enable()  # a segfault leaves the Python stack on stderr
    stacks = _stacks_file()
    faulthandler.register(signal.SIGUSR1, file=stacks)
    cast("TextIOWrapper", sys.stdout).reconfigure(line_buffering=True, errors="backslashreplace")
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    requests = cast("BinaryIO", channel.makefile("rb", buffering=1 << 16))
    try:
        confinement = runpy.run_path(str(Path(__file__).with_name("confine.py")))
        unkept: list[str] = confinement["confine"](limits, folder) if limits else []
        setup = _next_frame(requests)
        if setup is None:  # the parent has exited
            return
        function = _load(pickle.loads(setup[1]))
    except BaseException as error:  # SystemExit at import is a failed load as well
        _reply(channel, {"fatal": _describe(error, limits)})
        return
    _reply(channel, {"ready": True, "unkept": unkept})
    while (frame := _next_frame(requests)) is not None:
        call_id, payload = frame
        _reply(channel, {"id": call_id, **_answer(function, payload, limits)})


class _UnfitError(Exception):
    """The function does not take these arguments or does not return a number."""


def _answer(
    function: Callable[..., Any], payload: bytes, limits: dict[str, Any] | None
) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        args, kwargs = pickle.loads(payload)
        value = _number(_call(function, args, kwargs))
        return {"value": value, "s": time.perf_counter() - began}
    except _UnfitError as error:
        return {"unfit": str(error)}
    except BaseException as error:  # sys.exit() in a reward function is an error of that call
        return {"error": _describe(error, limits)}


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        if error.__traceback__ and error.__traceback__.tb_next:  # raised inside of the function
            raise
        misfit = _misfit(function, args, kwargs)
        if misfit is None:
            raise
        raise _UnfitError(misfit) from None


def _misfit(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Why the arguments do not fit the function's signature; None when they do."""
    import inspect  # imported late: it would double the start-up time of a worker

    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C functions have no signature
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        columns = ", ".join(map(str, kwargs)) or "none"
        return (
            f"takes {_shown(signature, str)}, but a reward function is called as {EXPECTED} "
            f"({error}; data here: {_cut(columns)})"
        )
    return None


def _number(value: object) -> float:
    if isinstance(value, types.CoroutineType):
        value.close()
        raise _UnfitError(f"is `async def`; a reward function is a plain function: def {EXPECTED}")
    if _is_several(value):
        raise _UnfitError(
            f"returned {_shown(value)} ({type(value).__name__}); it is called once per answer and "
            f"must return one number, not a list as in TRL: def {EXPECTED}"
        )
    if not _is_number(value):
        raise TypeError(f"a reward must be a number, got {_shown(value)} ({type(value).__name__})")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"a reward must be finite, got {_shown(value)}") from None


def _is_several(value: object) -> bool:
    return isinstance(value, list | tuple) or bool(getattr(value, "ndim", 0))


def _is_number(value: object) -> TypeGuard[SupportsFloat]:
    return isinstance(value, numbers.Real) or (
        # numpy's bool, Decimal, a tensor of one number
        hasattr(type(value), "__float__") and not isinstance(value, str | bytes | numbers.Complex)
    )


def _shown(value: Any, show: Callable[[Any], str] = repr) -> str:
    """One short line, also for objects whose `repr` raises."""
    try:
        return _cut(show(value))
    except Exception:  # user code raised; show the class instead
        return f"<{type(value).__name__}>"


def _cut(text: str) -> str:
    return " ".join(text[:MAX_SHOWN_CHARS].split()) + ("..." if len(text) > MAX_SHOWN_CHARS else "")


def _load(setup: dict[str, Any]) -> Callable[..., Any]:
    """The function named or pickled in `setup`, found with the parent's `sys.path`."""
    sys.path[:] = setup["sys_path"]
    if setup["main"] is not None:
        adopt_main(*setup["main"])
    if setup["path"] is None:
        return pickle.loads(setup["pickle"])
    module, _, name = setup["path"].rpartition(".")
    return getattr(importlib.import_module(module), name)


def adopt_main(kind: str, where: str) -> None:
    """Make functions of the user's script importable as `__main__`, without its guarded part."""
    run = runpy.run_module if kind == "module" else runpy.run_path
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(run(where, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _next_frame(requests: BinaryIO) -> tuple[int, bytes] | None:
    """(call id, payload), or None when the parent has exited."""
    try:
        header = requests.read(FRAME_HEADER.size)
        if len(header) < FRAME_HEADER.size:
            return None
        size, call_id = FRAME_HEADER.unpack(header)
        payload = requests.read(size)
    except ConnectionResetError:  # it exited without reading our last reply
        return None
    return (call_id, payload) if len(payload) == size else None


def _reply(channel: socket.socket, message: dict[str, Any]) -> None:
    try:
        channel.sendall(json.dumps(message).encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent has exited


def _describe(error: BaseException, limits: dict[str, Any] | None) -> str:
    """The error first, then the last lines of the traceback."""
    try:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
        where = "".join(traceback.format_list(frames[-4:]))
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS] + _hint(error, limits)
        return f"{text}\n{where[-MAX_ERROR_CHARS:]}".rstrip()
    except BaseException:  # formatting it runs user code as well
        return f"{type(error).__name__}, which cannot be shown"


def _hint(error: BaseException, limits: dict[str, Any] | None) -> str:
    """The limit that may have caused this error."""
    if not limits:
        return ""
    if isinstance(error, MemoryError):
        return f" (limits.memory_gb is {limits['memory_gb']:g})"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return f" (limits.file_size_mb is {limits['file_size_mb']})"
    if isinstance(error, PermissionError | BlockingIOError):
        shown = ", ".join(f"{key}={limits[key]}" for key in ("max_processes", "network"))
        return (
            f" (limits: {shown}, files are written in $TMPDIR and limits.writable only; the run's "
            "folder and limits.unreadable are not read)"
        )
    if isinstance(error, KeyError) and _is_about_environment(error):
        return " (limits.env names the variables it gets besides PATH, HOME and the like)"
    return ""


def _is_about_environment(error: KeyError) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename == type(os.environ).__getitem__.__code__.co_filename


def _stacks_file() -> TextIO:
    """The file of areal.utils.stacks, where SIGUSR1 makes every process of a run dump stacks."""
    path = os.environ.get("AREAL_STACKS", "")
    try:
        return open(path, "a")  # noqa: SIM115 (open as long as the process)
    except OSError:  # none is set, or the run's folder is gone
        return sys.stderr


def _adopt_orphans() -> None:
    """Orphaned descendants become children of this process, where its parent finds them (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
