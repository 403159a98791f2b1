"""An engine whose weights and optimizer leave the device in between trains on bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fsdp_world import loss_fn, loss_tokens, make_batch, open_engine, weights_of
from tiny import write_tiny_model

BACKENDS = ("archon:d1", "fsdp:d1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def train(engine, *, offloads: bool) -> dict[str, torch.Tensor]:
    batch = make_batch()
    for _ in range(3):
        if offloads:
            engine.offload()
            assert {p.device.type for p in engine.model.parameters()} == {"cpu"}
            engine.onload()
        engine.train_batch(batch, loss_fn, loss_tokens)
    return weights_of(engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # without and with separate masters
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_goes_on_bit_for_bit(folder, backend, dtype):
    ends = [
        train(open_engine(folder, backend, dtype=dtype), offloads=offloads)
        for offloads in (False, True)
    ]
    assert ends[0].keys() == ends[1].keys()
    for name, weight in ends[0].items():
        assert torch.equal(weight, ends[1][name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_memory_of_the_gpu_is_free_meanwhile(folder, backend):
    test_training_goes_on_bit_for_bit(folder, backend, "bfloat16")
    before = torch.cuda.memory_allocated()
    engine = open_engine(folder, backend)
    engine.train_batch(make_batch(), loss_fn, loss_tokens)
    held = torch.cuda.memory_allocated() - before
    engine.offload()
    assert torch.cuda.memory_allocated() - before < held / 10
    engine.onload()
    assert {p.device.type for p in engine.model.parameters()} == {"cuda"}
