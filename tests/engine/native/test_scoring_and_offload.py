"""Scores of given tokens against transformers, and an engine that leaves its device and returns."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tiny import tiny_model, write_tiny_model
from transformers import AutoModelForCausalLM

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.engine.native.engine import NativeEngine
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.native.sequence import GenRequest
from areal.engine.remote.native import NativeRemoteEngine, launch_native_server
from areal.models.common.layer_trace import trace_layers
from areal.weight_sync.bucket import checksum_of

pytestmark = pytest.mark.usefixtures("forked_children")

TOKEN = "token-of-this-run"
ROWS = [[5, 7, 9, 11, 3], [2], [4, 4, 4], [60, 1, 33, 8]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def local(folder):
    engine = NativeLocalEngine(folder, num_pages=100)
    engine.initialize()
    yield engine
    engine.destroy()


@pytest.fixture(scope="module")
def remote(folder):
    children, addresses = zip(
        *(launch_native_server(folder, token=TOKEN, num_pages=100) for _ in range(2)), strict=True
    )
    engine = NativeRemoteEngine(list(addresses), TOKEN, request_timeout_s=60)
    engine.initialize()
    yield engine
    engine.destroy()
    for child in children:
        child.terminate()


def padded_batch():
    width = max(map(len, ROWS)) + 1
    ids, mask = torch.zeros(len(ROWS), width).long(), torch.zeros(len(ROWS), width).bool()
    for row, tokens in enumerate(ROWS):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = True
    return {"input_ids": ids, "attention_mask": mask}


def generate(engine):
    gconfig = GenerationHyperparameters(max_new_tokens=5, ignore_eos=True, greedy=True)
    return engine.agenerate(ModelRequest(input_ids=[3, 4], gconfig=gconfig))


@torch.no_grad()
def test_scores_are_those_of_transformers(folder, local, remote):
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = torch.zeros_like(padded_batch()["input_ids"], dtype=torch.float32)
    for row, tokens in enumerate(ROWS):
        ids = torch.tensor([tokens])
        logprobs = hf(ids).logits.log_softmax(-1)[0, :-1]
        expected[row, : len(tokens) - 1] = logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)
    for engine in (local, remote):
        torch.testing.assert_close(engine.compute_logp(padded_batch()), expected)


def test_a_token_outside_the_vocabulary_is_named(local, remote):
    data = padded_batch()
    data["input_ids"][2, 0] = 9999
    with pytest.raises(ValueError, match=r"sequences\[2\] must lie in \[0, 64\)"):
        local.compute_logp(data)
    with pytest.raises(RuntimeError, match="must lie in"):
        remote.compute_logp(data)


def test_servers_show_the_weights_and_layers_they_compute_with(folder, local, remote):
    """Equal on every server of one model, and other for another model."""
    (here,), servers = local.weight_checksums().values(), remote.weight_checksums()
    assert len(servers) == 2 and all(theirs == here for theirs in servers.values())
    other = tiny_model("qwen3", seed=1)
    assert here.keys() == other.hf_shapes().keys()
    assert here["model.norm.weight"] == checksum_of(other.norm.weight)  # ones in both
    (trace,), traces = local.layer_trace(ROWS[0]).values(), remote.layer_trace(ROWS[0])
    assert len(traces) == 2 and all(theirs == trace for theirs in traces.values())
    assert list(trace["layers"]) == ["embedding", "layers.0", "layers.1", "norm", "logits"]
    assert trace["args"]["rope.theta"] == 10000.0 and trace["experts"] == {}
    assert trace != trace_layers(other, ROWS[0])
    with pytest.raises(RuntimeError, match="must lie in"):
        remote.layer_trace([9999])


@pytest.mark.parametrize("tags", [None, ["weights"], ["kv_cache"]])
async def test_requests_wait_for_an_offloaded_engine(local, remote, tags):
    for engine in (local, remote):
        before = await generate(engine)
        await asyncio.to_thread(engine.offload, tags)
        task = asyncio.create_task(generate(engine))
        done, _ = await asyncio.wait([task], timeout=0.2)
        assert not done
        await asyncio.to_thread(engine.onload)
        assert (await task).output_tokens == before.output_tokens


def test_running_requests_go_on_with_weights_that_came_meanwhile():
    engine = NativeEngine(tiny_model("qwen3", seed=0), page_size=4, num_pages=50)
    gconfig = GenerationHyperparameters(max_new_tokens=8, ignore_eos=True, greedy=True)
    engine.add(GenRequest("a", [3, 4, 5], gconfig))
    for _ in range(3):
        engine.step()
    engine.offload()
    assert not engine.has_work and engine.stats()["pages_in_use"] == 0
    with pytest.raises(ValueError, match="onload first"):
        engine.score([[1, 2]])
    engine.load_weights(tiny_model("qwen3", seed=1).named_hf_tensors(), 1, recompute_kv=True)
    engine.onload(["weights"])
    assert not engine.has_work
    engine.onload(["kv_cache"])
    finished = []
    while engine.has_work:
        finished += engine.step()
    assert finished[0].output_versions[0] == 0 and finished[0].output_versions[-1] == 1
    with pytest.raises(ValueError, match="tags: expected some of kv_cache, weights, got 'cash'"):
        engine.offload(["cash"])
