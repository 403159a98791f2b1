"""LoRA on Archon: peft and the engine that trains with it are the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine.train import archon_world
from fsdp_world import (
    PLAIN_SGD,
    assert_close,
    loss_fn,
    loss_tokens,
    make_batch,
    open_engine,
    weights_of,
)
from gloo_ranks import run_ranks
from hf_twins import merged_by_peft
from safetensors.torch import load_file
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from areal.api.io_struct import SaveLoadMeta
from areal.engine.train import checkpoint
from areal.models.hf_io import read_hf_config, save_hf

LORA = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8.0}
ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def hf(path: Path | str) -> SaveLoadMeta:
    return SaveLoadMeta(path=str(path), weight_format="hf")


def test_a_fresh_adapter_changes_nothing_and_training_changes_only_its_layers(folder):
    plain = open_engine(folder, "archon:d1")
    engine = open_engine(folder, "archon:d1", **LORA, target_modules=["q_proj", "down_proj"])
    batch = make_batch()
    torch.testing.assert_close(engine.forward_batch(batch), plain.forward_batch(batch))
    assert_close(weights_of(engine), weights_of(plain), atol=0.0)
    losses = [engine.train_batch(batch, loss_fn, loss_tokens)["loss"] for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]
    before, after = weights_of(plain), weights_of(engine)
    changed = {name.split(".")[-2] for name in before if not before[name].equal(after[name])}
    assert changed == {"q_proj", "down_proj"}
    assert all("lora_" in name for name in engine.optimizer.masters())


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "gemma3_text"])
def test_training_is_that_of_peft(family, tmp_path):
    folder = write_tiny_model(tmp_path / "model", family)
    ours = open_engine(folder, "archon:d1", **LORA, optimizer=PLAIN_SGD)
    theirs = open_engine(folder, "fsdp:d1", **LORA, optimizer=PLAIN_SGD)
    theirs.save(hf(tmp_path / "start"))
    ours.load(hf(tmp_path / "start"))  # what peft wrote
    for number in range(3):
        for engine in (ours, theirs):
            engine.train_batch(make_batch(number), loss_fn, loss_tokens)
    assert_close(weights_of(ours), weights_of(theirs), atol=1e-5)
    ours.save(hf(tmp_path / "ours"))
    theirs.save(hf(tmp_path / "theirs"))
    ends = [load_file(tmp_path / name / ADAPTER_FILES[1]) for name in ("ours", "theirs")]
    assert_close(*ends, atol=1e-5)


def test_what_leaves_is_merged_and_peft_loads_what_is_saved(folder, tmp_path):
    engine = open_engine(folder, "archon:d1", **LORA)
    for number in range(3):
        engine.train_batch(make_batch(number), loss_fn, loss_tokens)
    engine.save(hf(tmp_path / "adapter"))
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == ADAPTER_FILES
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    merged = merged_by_peft(base, tmp_path / "adapter")
    assert_close(weights_of(engine), dict(merged.named_parameters()), atol=1e-6)
    merged.save_pretrained(tmp_path / "whole")
    batch = make_batch(5)
    whole = open_engine(tmp_path / "whole", "archon:d1")
    torch.testing.assert_close(whole.forward_batch(batch), engine.forward_batch(batch))
    with pytest.raises(ValueError, match="does not fit rank 2"):
        open_engine(folder, "archon:d1", **LORA | {"lora_rank": 2}).load(hf(tmp_path / "adapter"))


def test_a_resumed_run_ends_with_the_same_bits_and_saves_no_frozen_weight(folder, tmp_path):
    meta = SaveLoadMeta(path=str(tmp_path / "point"), weight_format="dcp", with_optim=True)
    straight = open_engine(folder, "archon:d1", **LORA)
    straight.train_batch(make_batch(1), loss_fn, loss_tokens)
    straight.save(meta)
    resumed = open_engine(folder, "archon:d1", **LORA)
    resumed.load(meta)
    for engine in (straight, resumed):
        engine.train_batch(make_batch(2), loss_fn, loss_tokens)
    assert_close(weights_of(straight), weights_of(resumed), atol=0.0)
    names = [name for name in checkpoint.digests(meta.path) if name != "counters"]
    assert names and all("lora_" in name for name in names)


def test_a_critics_head_is_trained_whole_and_saved_beside_its_adapters(folder, tmp_path):
    def value_loss(values, mb):
        return ((values - 1.0) ** 2 * mb["loss_mask"]).sum() / mb["loss_mask"].sum()

    engine = open_engine(folder, "archon:d1", is_critic=True, optimizer=PLAIN_SGD, **LORA)
    engine.train_batch(make_batch(), value_loss, loss_tokens)
    after = weights_of(engine)["score.weight"]
    assert after.abs().max() > 0
    engine.save(hf(tmp_path))
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    merged = merged_by_peft(base, tmp_path)
    assert torch.equal(merged.score.weight.detach(), after)


def test_what_cannot_be_adapted_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="target_modules.*'no_such_layer'.*down_proj, gate_proj"):
        open_engine(folder, "archon:d1", **LORA, target_modules=["q_proj", "no_such_layer"])
    experts = write_tiny_model(tmp_path / "experts", "qwen3_moe")
    with pytest.raises(
        ValueError, match="target_modules.*'router'.*there are down_proj, gate_proj"
    ):
        open_engine(experts, "archon:d1", **LORA, target_modules=["router"])


def test_experts_have_adapters_where_they_are_named(tmp_path):
    folder = write_tiny_model(tmp_path / "model", "qwen3_moe")
    before = weights_of(open_engine(folder, "archon:d1"))
    for targets, adapted in (
        ([], {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (["gate_proj"], {"gate_proj"}),
    ):
        engine = open_engine(folder, "archon:d1", **LORA, target_modules=targets)
        assert all("lora_" in name for name in engine.optimizer.masters())
        engine.train_batch(make_batch(), loss_fn, loss_tokens)
        after = weights_of(engine)
        changed = {name.split(".")[-2] for name in before if not before[name].equal(after[name])}
        assert changed == adapted


def test_gradients_of_expert_adapters_are_those_of_their_merged_weights(tmp_path):
    """d loss / d B = scaling * G A', d loss / d A = scaling * B' G, where G is the gradient of the
    weight W + scaling * B A in an engine that trains all of it."""
    targets = ["gate_proj", "up_proj", "down_proj"]
    folder = write_tiny_model(tmp_path / "model", "qwen3_moe")
    adapted = open_engine(folder, "archon:d1", **LORA, target_modules=targets, optimizer=PLAIN_SGD)
    adapted.train_batch(
        make_batch(), loss_fn, loss_tokens
    )  # else B is zero, and so is d loss / d A
    start = weights_of(adapted)
    adapted.save(hf(tmp_path / "before"))
    save_hf(iter(start.items()), read_hf_config(folder), tmp_path / "merged")
    whole = open_engine(tmp_path / "merged", "archon:d1", optimizer=PLAIN_SGD)
    for engine in (adapted, whole):
        engine.train_batch(make_batch(1), loss_fn, loss_tokens)
    adapted.save(hf(tmp_path / "after"))
    before, after = (load_file(tmp_path / name / ADAPTER_FILES[1]) for name in ("before", "after"))
    ends = weights_of(whole)
    found = {name: (before[name] - after[name]) / PLAIN_SGD.lr for name in before}
    scaling, expected = LORA["lora_alpha"] / LORA["lora_rank"], {}
    layers = {name.rpartition(".lora_")[0] for name in before}
    assert len(layers) == 2 * 4 * len(targets)  # layers, experts
    for layer in layers:
        name = layer.removeprefix("base_model.model.") + ".weight"
        gradient = (start[name] - ends[name]) / PLAIN_SGD.lr
        a_RD, b_NR = (before[f"{layer}.lora_{matrix}.weight"] for matrix in "AB")
        expected[f"{layer}.lora_A.weight"] = scaling * b_NR.T @ gradient
        expected[f"{layer}.lora_B.weight"] = scaling * gradient @ a_RD.T
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-2
    assert_close(found, expected, atol=1e-4)


def test_adapters_of_a_pipeline_are_saved_from_every_stage(folder, tmp_path):
    lora = {**LORA, "pp_schedule": "1F1B"}
    body = "engine.train.archon_world:rank_saves_adapters"
    run_ranks(2, body, str(folder), str(tmp_path), "archon:p2", lora, timeout_s=900)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    merged = merged_by_peft(base, tmp_path / "adapter")
    expected = torch.load(tmp_path / "end.pt")
    assert_close(dict(merged.named_parameters()), expected, atol=1e-6)


def test_two_ranks_train_as_one(folder, tmp_path):
    def rows(engine) -> dict[str, torch.Tensor]:
        for number in range(2):
            archon_world.train(engine, archon_world.make_batch(number))
        return weights_of(engine)

    expected = rows(archon_world.open_engine(str(folder), "archon:d1", **LORA))
    body = "engine.train.archon_world:rank_saves_adapters"
    run_ranks(2, body, str(folder), str(tmp_path), "archon:d2", LORA, timeout_s=900)
    assert_close(torch.load(tmp_path / "end.pt"), expected, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    merged = merged_by_peft(base, tmp_path / "adapter")
    assert_close(dict(merged.named_parameters()), expected, atol=1e-5)
