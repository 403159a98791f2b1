"""The parent's handle on one sandbox worker: its process, environment, socket and sent calls.

`pool` decides what is sent and when. `RewardProcess` starts and kills the process, splits its
replies into messages and rejects malformed ones. `describe_function` builds the set-up frame from
which the worker loads the user's function. `reward_environment` passes on an allow-list of
variables: those that locate programs, libraries and caches, and the locale. Unknown names
(`OPENAI_KEY`, `GH_PAT`) are not inherited; `limits.env` adds names. `hidden_paths` lists the files
that a confined process must not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from areal.api.config.inference import ProcessLimits
from areal.api.redact import is_secret
from areal.api.scratch import remove_tree, variable_set
from areal.sandbox import worker
from areal.sandbox.output import printable
from areal.sandbox.watch import Group, is_alive, open_group
from areal.utils.child_process import spawn
from areal.utils.stacks import descendants

MAX_REPLY_BYTES = 1 << 20
MAX_TEXT_CHARS = 10_000
_KILL_ROUNDS = 100
_ENDING_S = 0.2  # how long a process may take to exit after it closed its files
RUN_FOLDER = "AREAL_RUN_FOLDER"  # holds the database and the recover points of this run
_NAMES = (
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "HOSTNAME", "TERM", "TZ", "LANG"}
    | {"LANGUAGE", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "JAVA_HOME"}
    | {"LD_PRELOAD", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "NLTK_DATA", "TORCH_HOME"}
    | {"HF_HOME"}
    | {"HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"}
    | {"HF_ENDPOINT", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_CACHE", "TOKENIZERS_PARALLELISM"}
    | {"XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "MPLBACKEND", "MPLCONFIGDIR"}
    | {"CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"}
    | {"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"}
    | {"NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"}
    | {"AREAL_STACKS", "AREAL_DEBUG", "AREAL_LOG_LEVEL"}
)
_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_")


class BadReplyError(Exception):
    """A worker wrote a malformed reply: user code reached the socket."""


class RewardProcess:
    """One child process, its writable folder (created in `place`), and the calls sent to it."""

    def __init__(self, now: float, limits: ProcessLimits | None, place: Path) -> None:
        self.folder = tempfile.mkdtemp(dir=place)
        self.process, self.channel, self.printed = _spawn(limits, self.folder)
        self.group = _group_of(self.process.pid, limits)
        self.output = self.printed.fileno()  # descriptor of its stdout and stderr
        self.busy_since = now  # loop time when the current call (or the load) began
        self.ready = False  # the function is loaded
        self.in_flight: deque[Any] = deque()  # the first one is running
        self.outgoing = bytearray()
        self.watching_writes = False
        self.timer: asyncio.TimerHandle | None = None
        self.watched: tuple[int, float] | None = None  # (call, CPU time) at the last measurement
        self._incoming = b""

    def split_messages(self, data: bytes) -> list[dict[str, Any]]:
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        if len(self._incoming) > MAX_REPLY_BYTES:
            raise BadReplyError(f"sent a reply longer than {MAX_REPLY_BYTES} bytes")
        try:
            # As text: of bytes json guesses the encoding, line by line.
            messages = [json.loads(line.decode(errors="surrogatepass")) for line in lines]
        except (ValueError, RecursionError) as error:
            raise BadReplyError(f"sent a reply that is not JSON: {error}") from error
        if not all(isinstance(message, dict) for message in messages):
            raise BadReplyError("sent a reply that is not a JSON object")
        return [{key: _printable(value) for key, value in one.items()} for one in messages]

    def cpu_of_call(self, cpu_s: float) -> float:
        """CPU time since the running call was first measured, given the total; 0 while loading."""
        call = self.in_flight[0].id if self.in_flight else 0
        if self.watched is None or self.watched[0] != call or not self.ready:
            self.watched = (call, cpu_s)
        return cpu_s - self.watched[1]

    def wait_end(self) -> int | None:
        """Exit code of a process that closed its files; None while it still runs."""
        try:
            return self.process.wait(timeout=_ENDING_S)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """SIGKILL the process and all its descendants, whatever session they are in."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Stopped first: as subreaper it adopts orphans, which keeps them findable.
                os.killpg(self.process.pid, signal.SIGSTOP)
                _kill_descendants(self.process.pid)
                os.killpg(self.process.pid, signal.SIGKILL)
        if self.group is not None:
            self.group.kill()

    def clean_up(self) -> None:
        """Delete what the process wrote, once it has exited."""
        if self.group is not None:
            self.group.close()
        with contextlib.suppress(OSError):  # leftovers are deleted with the parent folder
            remove_tree(self.folder)


def _printable(value: Any) -> Any:
    """Escape worker output so that logs, the database and terminals can take it."""
    return printable(value, MAX_TEXT_CHARS) if isinstance(value, str) else value


