"""Request bodies of /v1/chat/completions and /v1/completions as typed calls.

For any JSON the result is a call or a `WireError` that names the field, with the status and body
OpenAI's clients expect. Unsupported options that would change the output are rejected; other
unknown keys are kept in `extra`. Options that OpenAI does not have (`top_k`, `stop_token_ids`,
`ignore_eos`, ...) have the names of `gconfig`; `max_total_tokens` is its bound on prompt plus
output.

Messages and tools are checked and normalised: contents become plain text (text parts are joined,
null is the empty text). `Fields` reads one field at a time; a null field counts as absent, as in
OpenAI's API.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from areal.api.config.inference import GenerationHyperparameters

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


def parse_chat(body: Any) -> ChatCall:
    fields = Fields(body)
    messages = parse_messages(fields)
    tools = parse_tools(fields)
    logprobs = fields.flag("logprobs")
    top_logprobs = fields.integer("top_logprobs", 0, low=0, high=20)
    if top_logprobs and not logprobs:
        raise fields.wrong("top_logprobs", "logprobs=true beside it")
    max_tokens = _bound(fields, "max_tokens", GenerationHyperparameters().max_new_tokens)
    max_tokens = _bound(fields, "max_completion_tokens", max_tokens)
    gconfig = _gconfig(fields, max_tokens)
    stream, include_usage = _streaming(fields)
    return ChatCall(
        model=fields.text("model", ""),
        messages=messages,
        tools=tools,
        gconfig=gconfig,
        stream=stream,
        include_usage=include_usage,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        chat_template_kwargs=fields.object("chat_template_kwargs"),
        extra=_extra(fields),
    )


def parse_completion(body: Any) -> CompletionCall:
    fields = Fields(body)
    prompt = _prompts(fields)
    logprobs = fields.has("logprobs")
    top_logprobs = fields.integer("logprobs", 0, low=0, high=5)
    gconfig = _gconfig(fields, _bound(fields, "max_tokens", _DEFAULT_COMPLETION_TOKENS))
    if (num_choices := len(prompt) * gconfig.n_samples) > _MAX_CHOICES:
        message = (
            f"prompt: at most {_MAX_CHOICES} choices of one request, n each, got {num_choices}"
        )
        raise WireError(400, message, "prompt")
    if fields.any("best_of") not in (None, gconfig.n_samples):
        raise fields.wrong("best_of", f"it left out or equal to n ({gconfig.n_samples})")
    stream, include_usage = _streaming(fields)
    return CompletionCall(
        model=fields.text("model", ""),
        prompt=prompt,
        gconfig=gconfig,
        stream=stream,
        include_usage=include_usage,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        extra=_extra(fields),
    )


def _prompts(fields: Fields) -> list[str | list[int]]:
    prompt = fields.any("prompt")
    if is_text(prompt) or is_token_ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(is_text(p) or is_token_ids(p) for p in prompt):
        return prompt
    raise fields.wrong("prompt", "a text, a list of token ids, or a list of either, none empty")


def _gconfig(fields: Fields, max_new_tokens: int) -> GenerationHyperparameters:
    defaults = GenerationHyperparameters()
    temperature = fields.number("temperature", 1.0, low=0, high=100)
    min_new_tokens = fields.integer("min_tokens", 0, low=0)
    options = {
        "n_samples": fields.integer("n", 1, low=1, high=_MAX_N),
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": fields.integer("min_new_tokens", min_new_tokens, low=0),
        "max_tokens": _bound(fields, "max_total_tokens", _NO_BOUND),
        "greedy": temperature == 0,
        "temperature": temperature or 1.0,
        "top_p": fields.number("top_p", 1.0, low=0, high=1),
        "top_k": fields.integer("top_k", defaults.top_k, low=-1),
        "stop_token_ids": _stop_token_ids(fields),
        "ignore_eos": fields.flag("ignore_eos"),
        "skip_special_tokens": fields.flag("skip_special_tokens", True),
        "stop": _stop(fields),
        "frequency_penalty": fields.number("frequency_penalty", 0.0, low=-2, high=2),
        "seed": fields.integer("seed", None),
    }
    if options["top_k"] in (-1, 0):  # "no limit" in other servers
        options["top_k"] = defaults.top_k
    try:
        return GenerationHyperparameters(**options)
    except ValueError as err:
        raise WireError(400, str(err), str(err).split(" ", 1)[0].rstrip(":")) from None


def _bound(fields: Fields, name: str, default: int) -> int:
    return fields.integer(name, default, low=1)


def _stop_token_ids(fields: Fields) -> list[int]:
    ids = fields.items("stop_token_ids")
    if ids and not is_token_ids(ids):
        raise fields.wrong("stop_token_ids", "a list of token ids")
    return ids


def _stop(fields: Fields) -> list[str] | None:
    stop = fields.any("stop")
    if stop is None or stop == []:
        return None
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(is_text(text) and text for text in texts):
        raise fields.wrong("stop", "a text or a list of texts, none empty")
    if len(texts) > _MAX_STOPS:
        raise WireError(400, f"stop: expected at most {_MAX_STOPS}, got {len(texts)}", "stop")
    return texts


def _streaming(fields: Fields) -> tuple[bool, bool]:
    stream = fields.flag("stream")
    options = Fields(fields.object("stream_options"), "stream_options")
    if fields.has("stream_options") and not stream:
        raise fields.wrong("stream_options", "stream=true beside it")
    return stream, options.flag("include_usage")


def _extra(fields: Fields) -> dict[str, Any]:
    """The remaining keys; WireError for one that must not be ignored."""
    extra, unknown = {}, fields.rest()
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
        if similar := difflib.get_close_matches(name, sorted(fields.asked), 1, cutoff=0.85):
            message = f"{show(name)}: unknown option; did you mean {similar[0]}?"
            raise WireError(400, message, name[:60])
        extra[name] = value
    return extra


_ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_messages(fields: Fields) -> list[dict[str, Any]]:
    messages = fields.items("messages")
    if not messages:
        raise fields.wrong("messages", "a list with at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def parse_tools(fields: Fields) -> list[dict[str, Any]]:
    """The tools the model may use: none when `tool_choice` is "none"."""
    tools = fields.items("tools")
    for i, tool in enumerate(tools):
        own = Fields(tool, f"tools[{i}]")
        if own.any("type") != "function":
            raise own.wrong("type", "'function'")
        function = Fields(own.any("function"), f"tools[{i}].function")
        if not function.text("name"):
            raise function.wrong("name", "a name")
        function.text("description", None)
        function.object("parameters")
    choice = fields.any("tool_choice")
    if choice not in (None, "auto", "none"):
        raise fields.wrong("tool_choice", "'auto' or 'none': a call cannot be forced")
    return [] if choice == "none" else tools


def _message(message: Any, where: str) -> dict[str, Any]:
    fields = Fields(message, where)
    role = fields.any("role")
    if role not in _ROLES:
        raise fields.wrong("role", f"one of {', '.join(_ROLES)}")
    checked = {**message, "content": _content(fields, where, may_be_absent=role == "assistant")}
    if fields.has("tool_calls"):
        calls = fields.items("tool_calls")
        checked["tool_calls"] = [_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return {key: value for key, value in checked.items() if value is not None}


def _content(fields: Fields, where: str, *, may_be_absent: bool) -> str:
    content = fields.any("content")
    if content is None and may_be_absent:
        return ""
    if is_text(content):
        return content
    if not isinstance(content, list):
        raise fields.wrong("content", "a text or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        own = Fields(part, f"{where}.content[{i}]")
        if own.any("type") != "text":
            raise own.wrong("type", "'text': only text is understood here")
        texts.append(own.text("text"))
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call of an earlier turn."""
    fields = Fields(call, where)
    function = Fields(fields.any("function"), f"{where}.function")
    if not isinstance(function.any("arguments"), str | dict):
        raise function.wrong("arguments", "JSON in a text")
    function.text("name")
    kind = fields.any("type")
    if kind not in (None, "function"):
        raise WireError(
            400, f"{where}.type: expected 'function', got {show(kind)}", f"{where}.type"
        )
    return call


