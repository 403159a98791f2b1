"""Training in FP8 by its key: near full precision, on ranks, checkpointed; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.train.archon_world import make_batch, open_engine, own_rows
from gloo_ranks import run_ranks
from tiny import write_tiny_model

from areal.algorithm.loss import sft_loss
from areal.api.config.train_engine import (
    ArchonEngineConfig,
    ArchonFP8Config,
    OptimizerConfig,
    TrainEngineConfig,
)
from areal.api.io_struct import FinetuneSpec
from areal.engine.train.archon import ArchonEngine

FT_SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=1)
BLOCKWISE = ArchonFP8Config(mode="blockwise")
IN_FP8 = ArchonEngineConfig(fp8_config=BLOCKWISE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def open_one(folder, **changes: Any) -> ArchonEngine:
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=0)
    engine = ArchonEngine(TrainEngineConfig(path=str(folder), optimizer=optimizer, **changes))
    engine.initialize(FT_SPEC)
    return engine


def loss(logprobs, entropy, mb):
    return sft_loss(logprobs, mb["loss_mask"])


def train(engine: ArchonEngine, steps: int = 1) -> list[float]:
    """The mean negative log-probability of what is learned, before each step and at the end."""
    batch, found = make_batch(), []
    for _ in range(steps):
        found.append(mean_loss(engine, batch))
        engine.train_batch(batch, loss, lambda mb: mb["loss_mask"].sum())
    return [*found, mean_loss(engine, batch)]


def mean_loss(engine: ArchonEngine, batch: dict[str, torch.Tensor]) -> float:
    return -engine.forward_batch(batch)[batch["loss_mask"]].mean().item()


def test_a_curve_follows_that_of_full_precision(folder):
    plain, in_fp8 = (train(open_one(folder, archon=a), 12) for a in (ArchonEngineConfig(), IN_FP8))
    assert in_fp8[0] != plain[0]
    assert plain[-1] < 0.5 * plain[0]
    for found, expected in zip(in_fp8, plain, strict=True):
        assert abs(found - expected) < 0.15 * plain[0]


@pytest.mark.parametrize("ac_mode", ["selective", "full"])
def test_checkpointing_changes_nothing(folder, ac_mode):
    archon = ArchonEngineConfig(fp8_config=BLOCKWISE, ac_mode=ac_mode)
    recomputed = open_one(folder, archon=archon, gradient_checkpointing=True)
    assert train(recomputed) == pytest.approx(train(open_one(folder, archon=IN_FP8)), abs=1e-4)


def losses_of_a_rank(folder: str) -> list[float]:
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=0)
    engine = open_engine(folder, "archon:d2", archon=IN_FP8, optimizer=optimizer)
    batch = own_rows(engine, make_batch())
    engine.train_batch(batch, loss, lambda mb: mb["loss_mask"].sum())
    after = engine.forward_batch(batch)[batch["loss_mask"]]
    return [after.sum().item(), float(after.numel())]


def test_ranks_train_alike(folder):
    ranks = run_ranks(2, "engine.train.test_archon_fp8_training:losses_of_a_rank", str(folder))
    total, count = (sum(part) for part in zip(*ranks, strict=True))
    # Other tokens share the scales of columns.
    assert -total / count == pytest.approx(train(open_one(folder, archon=IN_FP8))[-1], abs=0.05)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_lora": True}, "use_lora must be false with archon.fp8_config.mode blockwise"),
        ({"batch_invariant": True}, "batch_invariant must be false with archon.fp8_config.mode"),
        ({"dtype": "float16"}, "dtype must be bfloat16 or float32 with archon.fp8_config.mode"),
        ({"backend": "archon:t2"}, "archon.fp8_config.mode must be disabled with t or p"),
        ({"backend": "archon:p2"}, "archon.fp8_config.mode must be disabled with t or p"),
        ({"backend": "fsdp:d1"}, "section archon needs backend archon"),
    ],
)
def test_what_it_cannot_be_combined_with(changes, says):
    with pytest.raises(ValueError, match=says):
        TrainEngineConfig(path="m", **{"archon": IN_FP8, **changes})


def test_latent_attention_is_refused_by_the_key(tmp_path):
    folder = write_tiny_model(tmp_path / "model", "deepseek_v2")
    with pytest.raises(ValueError, match=r"archon.fp8_config.mode .* latent attention"):
        open_one(folder, archon=IN_FP8)


def test_an_empty_name_is_refused():
    with pytest.raises(ValueError, match="an empty name would exclude every layer"):
        ArchonFP8Config(mode="blockwise", exclude_modules=[""])
