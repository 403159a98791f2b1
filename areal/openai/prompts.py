"""Chat messages to prompt tokens, by the tokenizer's chat template.

Clients put system messages anywhere and several users' messages in a row; templates may refuse
both, or leave a system message out without a word. So a chat is rendered as it is first, then with
system messages merged at the start and the later ones marked within the neighbouring turns, then
without the system role. The first text that shows all of them is taken.

A final message of the assistant is continued: the prompt ends with its text, in an open turn.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from areal.openai.content_parts import Content, joined_contents
from areal.openai.errors import WireError
from areal.openai.requests import ChatCall
from areal.utils.chat_template import TemplateError, for_template, render_chat

Message = dict[str, Any]

# Placeholder of the text to be continued. Random, so that no message can contain it.
_PREFILL_PLACE = f"@prefill-{secrets.token_hex(8)}@"

# Arguments of transformers' renderer; a request may set template variables, but not these.
_RESERVED = {
    *("conversation", "conversations", "messages", "tools", "documents", "chat_template"),
    "add_generation_prompt",
    *("continue_final_message", "sanitize_control_tokens", "tokenize", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "tokenizer_kwargs",
}


def chat_prompt_ids(tokenizer: Any, call: ChatCall) -> list[int]:
    """Token ids of the messages, followed by the header of the assistant's turn (or its begin)."""
    text = chat_prompt_text(tokenizer, call)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def chat_prompt_text(tokenizer: Any, call: ChatCall) -> str:
    """The text whose tokens `chat_prompt_ids` returns.

    TemplateLimitError if the template exceeds its resource limits: not the caller's fault.
    """
    if not tokenizer.chat_template:
        raise WireError(
            400, "messages: this model has no chat template; send a prompt to /v1/completions"
        )
    if taken := sorted(_RESERVED & call.chat_template_kwargs.keys()):
        name = f"chat_template_kwargs.{taken[0]}"
        raise WireError(400, f"{name}: not a variable of a chat template", name)
    if not call.continues_final:
        return _rendered(tokenizer, call, call.messages)
    *before, last = call.messages
    text = _rendered(tokenizer, call, [*before, {**last, "content": _PREFILL_PLACE}])
    head, found, _ = text.rpartition(_PREFILL_PLACE)
    if not found:
        message = "messages: the model's chat template leaves out the final message"
        raise WireError(400, f"{message}, so it cannot be continued", "messages")
    return head + last["content"]


def _rendered(tokenizer: Any, call: ChatCall, messages: list[Message]) -> str:
    first: str | None = None
    error: TemplateError | None = None
    for variant in _variants([for_template(message) for message in messages]):
        try:
            text = render_chat(
                tokenizer, variant, tools=call.tools or None, variables=call.chat_template_kwargs
            )
        except TemplateError as err:
            error = error or err
            continue
        if all(m["content"].strip() in text for m in messages if _is_system(m)):
            return text
        first = first or text
    if first is not None:  # a template that never shows one
        return first
    message = f"messages: the model's chat template cannot show them ({str(error)[:200]})"
    raise WireError(400, message, "messages") from error


def _variants(messages: list[Message]) -> Iterator[list[Message]]:
    yield messages
    for has_system_role in (True, False):
        folded = _folded(messages, has_system_role)
        if folded != messages:
            yield folded


def _folded(messages: list[Message], has_system_role: bool) -> list[Message]:
    """System messages first, or in the turns of users and tools; users' turns merged."""
    num_first = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    first = "\n\n".join(message["content"] for message in messages[:num_first])
    folded: list[Message] = [{"role": "system", "content": first}] if num_first else []
    waiting: list[str] = []  # texts for the next user's turn
    if not has_system_role:
        folded, waiting = [], [first] if num_first else []
    for message in messages[num_first:]:
        role, content = message["role"], message["content"]
        if role == "system":
            marked = f"<system>\n{content}\n</system>"
            if folded and folded[-1]["role"] in ("user", "tool"):
                folded[-1] = _joined(folded[-1], marked)
            else:
                waiting.append(marked)
            continue
        if waiting and role != "user":
            folded.append({"role": "user", "content": "\n\n".join(waiting)})
            waiting = []
        if role == "user" and folded and folded[-1]["role"] == "user":
            folded[-1] = _joined(folded[-1], content)
        else:
            folded.append({**message, "content": joined_contents([*waiting, content])})
            waiting = []
    if waiting:
        folded.append({"role": "user", "content": "\n\n".join(waiting)})
    return folded


def _joined(message: Message, content: Content) -> Message:
    return {**message, "content": joined_contents([message["content"], content])}


def _is_system(message: Message) -> bool:
    return message["role"] in ("system", "developer")
