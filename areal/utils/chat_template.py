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

A sandbox worker (areal/sandbox) renders in place, because it may be forbidden to start a process:
of the limits above those on CPU time, text and chats hold there, the others are the worker's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import PydanticSerializationError, from_json, to_json

from areal.api.json_text import loads_written
from areal.utils.chat_template_worker import CPU_S
from areal.utils.chat_template_worker import answer as answer_here
from areal.utils.limited_process import LimitedProcesses, LimitExceededError

MAX_INPUT = 32 << 20  # bytes; far beyond any model's context
_CHATS_OF_CALL = 32
_SANDBOXED = "AREAL_REWARD_WORKER"  # set by sandbox/worker.py to its own pid
_children = LimitedProcesses(
    "areal.utils.chat_template_worker", "the renderer of chat templates", cpu_s=CPU_S
)

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
    _children.wait_until_warm()


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
    answer = answer_here(template, order) if _is_sandboxed() else _ask_child(template, order)
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


def _ask_child(template: str, order: bytes) -> dict[str, Any]:
    try:
        with _children.one() as child:
            head: dict[str, Any] = {"template": child.known.get(template)}
            if head["template"] is None:
                number = child.known[template] = len(child.known)
                head = {"template": number, "text": template}
            (answer,) = child.ask(to_json(head), order)
            return from_json(answer)
    except LimitExceededError as error:
        return {"limit": str(error)}


def _is_sandboxed() -> bool:
    return os.environ.get(_SANDBOXED) == str(os.getpid())
