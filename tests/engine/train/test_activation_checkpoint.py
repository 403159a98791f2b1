"""Checkpointed and compiled blocks: the same losses and weights, less kept for backward passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine.train.archon_world import (
    loss_fn,
    make_batch,
    num_loss_tokens,
    open_engine,
    train_once,
)
from gloo_ranks import run_ranks
from tiny import write_tiny_model
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from areal.api.config.train_engine import ArchonEngineConfig
from areal.engine.train.archon import ArchonEngine

MODES = {
    "selective": {"ac_mode": "selective"},
    "every second": {"ac_mode": "selective", "selective_ac_option": "2"},
    "full": {"ac_mode": "full"},
}


def open_with(folder: Path, **archon: object) -> ArchonEngine:
    return open_engine(
        folder,
        "archon:d1",
        gradient_checkpointing="ac_mode" in archon,
        archon=ArchonEngineConfig(**archon),
    )


def train(engine: ArchonEngine) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], int]:
    """Losses and gradient norms, weights, and the bytes that were kept for backward passes."""
    kept = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    results = []
    for seed, lengths in enumerate([(5, 9, 3), (8, 8), (30,)]):
        with saved_tensors_hooks(count, lambda tensor: tensor):
            stats = engine.train_batch(make_batch(seed, lengths), loss_fn, num_loss_tokens)
        results.append((stats["loss"], stats["grad_norm"]))
    return results, {name: tensor.clone() for name, tensor in engine.hf_weights()}, kept


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_every_mode_trains_alike(family, tmp_path):
    folder = write_tiny_model(tmp_path, family)
    results, weights, kept = train(open_with(folder))
    for name, options in MODES.items():
        mode_results, mode_weights, mode_kept = train(open_with(folder, **options))
        assert mode_results == results, name
        for key, weight in weights.items():
            assert torch.equal(mode_weights[key], weight), (name, key)
        assert mode_kept < kept, name


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"ac_mode": "memory_budget"}])
def test_compiled_blocks_train_alike(options, tmp_path):
    folder = write_tiny_model(tmp_path, "qwen3", num_hidden_layers=3)
    results, weights, _ = train(open_with(folder))
    torch.compiler.reset()
    counters.clear()
    compiled = open_with(folder, enable_compile=True, **options)
    compiled_results, compiled_weights, _ = train(compiled)
    assert compiled_results == [pytest.approx(pair, rel=1e-4) for pair in results]
    for key, weight in weights.items():
        torch.testing.assert_close(compiled_weights[key], weight, rtol=1e-3, atol=1e-5)
    # One program for each half of a block, whatever the block and the number of tokens.
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
def test_compiled_blocks_that_are_cut_train_alike(tmp_path):
    """Cut over t, recomputed in the backward pass: as one rank that compiles nothing."""
    folder, out = str(write_tiny_model(tmp_path / "model", num_hidden_layers=1)), tmp_path / "found"
    changes = {"enable_compile": True, "ac_mode": "full", "gradient_checkpointing": True}
    run_ranks(
        2, "engine.train.archon_world:rank_trains_once", folder, "archon:t2", changes, str(out)
    )
    expected, got = train_once(open_engine(folder, "archon:d1")), torch.load(out)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
