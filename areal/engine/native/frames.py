"""Replies of /generate in binary: what clients of areal ask for instead of JSON lines.

A client that accepts `FRAMES` gets one frame per result, each behind its length:

    frame    u32 length of the rest | u8 kind | u8 stop reason | u16 bytes of the rid | u32 tokens
             u32 runs | u32 cached tokens | u32 bytes of experts | f64 latency | f64 ttft
             (i32 version, u32 tokens) per run | f64 log-probability ... | i32 token ...
             experts | rid
    experts  of a reply that was asked for them: u16 layers | u8 per token | u8 bytes of an index
             indices of every token but the last, layer by layer
    refusal  its message as UTF-8 is in the place of runs and tokens; their number is its bytes

All little-endian. Versions are run-length encoded: an output has one, or a few after weight
updates. Arrays are read in place, so a sample of any length costs a client the same few calls.

Invariant: for any bytes, `FrameReader` yields outputs whose numbers a trainer can use and errors
that name a field, or raises ValueError if the stream cannot be followed any more.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import get_args

import numpy as np

from areal.api.io_struct import MAX_LOGPROB, MIN_SAMPLED_LOGPROB, StopReason
from areal.engine.native.sequence import Progress
from areal.engine.native.wire import MAX_RID, BadLineError, Refusal, Reply, decode_line

FRAMES = "application/x-areal-frames"
MAX_FRAME = 256 << 20  # bytes

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<BBHIIIIdd")
_PROGRESS, _REPLY, _REFUSED_REQUEST, _REFUSED_ENGINE = range(4)
_REASONS = get_args(StopReason)
_MAX_RID_BYTES = 4 * MAX_RID
_RUN = np.dtype([("version", "<i4"), ("count", "<u4")])
_TOKEN, _LOGPROB = np.dtype("<i4"), np.dtype("<f8")
_TOKEN_BYTES = _TOKEN.itemsize + _LOGPROB.itemsize
_EXPERTS = struct.Struct("<HBB")
_INDEX = {1: np.dtype("<u1"), 2: np.dtype("<i2")}  # by its bytes

Runs = list[tuple[int, int]]  # (version, number of tokens)


@dataclass(slots=True)
class Output:
    """A `Reply`, or with `stop_reason` None a `Progress`, in arrays."""

    rid: str
    tokens: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float64
    runs: Runs  # of versions
    stop_reason: StopReason | None
    latency: float = 0.0
    ttft: float = 0.0
    cached_tokens: int = 0
    routed_experts: np.ndarray | None = None  # as in ModelResponse


def encode_frames(results: Iterable[Reply | Refusal | Progress]) -> bytes:
    parts: list[bytes] = []
    for result in results:
        frame = _frame_of(result)
        parts += (_LENGTH.pack(sum(map(len, frame))), *frame)
    return b"".join(parts)


class FrameReader:
    """
    reader = FrameReader()
    for result in reader.feed(chunk): ...       # Output, Refusal or BadLineError of one request
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[Output | Refusal | BadLineError]:
        data = self._rest + chunk if self._rest else chunk
        start = 0
        while len(data) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(data, start)
            if size > MAX_FRAME:
                raise ValueError(f"frame: {size} bytes, more than {MAX_FRAME}")
            begin = start + _LENGTH.size
            if len(data) - begin < size:
                break
            start = begin + size
            yield _read(data[begin:start])
        self._rest = data[start:]


