"""FSDPEngine on a CUDA device in bfloat16: against Archon, offloaded, recomputed, with LoRA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fsdp_world import loss_fn, loss_tokens, make_batch, open_engine, weights_of
from tiny import write_tiny_model

from areal.api.config.train_engine import FSDPEngineConfig

pytestmark = pytest.mark.gpu

LENGTHS = (33, 250, 7, 120, 64, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    sizes = {"hidden_size": 128, "head_dim": 64, "vocab_size": 512, "initializer_range": 0.05}
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", **sizes)


def losses(engine) -> list[float]:
    batch = make_batch(lengths=LENGTHS)
    return [engine.train_batch(batch, loss_fn, loss_tokens)["loss"] for _ in range(5)]


def test_bfloat16_equals_archon(folder):
    batch = make_batch(lengths=LENGTHS)
    ours, archon = open_engine(folder), open_engine(folder, "archon:d1")
    torch.testing.assert_close(
        ours.forward_batch(batch), archon.forward_batch(batch), rtol=0.02, atol=0.05
    )
    assert {weight.dtype for weight in weights_of(ours).values()} == {torch.bfloat16}
    assert losses(ours) == pytest.approx(losses(archon), rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True},
        {"fsdp": FSDPEngineConfig(offload_params=True)},
    ],
    ids=["recomputed", "offloaded"],
)
def test_less_memory_gives_the_same_losses(folder, changes):
    changed = open_engine(folder, **changes)
    assert losses(changed) == pytest.approx(losses(open_engine(folder)), rel=0.01)
    if "fsdp" in changes:
        assert {p.device.type for p in changed.model.parameters()} == {"cpu"}


def test_lora_learns(folder):
    told = losses(open_engine(folder, use_lora=True, lora_rank=8))
    assert told[-1] < told[0]