def _spawn(
    limits: ProcessLimits | None, folder: str
) -> tuple[subprocess.Popen[bytes], socket.socket, IO[bytes]]:
    """(a fresh interpreter running `worker`, our end of its socket, its output pipe)."""
    options = None if limits is None else {**asdict(limits), "hidden": hidden_paths(limits)}
    argv = [sys.executable, "-P", worker.__file__]
    parent_end, child_end = socket.socketpair()
    parent_end.setblocking(False)
    with child_end:
        try:
            process = spawn(
                [*argv, str(child_end.fileno()), json.dumps(options), folder],
                reward_environment(limits, folder),
                stdout=subprocess.PIPE,  # never mixed with the run's own output
                stderr=subprocess.STDOUT,
                pass_fds=[child_end.fileno()],
            )
        except OSError:
            parent_end.close()
            raise
    assert process.stdout is not None  # a pipe
    os.set_blocking(process.stdout.fileno(), False)
    return process, parent_end, process.stdout


def _group_of(pid: int, limits: ProcessLimits | None) -> Group | None:
    """The process's cgroup: joined while it waits for its first frame, before any user code."""
    group = None if limits is None or sys.platform != "linux" else open_group(limits)
    if group is not None:
        try:
            group.add(pid)
        except OSError:
            group.close()
            return None
    return group


def _kill_descendants(pid: int) -> None:
    """Descendants are known on Linux only; elsewhere the process group is all that is killed."""
    for _ in range(_KILL_ROUNDS):  # a child forked meanwhile is found in the next round
        found = [child for child in descendants(pid) if is_alive(child)]
        for child in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        if not found:
            return


def frame(call_id: int, payload: bytes) -> bytes:
    return worker.FRAME_HEADER.pack(len(payload), call_id) + payload


def describe_function(reward_fn: Callable[..., float] | str) -> tuple[str, bytes]:
    """(name for messages, set-up frame from which a worker loads the function)."""
    if os.environ.get(worker.IN_WORKER) == str(os.getpid()):
        raise RuntimeError(
            "a reward worker imported a script that starts training when imported; put the "
            "script's last part under `if __name__ == '__main__':`"
        )
    setup: dict[str, Any] = {"sys_path": [entry or os.getcwd() for entry in sys.path], "main": None}
    if isinstance(reward_fn, str):
        if "." not in reward_fn:
            raise ValueError(f"reward_fn: expected 'package.module.function', got {reward_fn!r}")
        return printable(reward_fn), pickle.dumps({**setup, "path": reward_fn})
    name = printable(getattr(reward_fn, "__qualname__", None) or repr(reward_fn), 200)
    try:
        blob = pickle.dumps(reward_fn)
    except Exception as error:
        raise ValueError(
            f"reward_fn: {name} cannot be sent to a reward worker ({error}); define it at the top "
            "level of a module, not inside a function or as a lambda"
        ) from error
    if b"__main__" in blob:
        setup["main"] = main_module(name)
    return name, pickle.dumps({**setup, "path": None, "pickle": blob})


def main_module(name: str) -> tuple[str, str]:
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return "module", spec.name
    if (file := getattr(main, "__file__", None)) is None:
        raise ValueError(f"reward_fn: {name} was typed into a session; move it to a file")
    return "path", str(Path(file).absolute())


def reward_environment(limits: ProcessLimits | None, folder: str) -> dict[str, str]:
    """Without limits: everything but areal's own secrets."""
    if limits is None:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not (name.startswith("AREAL_") and is_secret(name, value))
        }
    else:
        kept = {name: value for name, value in os.environ.items() if _is_kept(name, value, limits)}
    # The pool is what runs in parallel: threads of each worker would take the trainer's cores.
    return {"OMP_NUM_THREADS": "1", **kept, "TMPDIR": folder}


def _is_kept(name: str, value: str, limits: ProcessLimits) -> bool:
    if name in limits.env:
        return True
    # A proxy URL may hold a password.
    return (name in _NAMES or name.startswith(_PREFIXES)) and not is_secret(name, value)


def hidden_paths(limits: ProcessLimits) -> list[str]:
    """Files and folders it must not read: keys, and the folder of the run."""
    hidden = [*limits.unreadable]
    if os.environ.get(RUN_FOLDER):
        hidden.append(os.environ[RUN_FOLDER])
    if "HF_TOKEN" not in limits.env:
        hub = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
        hidden += [str(hub / "token"), str(hub / "stored_tokens")]
    return hidden + _block_devices()


def _block_devices() -> list[str]:
    """Raw devices expose every file to root."""
    found = [*Path("/dev").glob("*"), *Path("/dev/mapper").glob("*")]
    return [str(path) for path in found if path.is_block_device()]


@contextlib.contextmanager
def hidden_from_rewards(folder: Path) -> Generator[None]:
    """Confined processes started in this context, here or by a child, cannot read `folder`."""
    with variable_set(RUN_FOLDER, str(folder.absolute())):
        yield
