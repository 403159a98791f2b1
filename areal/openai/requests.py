"""Request bodies of /v1/chat/completions and /v1/completions as typed calls.

Whatever JSON comes in, the result is a call or a `WireError` that names the field. What would
change the output and is not supported is refused; other unknown keys are kept in `extra`. Options
OpenAI has no name for (`top_k`, `stop_token_ids`, `ignore_eos`, ...) have the names of `gconfig`;
`max_total_tokens` is its bound of prompt and output together.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from areal.api.config.generation import GenerationHyperparameters
from areal.openai.errors import WireError
from areal.openai.fields import Fields, is_text, is_token_ids, show
from areal.openai.messages import parse_messages, parse_tools

_MAX_N = 128
_MAX_STOPS = 64
_MAX_CHOICES = 4096  # of one request
_MAX_UNKNOWN = 64  # options; each is compared with all that are known
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions alone
_NO_BOUND = 1 << 30  # tokens of prompt and output: what the engine can hold is the bound

# Options that change the output and are not supported, with the values that leave it alone.
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
    """`messages` have text contents; `tools` is empty when there are none, or none may be used."""

    model: str  # empty when left out
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    gconfig: GenerationHyperparameters
    stream: bool
    include_usage: bool  # at the end of a stream
    logprobs: bool
    top_logprobs: int
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # keys that change nothing here


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """`prompt` is always a list of prompts, each a text or a list of token ids.

    Every prompt gets `gconfig.n_samples` outputs; choices come prompt after prompt.
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
    if options["top_k"] in (-1, 0):  # "no cut", in the words of other servers
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
    """What is left, when it can be ignored without lying."""
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
