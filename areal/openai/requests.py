"""Request bodies of /v1/chat/completions, /v1/completions and /inference/v1/generate: their models,
and typed calls. Anthropic's and OpenAI's other APIs are translated to a chat (anthropic.py,
responses.py).

For any JSON the result is a call or a `WireError` that names the field, with the status and body
OpenAI's clients expect. A null field counts as absent, as in OpenAI's API. Unsupported options that
would change the output are rejected; other unknown keys are kept in `extra`. Options that OpenAI
does not have (`top_k`, `stop_token_ids`, `ignore_eos`, ...) have the names of `gconfig`;
`max_total_tokens` is its bound on prompt plus output. Tools that a provider runs (web search, code
interpreters, computers) are left out of the prompt, as by a provider that does not have them.

Messages and tools go to the chat template as the client wrote them: their unknown keys, and the
order of keys, are part of the prompt. Only contents become plain text (text parts are joined, null
is the empty text), or parts where they have images (content_parts.py).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from areal.api.config.inference import GenerationHyperparameters
from areal.openai.content_parts import Content, ImagePart, Part, check_place, template_content
from areal.openai.errors import WireError, parse_body
from areal.utils import logging
from areal.utils.http_body import (
    Body,
    Expect,
    Integer,
    Items,
    Name,
    Number,
    Text,
    refused,
    show,
    wrong,
)

logger = logging.getLogger("OpenAI")

_MAX_N = 128
_MAX_STOPS = 64
_MAX_BIASES = 1024
_MAX_CHOICES = 4096  # per request
_MAX_UNKNOWN = 64  # unknown options per request; each is compared with all known ones
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default, for /v1/completions only
_MAX_LOGGED_KINDS = 64  # of tools: clients choose the names
_NO_BOUND = 1 << 30  # prompt and output tokens: effectively the engine's capacity

# Unsupported options that change the output, with the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "echo": (False,),
    "function_call": (),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logits_processors": ([],),
    "lora_name": ("",),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
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
TokenText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Arguments = Annotated[Text | dict[str, Any], Expect("JSON in a text")]


class Sampling(Body):
    """Options of OpenAI's APIs, by one name in all of them."""

    model: Text | None = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    frequency_penalty: Annotated[float, Number(-2, 2)] | None = None
    presence_penalty: Annotated[float, Number(-2, 2)] | None = None
    repetition_penalty: Annotated[float, Number(0, 2)] | None = None
    min_p: TopP = None
    logit_bias: (
        Annotated[
            Annotated[dict[TokenText, Bias], Field(max_length=_MAX_BIASES)],
            Expect(f"at most {_MAX_BIASES} numbers from -100 to 100 by token id"),
        ]
        | None
    ) = None
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
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _streams(self) -> Completions:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "stream=true beside it")
        return self


class CalledFunction(Body):
    name: Text
    arguments: Arguments


class ToolCall(Body):
    """A tool call of an earlier turn."""

    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Items[Part] | None = None
    tool_calls: Items[ToolCall] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise wrong("content", "a text or a list of parts")
        if isinstance(self.content, list):
            check_place(self.role, self.content)
        return self

    @property
    def images(self) -> list[str]:
        parts = self.content if isinstance(self.content, list) else []
        return [part.url for part in parts if isinstance(part, ImagePart)]

    @property
    def plain(self) -> Content:
        """The text, or the parts of a template."""
        parts = self.content or ""
        if isinstance(parts, str):
            return parts
        if self.images:
            return template_content(parts)
        return "".join(part.text for part in parts if not isinstance(part, ImagePart))


class Function(Body):
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class HostedTool(Body):
    """A tool that only a provider runs, or of a kind without a JSON schema."""

    type: Annotated[Name, Field(json_schema_extra={"not": {"const": "function"}})]


def by_tool_kind(own: str) -> Discriminator:
    """Tags "own" the tools of type `own` or of none, and "hosted" those of another type."""

    def kind_of(tool: Any) -> str:
        kind = tool.get("type") if isinstance(tool, dict) else None
        return "hosted" if isinstance(kind, str) and kind not in ("", own) else "own"

    return Discriminator(kind_of)


AnyTool = Annotated[
    Annotated[Tool, Tag("own")] | Annotated[HostedTool, Tag("hosted")], by_tool_kind("function")
]


class FunctionName(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Items[AnyTool]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["auto", "none", "required"]
    | Annotated[NamedTool | AllowedChoice, Field(discriminator="type")]
)


