"""The experts of each token, as a request's reply has them: those that computed it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tiny import tiny_model, write_tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.engine.native.engine import NativeEngine
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.native.sequence import Finished, GenRequest
from areal.engine.remote.native import NativeRemoteEngine, launch_native_server
from areal.models.common.attention import PackedAttention
from areal.models.common.moe import recorded_experts

pytestmark = pytest.mark.usefixtures("forked_children")

SHAPE = {"num_experts": 6, "num_experts_per_tok": 3, "mlp_only_layers": [0]}
OPTIONS = {"page_size": 4, "num_pages": 100, "max_running": 8}
TOKEN = "token-of-this-run"


def make_model(seed=0, family="qwen3_moe", **overrides):
    return tiny_model(family, seed=seed, num_hidden_layers=3, **SHAPE | overrides)


@torch.no_grad()
def experts_of(model, tokens) -> np.ndarray:
    """Of all tokens but the last, by a plain forward."""
    tokens_T = torch.tensor(tokens[:-1])
    attend = PackedAttention(torch.tensor([0, len(tokens_T)]), len(tokens_T))
    with recorded_experts(model) as chosen:
        model(tokens_T, torch.arange(len(tokens_T)), attend)
    return torch.stack(chosen, dim=1).numpy()


def request(rid, prompt, num_out=5, **fields) -> GenRequest:
    gconfig = GenerationHyperparameters(max_new_tokens=num_out, ignore_eos=True, seed=len(rid))
    return GenRequest(rid, list(prompt), gconfig, **{"return_routed_experts": True} | fields)


def run(engine: NativeEngine) -> dict[str, Finished]:
    done: dict[str, Finished] = {}
    while engine.has_work:
        done |= {one.rid: one for one in engine.step() if isinstance(one, Finished)}
    return done


def check(model, sent: GenRequest, finished: Finished) -> None:
    routed = finished.routed_experts
    assert routed is not None
    expected = experts_of(model, sent.input_ids + finished.output_tokens)
    assert routed.dtype == np.uint8 and routed.shape == expected.shape
    np.testing.assert_array_equal(routed, expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_prompts_and_outputs_have_the_experts_that_computed_them(family):
    """Also a prompt that two samples share, and one whose beginning is in the cache."""
    engine = NativeEngine(make_model(family=family), **OPTIONS)
    shared = [5, 9, 11, 2, 7, 3]
    first = [request("a", shared), request("bb", shared), request("c", [4])]
    for sent in first:
        engine.add(sent)
    done = run(engine)
    follow_up = request("d", shared + done["a"].output_tokens + [8])
    engine.add(follow_up)
    done |= run(engine)
    assert done["d"].cached_tokens > 0
    for sent in (*first, follow_up):
        check(engine.model, sent, done[sent.rid])


def test_a_preempted_request_has_all_of_its_experts():
    engine = NativeEngine(make_model(), **OPTIONS | {"num_pages": 9})
    requests = [request(str(i), [i + 1, 2, 3], num_out=12) for i in range(4)]
    for sent in requests:
        engine.add(sent)
    done = run(engine)
    assert engine.stats()["preemptions"] > 0
    for sent in requests:
        check(engine.model, sent, done[sent.rid])


def test_after_new_weights_recomputed_tokens_have_the_new_experts():
    engine, sent = NativeEngine(make_model(), **OPTIONS), request("a", [3, 4, 5], num_out=8)
    engine.add(sent)
    for _ in range(4):
        engine.step()
    new = make_model(seed=1)
    engine.load_weights(new.named_hf_tensors(), 1, recompute_kv=True)
    finished = run(engine)["a"]
    assert set(finished.output_versions) == {0, 1}
    check(new, sent, finished)


def test_more_experts_than_a_byte_counts():
    model = make_model(num_experts=300)
    engine, sent = NativeEngine(model, **OPTIONS), request("a", [3, 4, 5])
    engine.add(sent)
    routed = run(engine)["a"].routed_experts
    assert routed is not None and routed.dtype == np.int16 and routed.max() > 255


def test_who_does_not_ask_gets_none():
    engine = NativeEngine(make_model(), **OPTIONS)
    engine.add(request("a", [3, 4], return_routed_experts=False))
    assert run(engine)["a"].routed_experts is None


def test_a_dense_model_has_none_to_return():
    engine = NativeEngine(tiny_model("qwen3"), **OPTIONS)
    with pytest.raises(ValueError, match="return_routed_experts: this model has no experts"):
        engine.add(request("a", [3, 4]))


async def test_they_travel_from_a_server_as_they_are(tmp_path):
    folder = write_tiny_model(tmp_path, "qwen3_moe", **SHAPE)
    child, address = launch_native_server(folder, token=TOKEN, num_pages=64, setup_timeout_s=900)
    remote = NativeRemoteEngine([address], TOKEN, return_routed_experts=True, setup_timeout_s=300)
    local = NativeLocalEngine(folder, num_pages=64, return_routed_experts=True)
    gconfig = GenerationHyperparameters(max_new_tokens=150, ignore_eos=True, seed=3)
    sent = ModelRequest(input_ids=[5, 6, 7], gconfig=gconfig)
    try:
        for engine in (remote, local):
            engine.initialize()
        near, far = await asyncio.gather(local.agenerate(sent), remote.agenerate(sent))
    finally:
        for engine in (remote, local):
            await asyncio.to_thread(engine.destroy)
        child.terminate()
    assert near.output_tokens == far.output_tokens
    assert far.routed_experts is not None and near.routed_experts is not None
    assert far.routed_experts.shape == (152, 1, 3)
    np.testing.assert_array_equal(far.routed_experts, near.routed_experts)
