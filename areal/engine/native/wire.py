"""The JSON that native clients and servers exchange on /generate.

    request  {"requests": [{"rid": "a", "input_ids": [5, 7], "gconfig": {"temperature": 0.7}}, ...]}
    reply    one line per request as it finishes, in any order:
             {"rid": "a", "output_tokens": [...], "output_logprobs": [...],
              "output_versions": [...], "stop_reason": "stop", "latency": 0.21, "ttft": 0.03}
             {"rid": "b", "refused": "request", "message": "input_ids: ..."}

A request with `"progress_tokens": 64` gets its output every 64 tokens, before the final reply:
`{"rid": "a", "progress": {"output_tokens": ..., "output_logprobs": ..., "output_versions": ...}}`.
After losing its server it continues on another with these in `so_far`; the reply starts with them.

For any bytes, decoding returns valid values or raises ValueError naming the field. An invalid
request becomes a `Refusal`, so that it does not fail the others in the same body. Floats keep their
exact value. pydantic_core encodes and decodes the JSON: four times faster than the standard
library, which matters because 512 replies of 1,024 tokens often end together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from pydantic_core import to_json

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import (
    ModelRequest,
    ModelResponse,
    StopReason,
    check_lengths,
    check_logprobs,
    check_tokens,
)
from areal.api.json_text import loads_object, well_formed
from areal.engine.native.sequence import Finished, GenRequest, Progress

MAX_RID = 256  # characters
_INT_END = 1 << 63

# JSON kind of each option. Those about a group are not sent (n samples are n requests), nor those
# that change no token.
GCONFIG_KINDS: dict[str, str] = {
    "max_new_tokens": "int",
    "min_new_tokens": "int",
    "max_tokens": "int",
    "greedy": "bool",
    "top_p": "float",
    "top_k": "int",
    "temperature": "float",
    "stop_token_ids": "ids",
    "ignore_eos": "bool",
    "stop": "texts or null",
    "frequency_penalty": "float",
    "seed": "int or null",
}
_DEFAULTS = {name: getattr(GenerationHyperparameters(), name) for name in GCONFIG_KINDS}
_REQUEST_FIELDS = dict.fromkeys(("rid", "input_ids", "gconfig", "progress_tokens", "so_far"))
_STOP_REASONS = get_args(StopReason)

RefusalKind = Literal["request", "engine"]  # the cause: the caller, or the server


@dataclass(slots=True)
class Reply:
    """One finished request with the server's own timing, in seconds since it arrived."""

    finished: Finished
    latency: float  # to the last token
    ttft: float  # to the first token

    @property
    def rid(self) -> str:
        return self.finished.rid

    def response(self, request: ModelRequest, *, latency: float) -> ModelResponse:
        """The response to `request`; `latency` seconds as seen by the caller."""
        finished = self.finished
        return ModelResponse(
            input_tokens=request.input_ids,
            output_tokens=finished.output_tokens,
            output_logprobs=finished.output_logprobs,
            output_versions=finished.output_versions,
            stop_reason=finished.stop_reason,
            tokenizer=request.tokenizer,
            latency=latency,
            ttft=self.ttft,
            processor=request.processor,
        )


@dataclass(slots=True)
class Refusal:
    """Why one request has no output."""

    rid: str
    kind: RefusalKind
    message: str


def check_supported(request: ModelRequest) -> None:
    """ValueError for options the native engine lacks: ignoring them would spoil the sample."""
    if request.image_data or request.vision_msg_vllm:
        name = "image_data" if request.image_data else "vision_msg_vllm"
        raise ValueError(f"{name}: the native engine reads text only; remove the images")
    if request.gconfig.lora_name:
        raise ValueError(
            f"gconfig.lora_name: the native engine has no adapters, got "
            f"{_show(request.gconfig.lora_name)}; leave it empty"
        )
    for text in request.gconfig.stop or ():
        if well_formed(text) is not text:
            raise ValueError(f"gconfig.stop: a lone surrogate is not text, got {_show(text)}")


def encode_requests(requests: Iterable[GenRequest]) -> bytes:
    return to_json({"requests": [_entry_of(request) for request in requests]})


def decode_requests(body: bytes) -> list[GenRequest | Refusal]:
    """One item per request, in order. ValueError if the requests cannot be told apart."""
    content = loads_object(body, check_numbers=False)
    entries = content.get("requests")
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f"requests: expected a list with at least one request, got {_show(entries)}"
        )
    rids = [_rid(entry, f"requests[{i}]") for i, entry in enumerate(entries)]
    if len(set(rids)) < len(rids):
        twice = next(rid for rid in rids if rids.count(rid) > 1)
        raise ValueError(f"requests: the rid {_show(twice)} is given twice; each needs its own")
    return [_decode_request(rid, entry) for rid, entry in zip(rids, entries, strict=True)]


