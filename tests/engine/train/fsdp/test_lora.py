"""LoRA on FSDPEngine: what is trained, what leaves, what is saved; peft itself as the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fsdp_world import (
    PLAIN_SGD,
    assert_close,
    loss_fn,
    loss_tokens,
    make_batch,
    open_engine,
    weights_of,
)
from hf_twins import merged_by_peft
from tiny import write_tiny_model
from tiny_run import grpo_config, query
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from areal.api.io_struct import SaveLoadMeta
from areal.run.paths import RunPaths
from areal.trainer.experiment import run_experiment

LORA = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def test_a_fresh_adapter_changes_nothing_and_training_changes_only_its_layers(folder):
    plain = open_engine(folder)
    engine = open_engine(folder, **LORA, target_modules=["q_proj", "down_proj"])
    batch = make_batch()
    torch.testing.assert_close(engine.forward_batch(batch), plain.forward_batch(batch))
    assert_close(weights_of(engine), weights_of(plain), atol=0.0)
    losses = [engine.train_batch(batch, loss_fn, loss_tokens)["loss"] for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]
    before, after = weights_of(plain), weights_of(engine)
    changed = {name.split(".")[-2] for name in before if not before[name].equal(after[name])}
    assert changed == {"q_proj", "down_proj"}
    assert all("lora" in name for name in engine.optimizer.masters())


def test_what_leaves_is_merged_and_what_is_saved_is_the_adapter(folder, tmp_path):
    engine = open_engine(folder, **LORA)
    for number in range(3):
        engine.train_batch(make_batch(number), loss_fn, loss_tokens)
    engine.save(SaveLoadMeta(path=str(tmp_path), weight_format="hf"))
    assert sorted(file.name for file in tmp_path.iterdir() if file.suffix != ".md") == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    merged = merged_by_peft(base, tmp_path)
    assert_close(weights_of(engine), dict(merged.named_parameters()), atol=1e-6)
    # The merged weights compute what the model with adapters does.
    batch = make_batch(5)
    expected = engine.forward_batch(batch)
    whole = tmp_path / "whole"
    merged.save_pretrained(whole)
    torch.testing.assert_close(open_engine(whole).forward_batch(batch), expected)
    other = open_engine(folder, **LORA)
    other.load(SaveLoadMeta(path=str(tmp_path), weight_format="hf"))
    assert_close(weights_of(other), weights_of(engine), atol=0.0)
    with pytest.raises(ValueError, match="does not fit rank 2"):
        open_engine(folder, **LORA | {"lora_rank": 2}).load(
            SaveLoadMeta(path=str(tmp_path), weight_format="hf")
        )


def test_a_resumed_run_ends_with_the_same_bits(folder, tmp_path):
    meta = SaveLoadMeta(path=str(tmp_path), weight_format="dcp", with_optim=True)
    straight, resumed = open_engine(folder, **LORA), open_engine(folder, **LORA)
    straight.train_batch(make_batch(1), loss_fn, loss_tokens)
    straight.save(meta)
    resumed.load(meta)
    for engine in (straight, resumed):
        engine.train_batch(make_batch(2), loss_fn, loss_tokens)
    assert_close(weights_of(straight), weights_of(resumed), atol=0.0)


def test_a_critics_head_is_trained_whole_and_saved_beside_its_adapters(folder, tmp_path):
    def value_loss(values, mb):
        return ((values - 1.0) ** 2 * mb["loss_mask"]).sum() / mb["loss_mask"].sum()

    engine = open_engine(folder, is_critic=True, optimizer=PLAIN_SGD, **LORA)
    before = weights_of(engine)["score.weight"]
    engine.train_batch(make_batch(), value_loss, loss_tokens)
    after = weights_of(engine)["score.weight"]
    assert not torch.equal(before, after)
    engine.save(SaveLoadMeta(path=str(tmp_path), weight_format="hf"))
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    merged = merged_by_peft(base, tmp_path)
    assert torch.equal(merged.score.weight.detach(), after)


def test_bad_targets_are_named(folder):
    with pytest.raises(ValueError, match=r"target_modules.*no_such_layer"):
        open_engine(folder, **LORA, target_modules=["no_such_layer"])


@pytest.mark.parametrize("backend", ["fsdp:d1", "archon:d1"])
def test_a_grpo_run_with_adapters_is_served_merged(backend, tmp_path):
    config = grpo_config(
        tmp_path,
        f"actor.backend={backend}",
        "actor.use_lora=true",
        "actor.lora_rank=4",
        "actor.weight_update_mode=direct",
        "total_train_steps=3",
        "recover.mode=off",
    )
    run_experiment(config)
    paths = RunPaths.of(config)
    assert query(paths.root, "SELECT state, count(*) FROM tasks GROUP BY state") == [
        ("trained", 24)
    ]
    assert (paths.model / "adapter_model.safetensors").is_file()
