"""Decoders of what other processes and files hand us: any bytes give a value or the named error.

The HTTP bodies have tests of their own (test_wire.py, openai_wire/, *_fuzz.py), and so have
publications (test_manifest_fuzz.py) and configs (test_config_errors.py).
"""

from __future__ import annotations

import json

import json_fuzz
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from areal.engine.native.server import PartsBody, ScoreBody
from areal.engine.native.wire import decode_line
from areal.rollout.trajectory import decode, encode
from areal.sandbox.process import BadReplyError, RewardProcess
from areal.utils.http_body import parse_json

TRAJECTORY = {
    "input_ids": torch.arange(6).reshape(2, 3),
    "logprobs": torch.zeros(2, 3),
    "multi_modal_input": [{"pixel_values": torch.ones(1, 2)}, {}],
}
REPLY = {
    "rid": "a",
    "output_tokens": [1, 2],
    "output_logprobs": [-0.5, -1.0],
    "output_versions": [0, 0],
    "stop_reason": "stop",
    "latency": 0.1,
    "ttft": 0.1,
}


@given(st.binary(max_size=100), st.integers(0, 500), st.integers(0, 500))
def test_a_damaged_trajectory_is_told(junk, begin, length):
    content = encode(TRAJECTORY)
    damaged = content[:begin] + junk + content[begin + length :]
    try:
        found = decode(damaged)
    except (SafetensorError, ValueError):
        return
    assert isinstance(found, dict)


@given(json_fuzz.bodies(REPLY))
def test_any_line_of_a_server(line):
    try:
        decode_line(line)
    except ValueError as error:
        assert str(error)


@given(json_fuzz.bodies({"sequences": [[1, 2]], "tags": ["weights"]}))
def test_any_order(body):
    for model in (ScoreBody, PartsBody):
        try:
            parse_json(model, body)
        except ValueError as error:
            assert str(error)


@given(st.lists(st.binary(max_size=30) | json_fuzz.bodies({"id": 1, "value": 0.5}), max_size=5))
def test_any_bytes_of_a_reward_worker(pieces):
    reader = RewardProcess.__new__(RewardProcess)  # without a process
    reader._incoming = b""
    try:
        for piece in pieces:
            for message in reader.split_messages(piece + b"\n"):
                assert isinstance(message, dict)
    except BadReplyError as error:
        assert str(error).startswith("sent a reply")


def test_an_honest_one_passes():
    assert decode_line(json.dumps(REPLY).encode()).finished.rid == "a"
    assert torch.equal(decode(encode(TRAJECTORY))["input_ids"], TRAJECTORY["input_ids"])
    with pytest.raises(BadReplyError):
        reader = RewardProcess.__new__(RewardProcess)
        reader._incoming = b""
        reader.split_messages(b"[]\n")