class LineReader:
    """The same of JSON lines, for a server that has no frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[Output | Refusal | BadLineError]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            try:
                yield _output_of(decode_line(line))
            except BadLineError as err:
                yield err
        if len(self._rest) > MAX_FRAME:
            raise ValueError(f"a line of more than {MAX_FRAME} bytes")


def _output_of(found: Reply | Refusal | Progress) -> Output | Refusal:
    if isinstance(found, Refusal):
        return found
    if isinstance(found, Progress):
        return Output(found.rid, *_arrays(found.tokens, found.logprobs, found.versions), None)
    one = found.finished
    return Output(
        one.rid,
        *_arrays(one.output_tokens, one.output_logprobs, one.output_versions),
        one.stop_reason,
        found.latency,
        found.ttft,
        one.cached_tokens,
        one.routed_experts,
    )


def _arrays(
    tokens: list[int], logprobs: list[float], versions: list[int]
) -> tuple[np.ndarray, np.ndarray, Runs]:
    return np.array(tokens, np.int64), np.array(logprobs, np.float64), runs_of(versions)


def runs_of(versions: Iterable[int]) -> Runs:
    return [(version, sum(1 for _ in run)) for version, run in groupby(versions)]


def versions_of(runs: Runs) -> np.ndarray:
    """[T] int32: the inverse of `runs_of`."""
    if len(runs) == 1:
        return np.full(runs[0][1], runs[0][0], np.int32)
    pairs = np.array(runs, np.int64).reshape(-1, 2)
    return np.repeat(pairs[:, 0], pairs[:, 1]).astype(np.int32)


def _frame_of(result: Reply | Refusal | Progress) -> tuple[bytes, ...]:
    rid = result.rid.encode(errors="replace")
    if isinstance(result, Refusal):
        kind = _REFUSED_REQUEST if result.kind == "request" else _REFUSED_ENGINE
        message = result.message.encode(errors="replace")
        return _HEAD.pack(kind, 0, len(rid), len(message), 0, 0, 0, 0, 0), message, rid
    if isinstance(result, Progress):
        tokens, logprobs, versions = result.tokens, result.logprobs, result.versions
        kind, reason, cached, latency, ttft, routed = _PROGRESS, 0, 0, 0.0, 0.0, b""
    else:
        one = result.finished
        tokens, logprobs, versions = one.output_tokens, one.output_logprobs, one.output_versions
        kind, reason, cached = _REPLY, _REASONS.index(one.stop_reason), one.cached_tokens
        latency, ttft = result.latency, result.ttft
        routed = b"" if one.routed_experts is None else _experts_of(one.routed_experts)
    runs = runs_of(versions)
    counts = len(rid), len(tokens), len(runs), cached, len(routed)
    head = _HEAD.pack(kind, reason, *counts, latency, ttft)
    arrays = np.array(runs, _RUN), np.array(logprobs, _LOGPROB), np.array(tokens, _TOKEN)
    return (head, *(array.tobytes() for array in arrays), routed, rid)


def _experts_of(routed: np.ndarray) -> bytes:
    _, num_layers, top_k = routed.shape
    head = _EXPERTS.pack(num_layers, top_k, routed.itemsize)
    return head + routed.astype(_INDEX[routed.itemsize]).tobytes()


def _read_experts(content: bytes) -> np.ndarray | None:
    """ValueError for bytes that are no whole tokens."""
    if not content:
        return None
    if len(content) < _EXPERTS.size:
        raise ValueError(f"routed_experts: {len(content)} bytes have no head")
    num_layers, top_k, size = _EXPERTS.unpack_from(content)
    row = num_layers * top_k * size
    if size not in _INDEX or not row or (len(content) - _EXPERTS.size) % row:
        raise ValueError(
            f"routed_experts: {len(content)} bytes are no indices of {size} bytes for "
            f"{num_layers} layers with {top_k} experts"
        )
    indices = np.frombuffer(content, _INDEX[size], offset=_EXPERTS.size)
    return indices.reshape(-1, num_layers, top_k)


def _read(frame: bytes) -> Output | Refusal | BadLineError:
    if len(frame) < _HEAD.size:
        raise ValueError(f"frame: {len(frame)} bytes are no frame")
    kind, reason, rid_bytes, count, num_runs, cached, num_bytes, latency, ttft = _HEAD.unpack_from(
        frame
    )
    is_refusal = kind in (_REFUSED_REQUEST, _REFUSED_ENGINE)
    payload = count if is_refusal else num_runs * _RUN.itemsize + count * _TOKEN_BYTES + num_bytes
    if kind > _REFUSED_ENGINE or len(frame) != _HEAD.size + payload + rid_bytes:
        raise ValueError(f"frame: kind {kind} with {count} tokens does not fit {len(frame)} bytes")
    if not 0 < rid_bytes <= _MAX_RID_BYTES:
        raise ValueError(f"rid: expected 1 to {_MAX_RID_BYTES} bytes, got {rid_bytes}")
    try:
        rid = frame[-rid_bytes:].decode()
        if is_refusal:
            message = frame[_HEAD.size : -rid_bytes].decode()
            return Refusal(rid, "request" if kind == _REFUSED_REQUEST else "engine", message)
    except UnicodeDecodeError as err:
        raise ValueError(f"frame: no UTF-8: {err}") from None
    runs = np.frombuffer(frame, _RUN, num_runs, _HEAD.size)
    place = _HEAD.size + runs.nbytes
    logprobs = np.frombuffer(frame, _LOGPROB, count, place)
    tokens = np.frombuffer(frame, _TOKEN, count, place + logprobs.nbytes)
    output = Output(rid, tokens, logprobs, runs.tolist(), None, latency, ttft, cached)
    try:
        output.routed_experts = _read_experts(frame[-rid_bytes - num_bytes : -rid_bytes])
    except ValueError as err:
        return BadLineError(rid, str(err))
    fault = _fault_of(output)
    if kind == _REPLY and not fault:
        if reason >= len(_REASONS):
            fault = f"stop_reason: expected 0 to {len(_REASONS) - 1}, got {reason}"
        else:
            output.stop_reason = _REASONS[reason]
    return BadLineError(rid, fault) if fault else output


def _fault_of(output: Output) -> str:
    """What of an output cannot be trained on, whoever asked for it; empty if nothing."""
    if sum(count for _, count in output.runs) != len(output.tokens):
        return "output_versions: expected one per output token"
    if not (math.isfinite(output.latency) and math.isfinite(output.ttft)):
        return "latency: expected a finite number of seconds"
    if not len(output.tokens):
        return ""
    if int(output.tokens.min()) < 0:
        return f"output_tokens: expected token ids, got {int(output.tokens.min())}"
    low, high = float(output.logprobs.min()), float(output.logprobs.max())
    if not (low >= MIN_SAMPLED_LOGPROB and high <= MAX_LOGPROB):  # NaN is neither
        return (
            f"output_logprobs: expected {MIN_SAMPLED_LOGPROB:g} to 0 (rounding: "
            f"{MAX_LOGPROB:g}), got {low:g} to {high:g}"
        )
    return ""
