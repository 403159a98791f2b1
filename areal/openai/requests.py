"""Request bodies of /v1/chat/completions and /v1/completions: their models, and typed calls.

For any JSON the result is a call or a `WireError` that names the field, with the status and body
OpenAI's clients expect. A null field counts as absent, as in OpenAI's API. Unsupported options that
would change the output are rejected; other unknown keys are kept in `extra`. Options that OpenAI
does not have (`top_k`, `stop_token_ids`, `ignore_eos`, ...) have the names of `gconfig`;
`max_total_tokens` is its bound on prompt plus output.

Messages and tools go to the chat template as the client wrote them: their unknown keys, and the
order of keys, are part of the prompt. Only contents become plain text (text parts are joined, null
is the empty text).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import Field, model_validator

from areal.api.config.inference import GenerationHyperparameters
from areal.api.json_text import JsonError, loads_object
from areal.utils.http_body import (
    Body,
    Expect,
    Integer,
    Items,
    Name,
    Number,
    Text,
    parse,
    refused,
    show,
    wrong,
)

M = TypeVar("M", bound=Body)

_MAX_N = 128
_MAX_STOPS = 64
_MAX_CHOICES = 4096  # per request
_MAX_UNKNOWN = 64  # unknown options per request; each is compared with all known ones
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default, for /v1/completions only
_NO_BOUND = 1 << 30  # prompt and output tokens: effectively the engine's capacity

# Unsupported options that change the output, with the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": (),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logit_bias": ({},),
    "lora_name": ("",),
    "min_p": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "web_search_options": (),
}


TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Count: TypeAlias = Annotated[int, Integer(1)] | None
Temperature: TypeAlias = Annotated[float, Number(0, 100)] | None
TopP: TypeAlias = Annotated[float, Number(0, 1)] | None
TopK: TypeAlias = Annotated[int, Integer(-1)] | None
Arguments = Annotated[Text | dict[str, Any], Expect("JSON in a text")]
ToolChoice = Annotated[Literal["auto", "none"], Expect("'auto' or 'none': a call cannot be forced")]


class Sampling(Body):
    """Options of OpenAI's APIs, by one name in all of them."""

    model: Text | None = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    frequency_penalty: Annotated[float, Number(-2, 2)] | None = None
    seed: Annotated[int, Integer()] | None = None
    stop: (
        Annotated[
            Name | Annotated[Items[Name], Field(max_length=_MAX_STOPS)],
            Expect(f"a text or a list of at most {_MAX_STOPS} texts, none empty"),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[Items[TokenId], Expect("a list of token ids")] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    min_new_tokens: Annotated[int, Integer(0)] | None = None
    max_total_tokens: Count = None
    stream: bool | None = None


class StreamOptions(Body):
    include_usage: bool | None = None


class Completions(Sampling):
    """Options that chats and plain completions share."""

    n: Annotated[int, Integer(1, _MAX_N)] | None = None
    max_tokens: Count = None
    min_tokens: Annotated[int, Integer(0)] | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _streams(self) -> Completions:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "stream=true beside it")
        return self


class TextPart(Body):
    type: Annotated[Literal["text"], Expect("'text': only text is understood here")]
    text: Text


class CalledFunction(Body):
    name: Text
    arguments: Arguments


class ToolCall(Body):
    """A tool call of an earlier turn."""

    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Items[TextPart] | None = None
    tool_calls: Items[ToolCall] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise wrong("content", "a text or a list of text parts")
        return self

    @property
    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class Function(Body):
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class ChatBody(Completions):
    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Integer(0, 20)] | None = None
    max_completion_tokens: Count = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "logprobs=true beside it")
        return self


TokenIds = Annotated[Items[TokenId], Field(min_length=1)]


