"""Archon with layers that have a recurrent state: ranks, adapters, recomputation, updates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine.train.archon_world import make_batch, open_engine, train, weights_of, work
from gloo_ranks import run_ranks
from tiny import write_tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import WeightUpdateMeta
from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import GenRequest


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("hybrid"), "qwen3_5_text", num_hidden_layers=4)


def test_ranks_train_as_one(tmp_path):
    sparse = str(write_tiny_model(tmp_path / "sparse", "qwen3_5_moe_text"))
    check_ranks([(sparse, "archon:d2e2")], tmp_path)


@pytest.mark.slow
def test_so_do_ranks_of_a_dense_model(folder, tmp_path):
    check_ranks([(str(folder), "archon:d2"), (str(folder), "archon:p2")], tmp_path)


def check_ranks(cases: list[tuple[str, str]], tmp_path: Path) -> None:
    jobs = [(*case, {}, str(tmp_path / f"{i}.pt")) for i, case in enumerate(cases)]
    run_ranks(2, "engine.train.archon_world:rank_works", jobs, timeout_s=900)
    for model, layout, _, out in jobs:
        expected, found = work(open_engine(model, "archon:d1")), torch.load(out)
        for key in ("start", "last_output", "outputs", "step", "gradients", "end"):
            torch.testing.assert_close(
                found[key], expected[key], atol=1e-5, rtol=1e-5, msg=lambda m, at=layout: at + m
            )
        # Three steps of a large rate magnify the last bits of the weights.
        torch.testing.assert_close(found["cut_outputs"], expected["cut_outputs"], atol=2e-3, rtol=0)


def test_a_batch_is_the_sum_of_its_sequences(folder):
    """Packed in one row or computed one by one: the same outputs and the same step."""
    together, apart = (open_engine(str(folder), "archon:d1") for _ in range(2))
    apart.mb_spec.max_tokens_per_mb = 30
    batch = make_batch()
    outputs = [engine.forward_batch(batch) for engine in (together, apart)]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)
    for engine in (together, apart):
        train(engine, batch)
    torch.testing.assert_close(weights_of(together), weights_of(apart), atol=1e-5, rtol=1e-5)


def sampled(engine: NativeEngine, prompt: list[int]) -> tuple[list[int], list[float]]:
    options = GenerationHyperparameters(max_new_tokens=12, ignore_eos=True, seed=0)
    engine.add(GenRequest("one", prompt, options))
    while True:
        for done in engine.step():
            return done.output_tokens, done.output_logprobs


def test_adapters_are_served_beside_the_weights_as_merged_into_them(folder):
    lora = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8.0}
    trainer = open_engine(str(folder), "archon:d1", **lora)
    before = weights_of(trainer)
    for _ in range(3):
        train(trainer, make_batch())
    merged = weights_of(trainer)
    moved = {name.split(".")[-2] for name in before if not before[name].equal(merged[name])}
    assert {"in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "down_proj"} <= moved
    beside, within = (NativeEngine.from_pretrained(folder, page_size=4) for _ in range(2))
    tensors = trainer._adapter_tensors(trainer._adapters)
    beside.load_adapter(tensors, 1, alpha=8.0, name="live", recompute_kv=True)
    within.load_weights(merged.items(), 1, recompute_kv=True)
    prompt = list(range(3, 30))
    tokens, logprobs = sampled(beside, prompt)
    assert tokens == sampled(within, prompt)[0]
    assert logprobs == pytest.approx(sampled(within, prompt)[1], abs=1e-4)


class Receiver:
    """The part of an inference engine that receives weights; it remembers their names."""

    def update_weights(self, meta, named_tensors=None) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in named_tensors}


def test_an_update_has_the_names_of_the_checkpoint_it_came_from(folder, tmp_path):
    plain = open_engine(str(folder), "archon:d1")
    config = json.loads((folder / "config.json").read_text())
    nested = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": config,
    }
    (tmp_path / "config.json").write_text(json.dumps(nested))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    receivers = {}
    for engine, prefix in (
        (plain, "model."),
        (open_engine(str(tmp_path), "archon:d1"), "model.language_model."),
    ):
        receivers[prefix] = Receiver()
        engine.connect_engine(receivers[prefix], WeightUpdateMeta(type="direct", path=""))
        engine.update_weights(1)
        assert all(name.startswith(prefix) for name in receivers[prefix].tensors)
    sent = receivers["model.language_model."].tensors
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv.weight" in sent
    native = NativeEngine.from_pretrained(folder, page_size=4)
    native.load_weights(sent.items(), 1, recompute_kv=True)  # ours takes either name
    usual = receivers["model."].tensors
    for name, tensor in native.model.named_hf_tensors():
        assert torch.equal(tensor, usual[name])
