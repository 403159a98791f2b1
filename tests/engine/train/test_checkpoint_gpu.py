"""Snapshots of a CUDA device: pinned, in the order of the stream, of their moment to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fsdp_world import loss_fn, loss_tokens, make_batch, open_engine
from tiny import write_tiny_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from areal.api.config.train_engine import FSDPEngineConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.train import checkpoint
from areal.engine.train.process_group import join_alone
from areal.models.parallel_dims import ParallelDims

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "archon:d1"},
        {"backend": "fsdp:d1"},
        {"backend": "fsdp:d1", "fsdp": FSDPEngineConfig(offload_params=True)},
        {"backend": "archon:d1", "use_lora": True, "lora_rank": 4},
    ],
    ids=["archon", "fsdp", "fsdp-offloaded", "archon-lora"],
)
def test_what_is_written_after_more_steps_is_the_moment_of_the_capture(folder, tmp_path, options):
    engine = open_engine(folder, **options)
    engine.train_batch(make_batch(0), loss_fn, loss_tokens)
    before = {name: master.clone() for name, master in engine.optimizer.masters().items()}
    write = engine.capture()
    for number in range(1, 4):
        engine.train_batch(make_batch(number), loss_fn, loss_tokens)
    write(tmp_path / "point")
    resumed = open_engine(folder, **options)
    meta = SaveLoadMeta(path=str(tmp_path / "point"), weight_format="dcp", with_optim=True)
    resumed.load(meta)
    for name, master in resumed.optimizer.masters().items():
        assert torch.equal(_local(master), _local(before[name])), name


def test_copies_are_pinned_and_ordered_before_later_work_of_the_stream():
    model = nn.Linear(4096, 4096, device="cuda")
    expected = model.weight.detach().cpu()
    torch.cuda._sleep(200_000_000)  # the copy is not made yet when the weights are changed
    snapshot = checkpoint.capture(model, None, 0)
    with torch.no_grad():
        model.weight.zero_()
    assert snapshot.state["weights.weight"].is_pinned()
    snapshot.copied.synchronize()
    assert torch.equal(snapshot.state["weights.weight"], expected)


def test_shards_on_the_device_become_shards_on_the_host(tmp_path):
    model = nn.Linear(64, 64, device="cuda")
    join_alone(torch.device("cuda"))
    fully_shard(model, mesh=ParallelDims().build_mesh("cuda")["fsdp"])
    snapshot = checkpoint.capture(model, None, 3)
    copy = snapshot.state["weights.weight"]
    assert isinstance(copy, DTensor) and copy.to_local().is_pinned()
    snapshot.write(tmp_path / "point")
    expected = model.weight.to_local().clone()
    model.weight.to_local().detach().zero_()
    assert checkpoint.load(tmp_path / "point", model, None) == 3
    assert torch.equal(model.weight.to_local(), expected)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
