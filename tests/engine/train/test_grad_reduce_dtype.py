"""`grad_reduce_dtype`: the precision in which ranks sum gradients."""

from __future__ import annotations

import pytest
import torch
from fsdp_world import FT_SPEC, PLAIN_SGD, loss_fn, loss_tokens, make_batch, weights_of
from gloo_ranks import run_ranks
from tiny import write_tiny_model

from areal.api.config.train_engine import TrainEngineConfig
from areal.engine import train_engine_class


@pytest.mark.parametrize("backend", ["archon:d2", "fsdp:d2"])
def test_sums_of_gradients_are_rounded_only_when_asked(tmp_path, backend):
    folder = write_tiny_model(tmp_path / "model", "qwen3")
    body = "engine.train.test_grad_reduce_dtype:body"
    found = run_ranks(2, body, str(folder), backend)[0]
    # A bfloat16 has 8 bits: each element of a sum is off by a share of at most 2**-8 or so.
    assert 0 < found["rounded"] <= found["largest"] * 2**-7


def body(folder: str, backend: str) -> dict[str, float]:
    steps = {dtype: step_of(folder, backend, dtype) for dtype in ("float32", "bfloat16")}
    # Only rank 0 gets whole weights.
    pairs = [(steps["float32"][name], steps["bfloat16"][name]) for name in steps["float32"]]
    return {
        "rounded": max(((a - b).abs().max().item() for a, b in pairs), default=0.0),
        "largest": max((a.abs().max().item() for a, _ in pairs), default=0.0),
    }


def step_of(folder: str, backend: str, dtype: str) -> dict[str, torch.Tensor]:
    """What one plain step changes in each weight: lr times the summed gradient."""
    config = TrainEngineConfig(
        path=folder,
        backend=backend,
        optimizer=PLAIN_SGD,
        dtype="float32",
        grad_reduce_dtype=dtype,
    )
    engine = train_engine_class(backend)(config)
    engine.create_process_group(config.allocation.parallel)
    engine.initialize(FT_SPEC)
    before = weights_of(engine)
    engine.train_batch(make_batch(), loss_fn, loss_tokens)
    return {name: weight - before[name] for name, weight in weights_of(engine).items()}
