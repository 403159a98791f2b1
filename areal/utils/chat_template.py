"""Renders chats with a model folder's chat template, in child processes with resource limits.

    texts = render_chats(tokenizer, chats, tools=tools, variables={"enable_thinking": False})

A template comes with a model and is a program: one line of it can request all memory or loop
forever. Only a separate process can be stopped in that state, so transformers renders templates in
a few reusable children (chat_template_worker.py), started on demand. Measured on one core: 85 us
for a message of 12 characters (26 us in this process), 1.4 ms for 128 messages of 2,000 (0.7 ms):
less than their tokenisation takes.

| limit of one call                      | enforced by                                      |
|----------------------------------------|--------------------------------------------------|
| 1 GiB of memory                        | RLIMIT_DATA                                      |
| 5 s of CPU time                        | a kernel timer that ends the child               |
| 120 s in all                           | this process, which ends the child               |
| text 4 times as long as the chats plus | the child: its output is tokenised in this       |
| 1 Mi characters                        | process                                          |
| chats of 32 MiB                        | this process                                     |

The child's environment holds only paths; it can write no file and ends with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import PydanticSerializationError, from_json, to_json

from areal.utils.waits import waiting

CPU_S = 5.0
MEMORY_BYTES = 1 << 30
OUTPUT_FACTOR, OUTPUT_CHARS = 4, 1 << 20  # output characters: chat bytes * factor + constant
MAX_INPUT = 32 << 20  # bytes; far beyond any model's context
CALL_S = 120.0  # a child takes seconds to start on a busy machine
SIZE = struct.Struct("<Q")  # length of the JSON that follows
_MAX_CHILDREN = 4
_CHATS_OF_CALL = 32
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ", "LANG", "HOME", "VIRTUAL_ENV")

Chat = Sequence[dict[str, Any]]


class TemplateError(ValueError):
    """The template rejects this chat, or is not a valid template."""


class TemplateLimitError(RuntimeError):
    """The template exceeds a memory or time limit."""


def render_chats(
    tokenizer: Any,
    chats: Sequence[Chat],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    variables: Mapping[str, Any],
) -> list[str]:
    """Each chat followed by the header of the assistant's turn; `variables` are the template's.

    TemplateError if it rejects a chat, TemplateLimitError if it exceeds a limit.
    """
    template = tokenizer.get_chat_template(None, tools)
    options = {
        "tools": list(tools) if tools else None,
        "variables": {**tokenizer.special_tokens_map, **variables},
    }
    texts: list[str] = []
    for start in range(0, len(chats), _CHATS_OF_CALL):
        order = {"chats": chats[start : start + _CHATS_OF_CALL], **options}
        texts += _render(template, _encoded(order), folder=tokenizer.name_or_path)
    return texts


def render_chat(
    tokenizer: Any,
    chat: Chat,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    variables: Mapping[str, Any],
) -> str:
    return render_chats(tokenizer, [chat], tools=tools, variables=variables)[0]


def warm_up() -> None:
    """Start a child in the background, which takes a second or more, ahead of the first chat."""
    _children.warm_up()


def wait_until_warm() -> None:
    """Block until a child is ready."""
    with _children.one() as child:
        child.wait_until_ready(time.monotonic() + CALL_S)


def _encoded(order: dict[str, Any]) -> bytes:
    try:
        # Other objects look as they do when transformers passes them to a template.
        data = to_json(order, fallback=lambda value: f"<{type(value).__name__}>")
    except PydanticSerializationError as error:
        raise TemplateError(f"a chat that cannot be written as JSON: {error}"[:300]) from None
    if len(data) > MAX_INPUT:
        raise TemplateError(f"chats of {len(data)} bytes: expected at most {MAX_INPUT}")
    return data


def _render(template: str, order: bytes, *, folder: str) -> list[str]:
    with _children.one() as child:
        answer = child.ask(template, order)
    match answer:
        case {"texts": list(texts)}:
            return texts
        case {"error": str(error)}:
            raise TemplateError(error)
        case {"limit": str(limit)}:
            raise TemplateLimitError(
                f"the chat template of {folder or 'the tokenizer'} takes more than {limit}: no "
                "chat needs that, so look at the chat_template.jinja (or chat_template in "
                "tokenizer_config.json) of that folder before you trust it"
            )
    raise AssertionError(answer)


class _Child:
    """Used by one thread at a time."""

    def __init__(self) -> None:
        env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
        env |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "areal.utils.chat_template_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=env,
            cwd="/",
            process_group=0,  # Ctrl-C goes to this process only
        )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None  # both are pipes
        self._stdin, self._stdout = stdin, stdout
        os.set_blocking(stdin.fileno(), False)
        self._is_ready = False
        self._is_late = False
        self._known: dict[str, int] = {}  # template -> its number in the child

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, template: str, order: bytes) -> dict[str, Any]:
        head: dict[str, Any] = {"template": self._known.get(template)}
        if head["template"] is None:
            number = self._known[template] = len(self._known)
            head = {"template": number, "text": template}
        deadline = time.monotonic() + CALL_S
        try:
            with waiting("the rendering of a chat template"):
                self.wait_until_ready(deadline)
                self._send(to_json(head), deadline)
                self._send(order, deadline)
                return from_json(self._receive(deadline))
        except _EndedError:
            return {"limit": self._limit_that_ended_it()}
        except BaseException:  # also Ctrl-C: the pending reply would be read by the next call
            self.close()
            raise

    def wait_until_ready(self, deadline: float) -> None:
        if not self._is_ready:
            try:
                self._receive(deadline)
            except _EndedError:
                status = self._process.wait()
                raise RuntimeError(
                    f"the renderer of chat templates did not start (status {status}); its last "
                    "words are on the standard error of this process"
                ) from None
            self._is_ready = True

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def _send(self, data: bytes, deadline: float) -> None:
        pipe = self._stdin.fileno()
        left = memoryview(SIZE.pack(len(data)) + data)
        while left:
            try:
                left = left[os.write(pipe, left) :]
            except BlockingIOError:
                self._wait(pipe, select.POLLOUT, deadline)
            except BrokenPipeError:
                raise _EndedError from None

    def _receive(self, deadline: float) -> bytes:
        (size,) = SIZE.unpack(self._read(SIZE.size, deadline))
        return self._read(size, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        pipe, chunks = self._stdout.fileno(), []
        while size:
            self._wait(pipe, select.POLLIN, deadline)
            chunk = os.read(pipe, min(size, 1 << 20))
            if not chunk:
                raise _EndedError
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)

    def _wait(self, pipe: int, event: int, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        poll = select.poll()  # `select` takes no descriptor above 1,023
        poll.register(pipe, event)
        if left_s <= 0 or not poll.poll(left_s * 1000):
            self._is_late = True
            self._process.kill()
            raise _EndedError

    def _limit_that_ended_it(self) -> str:
        code = self._process.wait()
        self.close()
        if code == -signal.SIGPROF:
            return f"{CPU_S:g} s of CPU time"
        if self._is_late:
            return f"{CALL_S:g} s"
        return f"it may (its process ended with status {code})"


class _EndedError(Exception):
    """The child has exited or was killed."""


class _Children:
    """At most `_MAX_CHILDREN`, each with one call at a time; the most recently used goes first."""

    def __init__(self) -> None:
        self._free: list[_Child] = []
        self._room = threading.Semaphore(_MAX_CHILDREN)

    @contextlib.contextmanager
    def one(self) -> Iterator[_Child]:
        if not self._room.acquire(timeout=CALL_S):
            raise TemplateLimitError(f"no renderer of chat templates was free for {CALL_S:g} s")
        try:
            child = self._take()
            try:
                yield child
            finally:
                if child.is_alive:
                    self._free.append(child)
        finally:
            self._room.release()

    def warm_up(self) -> None:
        if not self._free:
            self._free.append(_Child())

    def close(self) -> None:
        while self._free:
            self._free.pop().close()

    def _take(self) -> _Child:
        while True:
            try:
                child = self._free.pop()
            except IndexError:
                return _Child()
            if child.is_alive:
                return child
            child.close()


_children = _Children()


def _forget_children() -> None:
    """A forked process must not write to the pipes of its parent's children."""
    global _children
    _children = _Children()


atexit.register(lambda: _children.close())
os.register_at_fork(after_in_child=_forget_children)
