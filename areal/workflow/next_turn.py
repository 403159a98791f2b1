"""The text between two replies of one chat: the end of a turn, new messages, the next header.

Taken from the rendered chat template, after a placeholder for the reply. Text before it is not
used, because a template may rewrite earlier turns (drop their thoughts).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from areal.utils.chat_template import render_chat

_REPLY_PLACE = "@reply@"


def text_after_reply(
    messages: Sequence[dict[str, Any]],
    tokenizer: Any,
    *,
    enable_thinking: bool,
    tools: Sequence[dict[str, Any]] | None = None,
) -> str:
    """From the end of the assistant's turn through `messages` to the header of its next."""
    chat = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": _REPLY_PLACE},
        *messages,
    ]
    variables = {"enable_thinking": enable_thinking}
    text = render_chat(tokenizer, chat, tools=tools, variables=variables)
    _, found, after = text.rpartition(_REPLY_PLACE)
    if not found:
        raise ValueError(
            "the tokenizer's chat template leaves out earlier turns, so a chat cannot be "
            f"continued; for a reply {_REPLY_PLACE!r} and what follows it rendered {text!r:.300}"
        )
    return after


def require_shown(
    role: str,
    tokenizer: Any,
    *,
    enable_thinking: bool,
    tools: Sequence[dict[str, Any]] | None = None,
) -> None:
    """ValueError if the template leaves out messages of `role` after a reply."""
    probe = "observation"
    message = {"role": role, "content": probe, "name": "probe", "tool_call_id": "call00000"}
    text = text_after_reply([message], tokenizer, enable_thinking=enable_thinking, tools=tools)
    if probe not in text:
        raise ValueError(
            f"the tokenizer's chat template leaves out messages of role {role!r} that follow a "
            f"reply: for {probe!r} it rendered {text!r:.300}"
        )


def join_turns(before: Sequence[int], after: list[int], stop_ids: Collection[int]) -> list[int]:
    """`after`, without the end-of-turn token if the model has generated it."""
    ended = before[-1] in stop_ids and after[:1] == [before[-1]]
    return after[1:] if ended else after
