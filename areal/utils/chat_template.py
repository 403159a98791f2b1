"""Renders chats with a model folder's chat template, in child processes with resource limits.

    texts = render_chats(tokenizer, chats, tools=tools, variables={"enable_thinking": False})

A template comes with a model and is a program: one line of it can request all memory or loop
forever. Only a separate process can be stopped in that state, so templates are rendered in a few
reusable children (chat_template_worker.py), started on demand. Measured on a shared x86_64 core:
170 us for a message of 12 characters (32 us without the child), 2.6 ms for 128 messages of 2,000
(0.9 ms).

| limit of one call                      | enforced by                                      |
|----------------------------------------|--------------------------------------------------|
| 1 GiB of memory                        | RLIMIT_DATA                                      |
| 5 s of CPU time                        | a kernel timer that ends the child               |
| 120 s in all                           | this process, which ends the child               |
| text 4 times as long as the chats plus | the child: its output is tokenised in this       |
| 1 Mi characters                        | process                                          |
| chats of 32 MiB                        | this process                                     |

The child's environment holds only paths; it can write no file and ends with this process. A sandbox
worker (areal/sandbox) renders in place, because it may be forbidden to start a process: of the
limits above those on CPU time, text and chats hold there, the others are the worker's own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import PydanticSerializationError, from_json, to_json

from areal.api.json_text import loads_written
from areal.utils.channel import Channel
from areal.utils.chat_template_worker import CPU_S
from areal.utils.chat_template_worker import answer as answer_here
from areal.utils.child_process import describe_exit, module_argv, spawn
from areal.utils.waits import waiting

MAX_INPUT = 32 << 20  # bytes; far beyond any model's context
CALL_S = 120.0  # a child takes seconds to start on a busy machine
_MAX_REPLY = 1 << 30  # bytes: the longest text, with every character escaped
_ENDING_S = 1.0  # for a child to exit after it closed its channel
_MAX_CHILDREN = 4
_CHATS_OF_CALL = 32
_SANDBOXED = "AREAL_REWARD_WORKER"  # set by sandbox/worker.py to its own pid
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


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Templates have no "developer" role and serialise a call's arguments to JSON themselves."""
    message = dict(message)
    if message["role"] == "developer":
        message["role"] = "system"
    if "tool_calls" in message:
        message["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
    return message


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = loads_written(arguments)
        except ValueError:  # the model wrote invalid JSON: keep its text
            return call
    return {**call, "function": {**function, "arguments": arguments}}


def warm_up() -> None:
    """Start a child in the background, ahead of the first chat."""
    if not _is_sandboxed():
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
    if _is_sandboxed():
        answer = answer_here(template, order)
    else:
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


def _is_sandboxed() -> bool:
    return os.environ.get(_SANDBOXED) == str(os.getpid())


class _Child:
    """Used by one thread at a time."""

    def __init__(self) -> None:
        env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        env |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        ours, theirs = socket.socketpair()
        argv = module_argv("areal.utils.chat_template_worker", str(theirs.fileno()))
        with theirs:
            self._process = spawn(argv, env, cwd="/", pass_fds=[theirs.fileno()])
        self._channel = Channel(ours, max_bytes=_MAX_REPLY)
        self._is_ready = False
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
                self._channel.send(to_json(head), order, timeout_s=deadline - time.monotonic())
                (answer,) = self._channel.receive(deadline - time.monotonic())
                return from_json(answer)
        except TimeoutError:
            self.close()
            return {"limit": f"{CALL_S:g} s"}
        except (EOFError, OSError):
            code = self.close(_ENDING_S)
            is_late = code == -signal.SIGPROF
            what = f"{CPU_S:g} s of CPU time" if is_late else f"it may (it {describe_exit(code)})"
            return {"limit": what}
        except BaseException:  # also Ctrl-C: the pending reply would be read by the next call
            self.close()
            raise

    def wait_until_ready(self, deadline: float) -> None:
        if not self._is_ready:
            try:
                self._channel.receive(deadline - time.monotonic())
            except EOFError:
                raise RuntimeError(
                    f"the renderer of chat templates {describe_exit(self.close(_ENDING_S))} before "
                    "it was ready; its last words are on the standard error of this process"
                ) from None
            self._is_ready = True

    def close(self, ending_s: float = 0.0) -> int:
        """The exit code of a child that gets `ending_s` to exit by itself."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ending_s)
        self._process.kill()
        return self._process.wait()


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
