"""Replies and stream chunks of the chat and completion API, as dicts ready for JSON.

One `Output` is one choice. `tokenizer` is used only where log-probabilities were requested, to name
their tokens. They cover every sampled token, also a stop token that the text does not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal.api.io_struct import StopReason
from areal.openai.parsing.parser import parse_output
from areal.openai.requests import ChatCall, CompletionCall
from areal.openai.text_stream import token_bytes, token_text


@dataclass(frozen=True, slots=True)
class Output:
    """One sampled output; `text` is the part visible to the client (see visible_text)."""

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    text: str
    stop_string: str | None = None  # that ended it


def chat_reply(
    call: ChatCall,
    completion_id: str,
    created: int,
    outputs: Sequence[Output],
    prompt_tokens: int,
    tokenizer: Any,
    *,
    prompt_ids: list[int] | None = None,
    cached_tokens: int = 0,
    tool_format: str = "hermes",
    reasoning: str = "auto",
    in_reasoning: bool = False,
) -> dict[str, Any]:
    """`created` in Unix seconds. Tool calls are parsed only if the request has tools.

    `prompt_ids` are told to who asks for token ids. `tool_format` and the options after it are
    those of OutputParser.
    """
    choices = []
    for index, output in enumerate(outputs):
        options = {"tools": call.tools, "reasoning": reasoning, "in_reasoning": in_reasoning}
        parsed = parse_output(output.text, tool_format, **options)
        calls = parsed.calls if call.parallel_tool_calls else parsed.calls[:1]
        content = None if parsed.calls and not parsed.content.strip() else parsed.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if calls:
            message["tool_calls"] = [tool_call.as_dict() for tool_call in calls]
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": _chat_logprobs_of(call, output, tokenizer),
                "finish_reason": finish_reason(output.stop_reason, has_calls=bool(parsed.calls)),
                "stop_reason": output.stop_string,
                **({"token_ids": output.token_ids} if call.return_token_ids else {}),
            }
        )
    return {
        **_head(call, completion_id, created, "chat.completion"),
        **({"prompt_token_ids": prompt_ids} if call.return_token_ids else {}),
        "choices": choices,
        "usage": _usage(outputs, prompt_tokens, cached_tokens),
    }


def completion_reply(
    call: CompletionCall,
    completion_id: str,
    created: int,
    outputs: Sequence[Output],
    prompt_tokens: int,
    tokenizer: Any,
    *,
    prompts: Sequence[list[int]] = (),
    cached_tokens: int = 0,
) -> dict[str, Any]:
    """`outputs` in prompt order, n per prompt; `prompt_tokens` is the sum over all prompts.

    `prompts` are told to who asks for token ids.
    """
    choices = []
    for index, output in enumerate(outputs):
        logprobs = None
        if call.logprobs:
            logprobs = completion_logprobs(tokenizer, output.token_ids, output.logprobs)
        choices.append(
            {
                "index": index,
                "text": output.text,
                "logprobs": logprobs,
                "finish_reason": finish_reason(output.stop_reason),
                "stop_reason": output.stop_string,
            }
        )
        if call.return_token_ids:
            prompt = prompts[index // call.gconfig.n_samples]
            choices[-1] |= {"prompt_token_ids": prompt, "token_ids": output.token_ids}
    return {
        **_head(call, completion_id, created, "text_completion"),
        "choices": choices,
        "usage": _usage(outputs, prompt_tokens, cached_tokens),
    }


def generate_reply(
    call: CompletionCall, request_id: str, outputs: Sequence[Output]
) -> dict[str, Any]:
    """vLLM's reply of tokens, which it names by their ids."""
    choices = []
    for index, output in enumerate(outputs):
        logprobs = None
        if call.logprobs:
            pairs = zip(output.token_ids, output.logprobs, strict=True)
            named = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
            logprobs = {"content": [{**one, "bytes": None, "top_logprobs": []} for one in named]}
        choices.append(
            {
                "index": index,
                "token_ids": output.token_ids,
                "logprobs": logprobs,
                "finish_reason": finish_reason(output.stop_reason),
            }
        )
    return {"request_id": request_id, "choices": choices, "prompt_logprobs": None}


def chat_chunk(
    call: ChatCall,
    completion_id: str,
    created: int,
    index: int,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    """One chunk of choice `index`: first {"role": "assistant", "content": ""}, last {}."""
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    return _chunk(call, completion_id, created, "chat.completion.chunk", [choice])


def completion_chunk(
    call: CompletionCall,
    completion_id: str,
    created: int,
    index: int,
    text: str,
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
    return _chunk(call, completion_id, created, "text_completion", [choice])


def usage_chunk(
    call: ChatCall | CompletionCall, completion_id: str, created: int, usage: dict[str, Any]
) -> dict[str, Any]:
    """The last chunk of a stream whose request has `include_usage`."""
    kind = "chat.completion.chunk" if isinstance(call, ChatCall) else "text_completion"
    return {**_chunk(call, completion_id, created, kind, []), "usage": usage}


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def finish_reason(stop_reason: StopReason, *, has_calls: bool = False) -> str:
    """OpenAI's finish reason; "abort" (the server ended the request) is an extension."""
    return "tool_calls" if has_calls and stop_reason == "stop" else stop_reason


def chat_logprobs(
    tokenizer: Any, token_ids: Sequence[int], logprobs: Sequence[float]
) -> dict[str, Any]:
    content = []
    for token, logprob in zip(token_ids, logprobs, strict=True):
        raw = token_bytes(tokenizer, token)
        content.append(
            {
                "token": token_text(tokenizer, token),
                "logprob": logprob,
                "bytes": None if raw is None else list(raw),
                "top_logprobs": [],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Any, token_ids: Sequence[int], logprobs: Sequence[float], *, text_offset: int = 0
) -> dict[str, Any]:
    """`text_offset`: number of characters before these tokens."""
    tokens = [token_text(tokenizer, token) for token in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": list(logprobs),
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _chat_logprobs_of(call: ChatCall, output: Output, tokenizer: Any) -> dict[str, Any] | None:
    return chat_logprobs(tokenizer, output.token_ids, output.logprobs) if call.logprobs else None


def _usage(outputs: Sequence[Output], prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    num_sampled = sum(len(output.token_ids) for output in outputs)
    return usage_of(prompt_tokens, num_sampled, cached_tokens)


def _chunk(call, completion_id: str, created: int, kind: str, choices: list) -> dict[str, Any]:
    chunk = {**_head(call, completion_id, created, kind), "choices": choices}
    return {**chunk, "usage": None} if call.include_usage else chunk


def _head(
    call: ChatCall | CompletionCall, completion_id: str, created: int, kind: str
) -> dict[str, Any]:
    return {"id": completion_id, "object": kind, "created": created, "model": call.model}
