"""Binary replies: exact round trips in any pieces, and for any other bytes a named error."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.engine.native.frames import (
    MAX_FRAME,
    FrameReader,
    LineReader,
    Result,
    encode_frames,
    runs_of,
    versions_of,
)
from areal.engine.native.sequence import Finished, Progress
from areal.engine.native.wire import BadLineError, Refusal, Reply, encode_lines

outputs = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.floats(-1000, 0), st.integers(0, 2**31 - 1))
).map(lambda rows: [list(column) for column in zip(*rows, strict=True)] or [[], [], []])
rids = st.text(min_size=1, max_size=256).filter(lambda text: text.isprintable())


def reply(tokens=(5, 7), logprobs=(-0.5, -1.0), versions=(1, 2), rid="a", **options):
    finished = Finished(rid, list(tokens), list(logprobs), list(versions), "stop", **options)
    return Reply(finished, latency=0.5, ttft=0.25)


def said(result: Result):
    return result.tokens.tolist(), result.logprobs.tolist(), versions_of(result.runs).tolist()


@given(outputs, rids, st.lists(st.integers(1, 50)))
def test_results_round_trip_in_any_pieces(output, rid, sizes):
    results = [
        reply(*output, rid=rid, cached_tokens=3),
        Refusal(rid, "engine", "why\nso ü"),
        Progress(rid, *output),
    ]
    data, reader, found = encode_frames(results), FrameReader(), []
    for size in [*sizes, len(data)]:
        piece, data = data[:size], data[size:]
        found += list(reader.feed(piece))
    assert {name for name, _ in found} == {rid}
    first, refusal, progress = (one for _, one in found)
    assert said(first) == said(progress) == tuple(output)
    assert (first.stop_reason, first.ttft, first.cached_tokens) == ("stop", 0.25, 3)
    assert progress.stop_reason is None and refusal == results[1]


@given(outputs, rids)
def test_lines_say_the_same_as_frames(output, rid):
    results = [reply(*output, rid=rid), Refusal(rid, "request", "no"), Progress(rid, *output)]
    lines = list(LineReader().feed(encode_lines(results)))
    frames = list(FrameReader().feed(encode_frames(results)))
    for (line_rid, line), (frame_rid, frame) in zip(lines, frames, strict=True):
        assert line_rid == frame_rid == rid
        if isinstance(frame, Refusal):
            assert line == frame
        else:
            assert said(line) == said(frame) and line.stop_reason == frame.stop_reason


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data):
    try:
        for _, found in FrameReader().feed(data):
            assert isinstance(found, Result | Refusal | BadLineError)
    except ValueError as error:
        assert str(error).startswith(("frame:", "rid:"))


@given(outputs, st.integers(0, 10**6), st.integers(1, 255))
def test_a_damaged_frame_is_told_or_has_usable_numbers(output, place, change):
    data = bytearray(encode_frames([reply(*output)]))
    data[place % len(data)] ^= change
    try:
        found = list(FrameReader().feed(bytes(data)))
    except ValueError:
        return
    for _, one in found:
        if isinstance(one, Result) and len(one.tokens):
            assert one.tokens.min() >= 0 and np.isfinite(one.logprobs).all()
            assert len(one.tokens) == len(one.logprobs) == sum(count for _, count in one.runs)


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf, 0.5, -1001.0])
def test_a_log_probability_that_is_none_is_refused(logprob):
    ((rid, found),) = FrameReader().feed(encode_frames([reply(logprobs=(-0.5, logprob))]))
    assert isinstance(found, BadLineError) and found.rid == rid == "a"
    assert str(found).startswith("output_logprobs: ")


def test_negative_tokens_and_missing_versions_are_refused():
    ((rid, found),) = FrameReader().feed(encode_frames([reply(tokens=(-1, 3))]))
    assert isinstance(found, BadLineError) and "output_tokens: " in str(found)
    ((rid, found),) = FrameReader().feed(encode_frames([reply(versions=(1,))]))
    assert isinstance(found, BadLineError) and "output_versions: " in str(found)


def test_a_half_written_frame_says_nothing():
    data, reader = encode_frames([reply()]), FrameReader()
    assert list(reader.feed(data[:-1])) == []
    ((_, found),) = reader.feed(data[-1:])
    assert said(found) == ([5, 7], [-0.5, -1.0], [1, 2])


def test_a_huge_frame_is_refused_before_it_comes():
    with pytest.raises(ValueError, match="frame: .* more than"):
        list(FrameReader().feed(struct.pack("<I", MAX_FRAME + 1)))


def test_a_count_beyond_the_bytes_is_refused():
    data = bytearray(encode_frames([reply()]))
    struct.pack_into("<I", data, 8, 2**32 - 1)  # of its tokens
    with pytest.raises(ValueError, match="does not fit"):
        list(FrameReader().feed(bytes(data)))


@given(st.lists(st.integers(0, 3)))
def test_runs_are_the_versions(versions):
    assert versions_of(runs_of(versions)).tolist() == versions


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_experts_travel_in_frames(dtype):
    routed = (37 * np.arange(5 * 4 * 3) % 250).reshape(5, 4, 3).astype(dtype)
    finished = Finished("a", [5], [-1.0], [0], "stop", routed_experts=routed)
    sent = encode_frames([Reply(finished, latency=0.5, ttft=0.1)])
    ((_, found),) = FrameReader().feed(sent)
    assert isinstance(found, Result) and found.routed_experts is not None
    assert found.routed_experts.dtype == dtype
    np.testing.assert_array_equal(found.routed_experts, routed)