def decode_sequences(body: bytes) -> list[list[int]]:
    """The token ids of /score."""
    sequences = loads_object(body, check_numbers=False).get("sequences")
    if not isinstance(sequences, list) or not sequences:
        raise ValueError(
            f"sequences: expected a list with at least one list of token ids, got "
            f"{_show(sequences)}"
        )
    return [_ids(tokens, f"sequences[{index}]") for index, tokens in enumerate(sequences)]


def decode_tags(body: bytes) -> list[str] | None:
    """The tags of /offload and /onload; None is all."""
    tags = loads_object(body).get("tags") if body else None
    _texts_or_null(tags, "tags")
    return tags


def encode_lines(results: Iterable[Reply | Refusal | Progress]) -> bytes:
    return b"".join(to_json(_line_of(result)) + b"\n" for result in results)


class BadLineError(ValueError):
    """A malformed line about the request `rid`."""

    def __init__(self, rid: str, fault: str) -> None:
        super().__init__(fault)
        self.rid = rid


def decode_line(line: bytes) -> Reply | Refusal | Progress:
    """BadLineError, or another ValueError if not even the rid is known."""
    content = loads_object(line, "line", check_numbers=False)
    rid = _rid(content, "line")
    try:
        if "progress" in content:
            return _decode_progress(rid, content["progress"], "progress")
        if "refused" in content:
            return _decode_refusal(rid, content)
        return _decode_reply(rid, content)
    except ValueError as err:
        raise BadLineError(rid, str(err)) from None


_REQUIRED = object()


