"""The JSON that native clients and servers exchange on /generate; frames.py has binary replies.

    request  {"requests": [{"rid": "a", "input_ids": [5, 7], "gconfig": {"temperature": 0.7}}, ...]}
    reply    one line per request as it finishes, in any order:
             {"rid": "a", "output_tokens": [...], "output_logprobs": [...],
              "output_versions": [...], "stop_reason": "stop", "latency": 0.21, "ttft": 0.03,
              "cached_tokens": 128}
             {"rid": "b", "refused": "request", "message": "input_ids: ..."}

A request with `"progress_tokens": 64` gets its output every 64 tokens, before the final reply:
`{"rid": "a", "progress": {"output_tokens": ..., "output_logprobs": ..., "output_versions": ...}}`.
After losing its server it continues on another with these in `so_far`; the reply starts with them.
`"further": [{"rid": "c", "seed": 7}]` asks for more samples of the same prompt and options: the
group is answered together, when its last sample is there.
`"image_data": [<base64>, ...]` are the images of a prompt, for a model with a vision tower, in the
order of its image tokens: one for each image, or one for each of its merged patches.
`"grammar": {"regex": "yes|no"}` (or `json_schema`, or `lark`) constrains the output. With
`"return_routed_experts": true` the final reply has the experts of every token but the last, layer
by layer: `"routed_experts": {"dtype": "uint8", "shape": [300, 48, 8], "data": <base64>}`.

The models below are the only definition of both. For any bytes, decoding returns valid values or
raises ValueError naming the field. An invalid request becomes a `Refusal`, so that it does not fail
the others in the same body. Floats keep their exact value. pydantic_core encodes and decodes the
JSON: four times faster than the standard library, which matters because 512 replies of 1,024 tokens
often end together.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic_core import to_json

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import (
    GRAMMAR_KINDS,
    MAX_LOGPROB,
    MIN_SAMPLED_LOGPROB,
    Grammar,
    ModelRequest,
    ModelResponse,
    StopReason,
)
from areal.api.json_text import JsonError, loads_object, well_formed
from areal.engine.native.sequence import Finished, GenRequest, Progress
from areal.utils.http_body import (
    INT_END,
    Body,
    ClosedBody,
    Expect,
    Integer,
    Items,
    Text,
    parse,
    refused,
    show,
)

MAX_RID = 256  # characters

RefusalKind = Literal["request", "engine"]  # the cause: the caller, or the server
Entry = dict[str, Any]  # of one request or group, as JSON


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
            cached_tokens=finished.cached_tokens,
            routed_experts=finished.routed_experts,
        )


@dataclass(slots=True)
class Refusal:
    """Why one request has no output."""

    rid: str
    kind: RefusalKind
    message: str


Rid = Annotated[
    str,
    Field(min_length=1, max_length=MAX_RID),
    Expect(f"a text of 1 to {MAX_RID} characters"),
]
TokenId = Annotated[int, Field(ge=0, lt=INT_END), Expect("a token id, 0 to 2**63 - 1")]
Logprob = Annotated[
    float,
    Field(ge=MIN_SAMPLED_LOGPROB, le=MAX_LOGPROB),
    Expect(f"a log-probability, {MIN_SAMPLED_LOGPROB:g} to 0 (rounding: {MAX_LOGPROB:g})"),
]
Int64 = Annotated[int, Integer()]
Float = Annotated[float, Expect("a finite number")]
_DEFAULTS = GenerationHyperparameters()


class Options(ClosedBody):
    """`gconfig`, except what is about a group (see `further`) or changes no token."""

    reasons = {"n_samples": "name the other samples in further instead"}

    max_new_tokens: Int64 = _DEFAULTS.max_new_tokens
    min_new_tokens: Int64 = _DEFAULTS.min_new_tokens
    max_tokens: Int64 = _DEFAULTS.max_tokens
    greedy: bool = _DEFAULTS.greedy
    top_p: Float = _DEFAULTS.top_p
    top_k: Int64 = _DEFAULTS.top_k
    temperature: Float = _DEFAULTS.temperature
    stop_token_ids: Items[TokenId] = _DEFAULTS.stop_token_ids
    ignore_eos: bool = _DEFAULTS.ignore_eos
    stop: Items[Text] | None = _DEFAULTS.stop
    frequency_penalty: Float = _DEFAULTS.frequency_penalty
    presence_penalty: Float = _DEFAULTS.presence_penalty
    repetition_penalty: Float = _DEFAULTS.repetition_penalty
    min_p: Float = _DEFAULTS.min_p
    logit_bias: dict[Text, Float] = _DEFAULTS.logit_bias
    seed: Int64 | None = _DEFAULTS.seed
    lora_name: Text = _DEFAULTS.lora_name

    def gconfig(self) -> GenerationHyperparameters:
        return GenerationHyperparameters(
            **{name: getattr(self, name) for name in self.model_fields_set}
        )


class Tokens(Body):
    """Sampled tokens.

    A request that moved to another server may continue with older weights, so the order of versions
    is left to `check_versions` of callers that know where it ran.
    """

    output_tokens: Items[TokenId]
    output_logprobs: Items[Logprob]
    output_versions: Items[int]

    @model_validator(mode="after")
    def _have_equal_lengths(self) -> Tokens:
        for name in ("output_logprobs", "output_versions"):
            count, num_tokens = len(getattr(self, name)), len(self.output_tokens)
            if count != num_tokens:
                raise refused(name, f"expected one per output token, got {count} for {num_tokens}")
        return self

    def progress(self, rid: str) -> Progress:
        return Progress(rid, self.output_tokens, self.output_logprobs, self.output_versions)


class GrammarBody(ClosedBody):
    """Exactly one of the fields."""

    json_schema: dict[str, Any] | None = None
    regex: Text | None = None
    lark: Text | None = None

    def grammar(self) -> Grammar:
        return Grammar(**{name: getattr(self, name) for name in GRAMMAR_KINDS})


class Further(ClosedBody):
    rid: Rid
    seed: Int64 | None = None


class Request(ClosedBody):
    rid: Rid
    input_ids: Annotated[Items[TokenId], Field(min_length=1)]
    gconfig: Options = Options()
    progress_tokens: Annotated[int, Integer(0)] = 0
    so_far: Tokens | None = None
    grammar: GrammarBody | None = None
    return_routed_experts: bool = False
    image_data: Items[Text] = []  # base64 or data: URLs
    further: Items[Further] = []

    @property
    def rids(self) -> list[str]:
        return [self.rid, *(one.rid for one in self.further)]

    def gen_requests(self) -> list[GenRequest]:
        if self.further and self.so_far is not None:
            raise ValueError("further: expected none beside so_far, which is of one sample")
        request = GenRequest(
            self.rid,
            self.input_ids,
            self.gconfig.gconfig(),
            progress_tokens=self.progress_tokens,
            so_far=self.so_far and self.so_far.progress(self.rid),
            grammar=self.grammar and self.grammar.grammar(),
            return_routed_experts=self.return_routed_experts,
            image_data=self.image_data,
            group=self.rid if self.further else "",
        )
        twins = [
            replace(request, rid=one.rid, gconfig=request.gconfig.with_seed(one.seed))
            for one in self.further
        ]
        return [request, *twins]


class GenerateBody(Body):
    model_config = ConfigDict(extra="allow")

    requests: Annotated[Items[Request], Field(min_length=1)]


class _Named(Body):
    """All that must be valid for an answer to each request."""

    rid: Rid


class _NamedGroup(_Named):
    further: Items[_Named] = []


class _NamedRequests(Body):
    requests: Annotated[Items[_NamedGroup], Field(min_length=1)]


class _ProgressLine(_Named):
    progress: Tokens

    def result(self) -> Progress:
        return self.progress.progress(self.rid)


class _RefusalLine(_Named):
    refused: RefusalKind
    message: Text

    def result(self) -> Refusal:
        return Refusal(self.rid, self.refused, self.message)


class ExpertsBody(Body):
    """An array, its bytes in base64: lists of numbers would be several times as long."""

    dtype: Literal["uint8", "int16"]  # little-endian
    shape: Annotated[Items[Annotated[int, Integer(0)]], Field(min_length=3, max_length=3)]
    data: Text

    @model_validator(mode="after")
    def _has_its_bytes(self) -> ExpertsBody:
        try:
            num_bytes = len(base64.b64decode(self.data, validate=True))
        except ValueError:
            raise refused("data", "expected base64") from None
        expected = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        if num_bytes != expected:
            raise refused("data", f"expected {expected} bytes, got {num_bytes}")
        return self

    def array(self) -> np.ndarray:
        dtype = np.dtype(self.dtype).newbyteorder("<")
        return np.frombuffer(base64.b64decode(self.data), dtype).reshape(self.shape)


class _ReplyLine(Tokens):
    rid: Rid
    stop_reason: StopReason
    latency: Float
    ttft: Float
    cached_tokens: Annotated[int, Integer(0)] = 0
    routed_experts: ExpertsBody | None = None

    def result(self) -> Reply:
        output = self.output_tokens, self.output_logprobs, self.output_versions
        finished = Finished(
            self.rid,
            *output,
            self.stop_reason,
            cached_tokens=self.cached_tokens,
            routed_experts=None if self.routed_experts is None else self.routed_experts.array(),
        )
        return Reply(finished, self.latency, self.ttft)


def check_supported(request: ModelRequest) -> None:
    """ValueError for options the native engine lacks: ignoring them would spoil the sample."""
    if request.vision_msg_vllm and not request.image_data:
        raise ValueError("vision_msg_vllm: the native engine reads images from image_data")
    for number, source in enumerate(request.image_data):
        if not source.isascii():
            raise ValueError(f"image_data[{number}]: an image is base64, got {show(source)}")
    named = [("stop", text) for text in request.gconfig.stop or ()]
    for field, text in (*named, ("lora_name", request.gconfig.lora_name)):
        if well_formed(text) is not text:
            raise ValueError(f"gconfig.{field}: a lone surrogate is not text, got {show(text)}")


def encode_requests(requests: Iterable[GenRequest]) -> bytes:
    groups = groupby(requests, key=lambda request: request.group or request.rid)
    return encode_entries(
        entry_of(first, [(one.rid, one.gconfig.seed) for one in further])
        for _, (first, *further) in groups
    )


def encode_entries(entries: Iterable[Entry]) -> bytes:
    return to_json({"requests": list(entries)})


def decode_requests(body: bytes) -> list[GenRequest | Refusal]:
    """One item per request, in order. ValueError if the requests cannot be told apart."""
    requests: list[Request | Refusal]
    try:
        content = GenerateBody.model_validate_json(body)
        requests = [*content.requests]
        if content.model_extra:  # ignored, but JSON: pydantic takes NaN for a number
            loads_object(body, check_numbers=False)
    except ValidationError:  # of one request, perhaps
        requests = _decode_each(loads_object(body, check_numbers=False))
    rids = [
        rid for one in requests for rid in ([one.rid] if isinstance(one, Refusal) else one.rids)
    ]
    if len(set(rids)) < len(rids):
        twice = next(rid for rid in rids if rids.count(rid) > 1)
        raise ValueError(f"requests: the rid {show(twice)} is given twice; each needs its own")
    return [item for request in requests for item in _gen_requests(request)]


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
    try:
        rid = parse(_Named, content).rid
    except JsonError as err:
        raise ValueError(f"line.{err}") from None
    try:
        if "progress" in content:
            return parse(_ProgressLine, content).result()
        return parse(_RefusalLine if "refused" in content else _ReplyLine, content).result()
    except JsonError as err:
        raise BadLineError(rid, str(err)) from None


def _decode_each(content: dict[str, Any]) -> list[Request | Refusal]:
    requests: list[Request | Refusal] = []
    for named, entry in zip(
        parse(_NamedRequests, content).requests, content["requests"], strict=True
    ):
        try:
            requests.append(parse(Request, entry))
        except JsonError as err:
            refused = [named.rid, *(one.rid for one in named.further)]
            requests += [Refusal(rid, "request", str(err)) for rid in refused]
    return requests


def _gen_requests(request: Request | Refusal) -> Sequence[GenRequest | Refusal]:
    if isinstance(request, Refusal):
        return [request]
    try:
        return request.gen_requests()
    except ValueError as err:  # of the options
        return [Refusal(rid, "request", str(err)) for rid in request.rids]


def _options(gconfig: GenerationHyperparameters) -> dict[str, Any]:
    """Only values that differ from the defaults, which both sides know."""
    options = {name: getattr(gconfig, name) for name in Options.model_fields}
    return {name: value for name, value in options.items() if value != getattr(_DEFAULTS, name)}


def entry_of(request: GenRequest, further: Sequence[tuple[str, int | None]]) -> Entry:
    """`further` are rid and seed of the other samples of its group."""
    entry: Entry = {
        "rid": request.rid,
        "input_ids": request.input_ids,
        "gconfig": _options(request.gconfig),
    }
    if request.progress_tokens:
        entry["progress_tokens"] = request.progress_tokens
    if request.so_far is not None:
        entry["so_far"] = _output_of(request.so_far)
    if further:
        entry["further"] = [{"rid": rid, "seed": seed} for rid, seed in further]
    if request.grammar is not None:
        entry["grammar"] = {request.grammar.kind: getattr(request.grammar, request.grammar.kind)}
    if request.return_routed_experts:
        entry["return_routed_experts"] = True
    if request.image_data:
        entry["image_data"] = request.image_data
    return entry


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
    line = {
        "rid": finished.rid,
        "output_tokens": finished.output_tokens,
        "output_logprobs": finished.output_logprobs,
        "output_versions": finished.output_versions,
        "stop_reason": finished.stop_reason,
        "latency": result.latency,
        "ttft": result.ttft,
        "cached_tokens": finished.cached_tokens,
    }
    if finished.routed_experts is not None:
        line["routed_experts"] = _experts_of(finished.routed_experts)
    return line


def _experts_of(routed: np.ndarray) -> dict[str, Any]:
    content = routed.astype(routed.dtype.newbyteorder("<")).tobytes()
    data = base64.b64encode(content).decode("ascii")
    return {"dtype": routed.dtype.name, "shape": list(routed.shape), "data": data}