class SchemaOfFormat(Body):
    # A model has an attribute `schema` already.
    json_schema_: dict[str, Any] = Field(alias="schema")


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: SchemaOfFormat


ResponseFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class ChatBody(Completions):
    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    tools: Items[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Integer(0, 20)] | None = None
    max_completion_tokens: Count = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _has_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "logprobs=true beside it")
        return self

    @model_validator(mode="after")
    def _ends_as_it_says(self) -> ChatBody:
        last = self.messages[-1]
        if self.continue_final_message and (last.role != "assistant" or last.tool_calls):
            raise wrong("continue_final_message", "a final message of the assistant, without calls")
        if self.continue_final_message and self.add_generation_prompt:
            raise wrong("add_generation_prompt", "false beside continue_final_message")
        if self.add_generation_prompt is False and not self.continues_final:
            raise wrong("add_generation_prompt", "true, or a final message of the assistant")
        return self

    @property
    def continues_final(self) -> bool:
        """Whether the reply goes on with the last message, an assistant's."""
        if self.continue_final_message is not None:
            return self.continue_final_message
        last = self.messages[-1]
        return last.role == "assistant" and not last.tool_calls and not self.add_generation_prompt


TokenIds = Annotated[Items[TokenId], Field(min_length=1)]


class CompletionBody(Completions):
    prompt: Annotated[
        Text | TokenIds | Annotated[Items[Text | TokenIds], Field(min_length=1)],
        Expect("a text, a list of token ids, or a list of either, none empty"),
    ]
    max_tokens: Annotated[int, Integer(0)] | None = None
    logprobs: Annotated[int, Integer(0, 5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Integer(1, _MAX_N)] | None = None

    @model_validator(mode="after")
    def _is_bounded(self) -> CompletionBody:
        n = self.n or 1
        if self.best_of not in (None, n):
            raise wrong("best_of", f"it left out or equal to n ({n})")
        if self.echo and self.stream:
            raise refused("echo", "not supported in a stream, leave one of them out")
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens", "at least 1, or echo=true beside it")
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


# Of vLLM's sampling_params: about text, which this route has none of, or without effect.
_OF_GENERATE = {
    *("detokenize", "output_kind", "skip_special_tokens", "spaces_between_special_tokens"),
    *("output_text_buffer_length", "include_stop_str_in_output", "extra_args"),
}


class GenerateBody(Body):
    """vLLM's token-in, token-out API."""

    model: Text | None = None
    request_id: Text | None = None
    token_ids: TokenIds
    sampling_params: dict[str, Any] | None = None
    stream: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """`messages` have text contents, or parts where they have images; `tools` holds those the model
    may use, possibly none."""

    model: str  # empty if absent
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    gconfig: GenerationHyperparameters
    stream: bool
    include_usage: bool  # at the end of a stream
    logprobs: bool
    top_logprobs: int
    forced_tool: str | Literal[True] | None = None  # the tool to call; True: any of `tools`
    json_schema: dict[str, Any] | None = None  # of the reply's content
    parallel_tool_calls: bool = True  # False: only the first call of a reply is returned
    continues_final: bool = False  # the reply goes on with the last message
    return_token_ids: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)  # URLs, in the order of the chat
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
    echo: bool = False  # the reply begins with the prompt
    generates: bool = True  # False: the prompt is all of the reply (max_tokens=0)
    return_token_ids: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def parse_chat(content: Any) -> ChatCall:
    body = parse_body(ChatBody, content)
    default = GenerationHyperparameters().max_new_tokens
    tools = _tools(body, content)
    return ChatCall(
        messages=[
            _as_written(*pair) for pair in zip(content["messages"], body.messages, strict=True)
        ],
        tools=tools,
        gconfig=_gconfig(body, body.max_completion_tokens or body.max_tokens or default),
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
        forced_tool=_forced_tool(body, tools),
        json_schema=_json_schema(body.response_format),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        continues_final=body.continues_final,
        chat_template_kwargs=body.chat_template_kwargs or {},
        images=[url for message in body.messages for url in message.images],
        **_shared(body, content),
    )


def parse_completion(content: Any) -> CompletionCall:
    body = parse_body(CompletionBody, content)
    return CompletionCall(
        prompt=body.prompts,
        gconfig=_gconfig(body, _new_tokens(body)),
        logprobs=body.logprobs is not None,
        top_logprobs=body.logprobs or 0,
        echo=bool(body.echo),
        generates=body.max_tokens != 0,
        **_shared(body, content),
    )