def field(order: dict[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    """The value of a JSON object under `name`, or ValueError for another type."""
    value = order.get(name, default)
    if type(value) is not kind:
        found = "nothing" if value is _REQUIRED else repr(value)[:60]
        raise ValueError(f"{name}: expected {kind.__name__}, got {found}")
    return value


def _options(gconfig: GenerationHyperparameters) -> dict[str, Any]:
    """Only values that differ from the defaults, which both sides know."""
    options = {}
    for name, default in _DEFAULTS.items():
        value = getattr(gconfig, name)
        if value != default:
            options[name] = value
    return options


def _entry_of(request: GenRequest) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "rid": request.rid,
        "input_ids": request.input_ids,
        "gconfig": _options(request.gconfig),
    }
    if request.progress_tokens:
        entry["progress_tokens"] = request.progress_tokens
    if request.so_far is not None:
        entry["so_far"] = _output_of(request.so_far)
    return entry


def _decode_request(rid: str, entry: dict[str, Any]) -> GenRequest | Refusal:
    try:
        if unknown := entry.keys() - _REQUEST_FIELDS:
            known = ", ".join(_REQUEST_FIELDS)
            raise ValueError(f"{min(unknown)}: unknown field; expected one of {known}")
        input_ids = _ids(entry.get("input_ids"), "input_ids")
        if not input_ids:
            raise ValueError("input_ids: expected at least one token id, got an empty list")
        progress_tokens = entry.get("progress_tokens", 0)
        _int(progress_tokens, "progress_tokens")
        if progress_tokens < 0:
            raise ValueError(f"progress_tokens: expected 0 or more, got {progress_tokens}")
        so_far = entry.get("so_far")
        return GenRequest(
            rid,
            input_ids,
            _decode_gconfig(entry.get("gconfig", {})),
            progress_tokens=progress_tokens,
            so_far=None if so_far is None else _decode_progress(rid, so_far, "so_far"),
        )
    except ValueError as err:
        return Refusal(rid, "request", str(err))


def _decode_gconfig(options: Any) -> GenerationHyperparameters:
    if not isinstance(options, dict):
        raise ValueError(f"gconfig: expected a JSON object, got {_show(options)}")
    for name, value in options.items():
        if name == "n_samples":
            raise ValueError("gconfig.n_samples: send one request per sample instead")
        if name not in GCONFIG_KINDS:
            known = ", ".join(GCONFIG_KINDS)
            raise ValueError(f"gconfig.{name[:50]}: unknown option; expected one of {known}")
        _CHECKS[GCONFIG_KINDS[name]](value, f"gconfig.{name}")
    return GenerationHyperparameters(**options)


def _decode_progress(rid: str, content: Any, where: str) -> Progress:
    if not isinstance(content, dict):
        raise ValueError(f"{where}: expected a JSON object, got {_show(content)}")
    try:
        return Progress(rid, *_decode_output(content))
    except ValueError as err:
        raise ValueError(f"{where}.{err}") from None


def _decode_refusal(rid: str, content: dict[str, Any]) -> Refusal:
    kind, message = content["refused"], content.get("message")
    if kind not in get_args(RefusalKind) or not isinstance(message, str):
        raise ValueError(f"refused: expected {get_args(RefusalKind)} and a message, got {kind!r}")
    return Refusal(rid, kind, message)


def _decode_reply(rid: str, content: dict[str, Any]) -> Reply:
    output = _decode_output(content)
    reason = content.get("stop_reason")
    if reason not in _STOP_REASONS:
        raise ValueError(f"stop_reason: expected one of {_STOP_REASONS}, got {_show(reason)}")
    times = [_float(content.get(name), name) for name in ("latency", "ttft")]
    return Reply(Finished(rid, *output, cast(StopReason, reason)), *times)


def _decode_output(content: dict[str, Any]) -> tuple[list[int], list[float], list[int]]:
    """Tokens, log-probabilities and versions."""
    output: list[Any] = [
        content.get(name) for name in ("output_tokens", "output_logprobs", "output_versions")
    ]
    tokens, logprobs, versions = output
    check_tokens(tokens)
    check_logprobs(logprobs)
    check_lengths(tokens, logprobs)
    # A request that moved to another server may continue with older weights, so the order of
    # versions is left to `check_versions` of callers that know where it ran.
    if not isinstance(versions, list) or not set(map(type, versions)) <= {int}:
        raise ValueError(f"output_versions: expected a list of integers, got {_show(versions)}")
    if len(tokens) != len(versions):
        raise ValueError(
            f"output_versions: expected one per output token, got {len(versions)} for {len(tokens)}"
        )
    return tokens, logprobs, versions


def _output_of(progress: Progress) -> dict[str, Any]:
    return {
        "output_tokens": progress.tokens,
        "output_logprobs": progress.logprobs,
        "output_versions": progress.versions,
    }


def _line_of(result: Reply | Refusal | Progress) -> dict[str, Any]:
    if isinstance(result, Progress):
        return {"rid": result.rid, "progress": _output_of(result)}
    if isinstance(result, Refusal):
        return {"rid": result.rid, "refused": result.kind, "message": well_formed(result.message)}
    finished = result.finished
    return {
        "rid": finished.rid,
        "output_tokens": finished.output_tokens,
        "output_logprobs": finished.output_logprobs,
        "output_versions": finished.output_versions,
        "stop_reason": finished.stop_reason,
        "latency": result.latency,
        "ttft": result.ttft,
    }


def _rid(entry: Any, where: str) -> str:
    rid = entry.get("rid") if isinstance(entry, dict) else None
    if not isinstance(rid, str) or not 0 < len(rid) <= MAX_RID:
        raise ValueError(
            f"{where}.rid: expected a text of 1 to {MAX_RID} characters, got {_show(rid)}"
        )
    return rid


def _ids(value: Any, where: str) -> list[int]:
    # Checked by set of types and extremes, not one by one: prompts can be long.
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError(f"{where}: expected a list of token ids, got {_show(value)}")
    if value and (min(value) < 0 or max(value) >= _INT_END):
        raise ValueError(
            f"{where}: token ids must lie in 0 .. 2**63 - 1, got {min(value)} .. "
            f"{_show(max(value))}"
        )
    return value


def _int(value: Any, where: str) -> None:
    if type(value) is not int or not -_INT_END <= value < _INT_END:
        raise ValueError(f"{where}: expected an integer of 64 bits, got {_show(value)}")


def _int_or_null(value: Any, where: str) -> None:
    if value is not None:
        _int(value, where)


def _texts_or_null(value: Any, where: str) -> None:
    is_texts = isinstance(value, list) and set(map(type, value)) <= {str}
    if value is not None and not is_texts:
        raise ValueError(f"{where}: expected a list of texts or null, got {_show(value)}")


def _bool(value: Any, where: str) -> None:
    if type(value) is not bool:
        raise ValueError(f"{where}: expected true or false, got {_show(value)}")


def _float(value: Any, where: str) -> float:
    if type(value) is int:
        _int(value, where)
    elif type(value) is not float or not math.isfinite(value):
        raise ValueError(f"{where}: expected a finite number, got {_show(value)}")
    return float(value)


def _show(value: Any) -> str:
    """A value for an error message, shortened."""
    if isinstance(value, int) and abs(value) >= _INT_END:
        return "an integer beyond 64 bits"
    text = repr(value[:8] if isinstance(value, list | str) else value)
    return f"{text[:60]}..." if len(text) > 60 else text


_CHECKS = {
    "int": _int,
    "int or null": _int_or_null,
    "texts or null": _texts_or_null,
    "bool": _bool,
    "float": _float,
    "ids": _ids,
}
