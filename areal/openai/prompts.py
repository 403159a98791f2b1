"""Chat messages to prompt tokens, by the tokenizer's chat template."""

from __future__ import annotations

from typing import Any

from areal.api.json_text import loads_written
from areal.openai.requests import ChatCall, WireError
from areal.utils.chat_template import TemplateError, render_chat

# Arguments of transformers' renderer; a request may set template variables, but not these.
_RESERVED = {
    *("conversation", "conversations", "messages", "tools", "documents", "chat_template"),
    "add_generation_prompt",
    *("continue_final_message", "sanitize_control_tokens", "tokenize", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "tokenizer_kwargs",
}


def chat_prompt_ids(tokenizer: Any, call: ChatCall) -> list[int]:
    """Token ids of the messages, followed by the header of the assistant's turn."""
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
    try:
        return render_chat(
            tokenizer,
            [_for_template(message) for message in call.messages],
            tools=call.tools or None,
            variables=call.chat_template_kwargs,
        )
    except TemplateError as err:
        message = f"messages: the model's chat template cannot show them ({str(err)[:200]})"
        raise WireError(400, message, "messages") from err


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
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