def _new_tokens(body: CompletionBody) -> int:
    """With max_tokens=0 one, which is not shown: so the prompt is checked as any other."""
    if body.max_tokens is None:
        return _DEFAULT_COMPLETION_TOKENS
    return max(body.max_tokens, 1)


def parse_generate(content: Any) -> CompletionCall:
    """A call of one prompt, whose `sampling_params` have the names of /v1/completions."""
    body = parse_body(GenerateBody, content)
    if body.stream:
        raise WireError(400, "stream: not supported here, leave it out", "stream")
    options = content.get("sampling_params") or {}
    if options.get("echo"):
        name = "sampling_params.echo"
        raise WireError(400, f"{name}: not supported here, leave it out", name)
    given = {name: options[name] for name in options if name not in _OF_GENERATE}
    try:
        call = parse_completion({**given, "prompt": body.token_ids, "model": body.model})
    except WireError as error:
        param = None if error.param is None else f"sampling_params.{error.param}"
        raise WireError(400, f"sampling_params.{error.message}", param) from None
    return call


def check_servable(call: ChatCall | CompletionCall) -> None:
    """WireError for what no engine here can do; ignoring it would answer another question."""
    if call.top_logprobs and not (isinstance(call, CompletionCall) and call.echo):
        chosen = "top_logprobs=0" if isinstance(call, ChatCall) else "logprobs=0"
        param = chosen.partition("=")[0]
        message = f"{param}: only the sampled token's log-probability is known; send {chosen}"
        raise WireError(400, message, param)


def left_out(tools: list[Any]) -> None:
    """Log, once for each kind, the tools that the model is not told of."""
    for kind in {tool.type for tool in tools} - _logged_kinds:
        if len(_logged_kinds) < _MAX_LOGGED_KINDS:
            _logged_kinds.add(kind)
            logger.warning(
                "a client offers tools of type %s: left out, only functions can be called here",
                show(kind),
            )


_logged_kinds: set[str] = set()


def _shared(body: Completions, content: dict[str, Any]) -> dict[str, Any]:
    options = body.stream_options
    return {
        "model": body.model or "",
        "stream": bool(body.stream),
        "include_usage": options is not None and bool(options.include_usage),
        "return_token_ids": bool(body.return_token_ids),
        "extra": _extra(content, type(body)),
    }


def _tools(body: ChatBody, content: dict[str, Any]) -> list[dict[str, Any]]:
    """Those the model is told of, as the client wrote them."""
    tools, choice = body.tools or [], body.tool_choice
    left_out([tool for tool in tools if isinstance(tool, HostedTool)])
    if choice == "none":
        return []
    allowed: set[str] | None = None
    if isinstance(choice, AllowedChoice):
        choices = choice.allowed_tools.tools
        allowed = {tool.function.name for tool in choices if isinstance(tool, Tool)}
    return [
        written
        for written, tool in zip(content.get("tools") or (), tools, strict=True)
        if isinstance(tool, Tool) and (allowed is None or tool.function.name in allowed)
    ]


def _forced_tool(body: ChatBody, tools: list[dict[str, Any]]) -> str | Literal[True] | None:
    choice = body.tool_choice
    if isinstance(choice, AllowedChoice):
        choice = choice.allowed_tools.mode
    if choice not in ("required",) and not isinstance(choice, NamedTool):
        return None
    names = [tool["function"]["name"] for tool in tools]
    if not names:
        raise WireError(400, "tool_choice: there is no tool to call: see tools", "tool_choice")
    if choice == "required":
        return True
    assert isinstance(choice, NamedTool)
    name = choice.function.name
    if name not in names:
        message = f"tool_choice.function.name: no such tool in tools, got {show(name)}"
        raise WireError(400, message, "tool_choice.function.name")
    return name


def _json_schema(wanted: PlainFormat | SchemaFormat | None) -> dict[str, Any] | None:
    if isinstance(wanted, SchemaFormat):
        return wanted.json_schema.json_schema_
    return {"type": "object"} if wanted is not None and wanted.type == "json_object" else None


def _as_written(message: dict[str, Any], checked: ChatMessage) -> dict[str, Any]:
    written = {key: value for key, value in message.items() if value is not None}
    return {**written, "content": checked.plain}


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
        "presence_penalty": body.presence_penalty,
        "repetition_penalty": body.repetition_penalty,
        "min_p": body.min_p,
        "logit_bias": body.logit_bias,
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