class CompletionBody(Completions):
    prompt: Annotated[
        Text | TokenIds | Annotated[Items[Text | TokenIds], Field(min_length=1)],
        Expect("a text, a list of token ids, or a list of either, none empty"),
    ]
    logprobs: Annotated[int, Integer(0, 5)] | None = None
    best_of: Annotated[int, Integer(1, _MAX_N)] | None = None

    @model_validator(mode="after")
    def _is_bounded(self) -> CompletionBody:
        n = self.n or 1
        if self.best_of not in (None, n):
            raise wrong("best_of", f"it left out or equal to n ({n})")
        if (num_choices := len(self.prompts) * n) > _MAX_CHOICES:
            raise refused(
                "prompt",
                f"at most {_MAX_CHOICES} choices of one request, n each, got {num_choices}",
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """`messages` have text contents; `tools` holds those the model may use, possibly none."""

    model: str  # empty if absent
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    gconfig: GenerationHyperparameters
    stream: bool
    include_usage: bool  # at the end of a stream
    logprobs: bool
    top_logprobs: int
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # keys without effect


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """`prompt` is always a list of prompts, each a text or a list of token ids.

    Every prompt gets `gconfig.n_samples` outputs; choices are in prompt order.
    """

    model: str
    prompt: list[str | list[int]]
    gconfig: GenerationHyperparameters
    stream: bool
    include_usage: bool
    logprobs: bool
    top_logprobs: int
    extra: dict[str, Any] = field(default_factory=dict)


def parse_chat(content: Any) -> ChatCall:
    body = parse_body(ChatBody, content)
    default = GenerationHyperparameters().max_new_tokens
    tools = None if body.tool_choice == "none" else content.get("tools")
    return ChatCall(
        messages=[
            _as_written(*pair) for pair in zip(content["messages"], body.messages, strict=True)
        ],
        tools=tools or [],
        gconfig=_gconfig(body, body.max_completion_tokens or body.max_tokens or default),
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
        chat_template_kwargs=body.chat_template_kwargs or {},
        **_shared(body, content),
    )


def parse_completion(content: Any) -> CompletionCall:
    body = parse_body(CompletionBody, content)
    return CompletionCall(
        prompt=body.prompts,
        gconfig=_gconfig(body, body.max_tokens or _DEFAULT_COMPLETION_TOKENS),
        logprobs=body.logprobs is not None,
        top_logprobs=body.logprobs or 0,
        **_shared(body, content),
    )


def loads_body(data: bytes) -> dict[str, Any]:
    """The JSON object of a request, or WireError."""
    try:
        return loads_object(data)
    except JsonError as error:
        raise WireError(400, str(error), error.field) from None


def parse_body(model: type[M], content: Any) -> M:
    """`parse` with OpenAI's and Anthropic's kind of error."""
    try:
        return parse(model, content)
    except JsonError as error:
        raise WireError(400, str(error), error.field) from None


def _shared(body: Completions, content: dict[str, Any]) -> dict[str, Any]:
    options = body.stream_options
    return {
        "model": body.model or "",
        "stream": bool(body.stream),
        "include_usage": options is not None and bool(options.include_usage),
        "extra": _extra(content, type(body)),
    }


def _as_written(message: dict[str, Any], checked: ChatMessage) -> dict[str, Any]:
    written = {key: value for key, value in message.items() if value is not None}
    return {**written, "content": checked.text}


def _gconfig(body: Completions, max_new_tokens: int) -> GenerationHyperparameters:
    defaults = GenerationHyperparameters()
    options = {
        "n_samples": body.n,
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": body.min_tokens if body.min_new_tokens is None else body.min_new_tokens,
        "max_tokens": body.max_total_tokens or _NO_BOUND,
        "greedy": body.temperature == 0,
        "temperature": body.temperature or 1.0,
        "top_p": body.top_p,
        "top_k": defaults.top_k if body.top_k in (-1, 0) else body.top_k,  # no limit
        "stop_token_ids": body.stop_token_ids,
        "ignore_eos": body.ignore_eos,
        "skip_special_tokens": body.skip_special_tokens,
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop or None,
        "frequency_penalty": body.frequency_penalty,
        "seed": body.seed,
    }
    try:
        return defaults.new(**{name: v for name, v in options.items() if v is not None})
    except ValueError as err:
        raise WireError(400, str(err), str(err).split(" ", 1)[0].rstrip(":")) from None


def _extra(content: dict[str, Any], model: type[Body]) -> dict[str, Any]:
    """The keys that the model does not have; WireError for one that must not be ignored."""
    known = model.model_fields
    extra, unknown = {}, {name: v for name, v in content.items() if name not in known}
    if len(unknown) > _MAX_UNKNOWN:
        raise WireError(
            400, f"body: {len(unknown)} unknown options, the first is {show(min(unknown))}"
        )
    for name, value in unknown.items():
        if name in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[name]:
                message = f"{name}: not supported, leave it out; got {show(value)}"
                raise WireError(400, message, name)
            continue
        if similar := difflib.get_close_matches(name, sorted(known), 1, cutoff=0.85):
            message = f"{show(name)}: unknown option; did you mean {similar[0]}?"
            raise WireError(400, message, name[:60])
        extra[name] = value
    return extra


_TYPES = {
    429: "rate_limit_error"
}  # other statuses: the request is invalid below 500, else a server error
_CODES = {401: "invalid_api_key"}


class WireError(Exception):
    """`param` is the invalid field of the request; `code` is machine-readable."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


def error_body(err: WireError) -> dict[str, Any]:
    fallback = "invalid_request_error" if err.status < 500 else "server_error"
    return {
        "error": {
            "message": err.message,
            "type": _TYPES.get(err.status, fallback),
            "param": err.param,
            "code": err.code or _CODES.get(err.status),
        }
    }