_INT_END = 1 << 63
_REQUIRED = object()


class Fields:
    """The fields of one JSON object; tracks which ones were read."""

    def __init__(self, body: Any, where: str = "") -> None:
        if not isinstance(body, dict):
            raise WireError(400, f"{where or 'body'}: expected a JSON object, got {show(body)}")
        self._body = body
        self._where = f"{where}." if where else ""
        self.asked: set[str] = set()  # names that were read, present or not

    def rest(self) -> dict[str, Any]:
        """Fields that are present and were not read."""
        return {name: v for name, v in self._body.items() if name not in self.asked}

    def has(self, name: str) -> bool:
        return self._body.get(name) is not None

    def any(self, name: str) -> Any:
        self.asked.add(name)
        return self._body.get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.any(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def integer(
        self, name: str, default: Any, *, low: int = -_INT_END, high: int = _INT_END - 1
    ) -> Any:
        value = self.any(name)
        if value is None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, f"an integer{_bounds(low, high)}")
        return value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self.any(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self.any(name)
        if value is None and default is not _REQUIRED:
            return default
        if not is_text(value):
            raise self.wrong(name, "a text")
        return value

    def items(self, name: str) -> list[Any]:
        value = self.any(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value

    def object(self, name: str) -> dict[str, Any]:
        value = self.any(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(name, "a JSON object")
        return value

    def wrong(self, name: str, expected: str) -> WireError:
        found = show(self._body[name]) if name in self._body else "nothing"
        param = f"{self._where}{name}"
        return WireError(400, f"{param}: expected {expected}, got {found}", param)


def _bounds(low: int, high: int) -> str:
    if high < _INT_END - 1:
        return f" from {low} to {high}"
    return f" of at least {low}" if low > -_INT_END else " of 64 bits"


def is_text(value: Any) -> TypeGuard[str]:
    """A string that can be encoded as UTF-8: JSON allows lone surrogates, tokenizers do not."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_token_ids(value: Any) -> TypeGuard[list[int]]:
    """Integers that can be token ids; checked by minimum and maximum, because prompts are long."""
    if not isinstance(value, list) or not value or set(map(type, value)) != {int}:
        return False
    return min(value) >= 0 and max(value) < 1 << 31


def show(value: Any) -> str:
    """A short rendering of a value, recognisable to the caller."""
    if isinstance(value, int) and abs(value) >= _INT_END:
        return "an integer beyond 64 bits"
    try:
        text = ascii(value[:60] if isinstance(value, list | str) else value)
    except (ValueError, RecursionError):  # integers with thousands of digits, deep nesting
        return f"a {type(value).__name__}"
    return f"{text[:60]}..." if len(text) > 60 else text


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
