"""What two Archon ranks must do together: skip, clip, refuse, stream weights, save, and say where
they are."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine.train.archon_world import (
    loss_fn,
    make_batch,
    num_loss_tokens,
    open_engine,
    own_rows,
    train,
    weights_of,
)
from gloo_ranks import run_ranks
from tiny import write_tiny_model

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.train_engine import ArchonEngineConfig, OptimizerConfig, TrainEngineConfig
from areal.api.io_struct import SaveLoadMeta, WeightUpdateMeta
from areal.engine.train.archon import ArchonEngine
from areal.engine.train.export import stream_weights

CLIPPED = OptimizerConfig(type="sgd", lr=1.0, beta1=0.0, weight_decay=0.0, gradient_clipping=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3"))


def test_two_ranks_act_as_one(folder, tmp_path):
    found = run_ranks(2, "engine.train.test_archon_ranks:ranks_body", folder, str(tmp_path))
    for rank, answers in enumerate(found):
        assert answers["place"] == [rank, 2, True]
        assert answers["tp_place"] == [0, 1, rank == 0]
        assert answers["skipped"] == [0.0, False, 1, True]
        assert answers["after_skip"] == 1.0
        assert answers["clipped_step"] == pytest.approx(1e-3, rel=1e-2)
    assert "right padding" in found[1]["refused"] and "another rank" in found[0]["refused"]
    assert all("no rows on any rank" in answers["empty"] for answers in found)
    assert all("no token to learn from" in answers["nothing_to_learn"] for answers in found)
    assert [answers["streamed"] for answers in found] == [[True, 1], [False, 0]]
    assert "disk is full" in found[0]["send_failed"] and "rank 0" in found[1]["send_failed"]
    one_rank = open_engine(folder, "archon:d1")
    one_rank.load(SaveLoadMeta(path=str(tmp_path / "hf"), weight_format="hf"))
    saved = torch.load(tmp_path / "weights.pt")
    assert all(torch.equal(saved[name], tensor) for name, tensor in one_rank.hf_weights())


def ranks_body(folder: str, scratch: str) -> dict[str, Any]:
    engine, batch = open_engine(folder, "archon:d2"), make_batch()
    found: dict[str, Any] = {"place": _place(engine)}
    found["tp_place"] = _place(open_engine(folder, "archon:t2"))
    found["skipped"] = _skip(engine, batch)
    found["after_skip"] = train(engine, batch)["update_successful"]
    found["clipped_step"] = _clipped_step(folder, batch)
    found["refused"] = _refusal(engine, _with_a_hole(batch) if dist.get_rank() else batch)
    found["empty"] = _refusal(engine, {k: v[:0] for k, v in batch.items()})
    nothing = batch | {"loss_mask": batch["loss_mask"] & False}
    found["nothing_to_learn"] = _refusal(engine, nothing)
    found["streamed"] = _stream(engine)
    found["send_failed"] = _failed_send(engine)
    engine.save(SaveLoadMeta(path=str(Path(scratch) / "hf"), weight_format="hf"))
    weights = weights_of(engine)
    if dist.get_rank() == 0:
        torch.save(weights, Path(scratch) / "weights.pt")
    return found


def _place(engine: ArchonEngine) -> list[Any]:
    return [
        engine.data_parallel_rank,
        engine.data_parallel_world_size,
        engine.is_data_parallel_head(),
    ]


def _skip(engine: ArchonEngine, batch: dict) -> list[Any]:
    """A loss that is not finite on rank 1 alone."""

    def broken(*args):
        return loss_fn(*args) * (math.inf if dist.get_rank() == 1 else 1.0)

    train(engine, batch)
    before = {name: weight.to_local().clone() for name, weight in engine.model.state_dict().items()}
    stats = train(engine, batch, broken)
    after = engine.model.state_dict()
    same = all(torch.equal(before[name], after[name].to_local()) for name in before)
    skipped = engine.optimizer.num_skipped_steps
    return [stats["update_successful"], math.isfinite(stats["grad_norm"]), skipped, same]


def _clipped_step(folder: str, batch: dict) -> float:
    """The norm of what a clipped step of plain SGD changed, over the whole model."""
    engine = open_engine(folder, "archon:d2", optimizer=CLIPPED)
    before = {name: weight.to_local().clone() for name, weight in engine.model.state_dict().items()}
    assert train(engine, batch)["grad_norm"] > 1e-2
    after = engine.model.state_dict()
    squares = sum((after[name].to_local() - before[name]).square().sum() for name in before)
    dist.all_reduce(squares)
    return squares.sqrt().item()


def _with_a_hole(batch: dict) -> dict:
    mask = batch["attention_mask"].clone()
    mask[:, 0] = False
    return batch | {"attention_mask": mask}


def _refusal(engine: ArchonEngine, batch: dict) -> str:
    try:
        engine.train_batch(own_rows(engine, batch), loss_fn, num_loss_tokens)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def _stream(engine: ArchonEngine) -> list[Any]:
    """Whether this rank was given every weight, and how many whole ones lived at a time."""
    alive: list[weakref.ref] = []
    most = 0
    names = set()
    is_first = dist.get_rank() == 0
    # Buckets of one weight each.
    for name, tensor in stream_weights(
        engine.model, torch.float32, is_receiver=is_first, bucket_bytes=1
    ):
        names.add(name)
        alive.append(weakref.ref(tensor))
        del tensor
        gc.collect()
        most = max(most, sum(ref() is not None for ref in alive))
    return [names == engine.model.hf_shapes().keys(), most]


class FullDisk:
    """The part of an inference engine that receives weights: it takes one, then fails."""

    def update_weights(self, meta, named_tensors) -> None:
        next(named_tensors)
        raise OSError("disk is full")


def _failed_send(engine: ArchonEngine) -> str:
    engine.connect_engine(FullDisk(), WeightUpdateMeta(type="direct", path=""))
    try:
        engine.update_weights(1)
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a CPU without bf16 says so, and computes
def test_bfloat16_shards_compute_what_one_rank_computes(folder, tmp_path):
    out = tmp_path / "found.pt"
    run_ranks(2, "engine.train.test_archon_ranks:bfloat16_body", folder, str(out))
    engine, got = open_engine(folder, "archon:d1", dtype="bfloat16"), torch.load(out)
    stats = train(engine, make_batch())
    # Equal roundings but for the order of sums of gradients.
    assert got["stats"] == pytest.approx(stats, rel=1e-2)
    for name, weight in engine.hf_weights():
        assert got["weights"][name].dtype == torch.bfloat16
        torch.testing.assert_close(got["weights"][name], weight, rtol=2e-2, atol=2e-3)
    assert got["masters"] == {torch.float32}


def bfloat16_body(folder: str, out: str) -> None:
    engine = open_engine(folder, "archon:d2", dtype="bfloat16")
    stats = train(engine, make_batch())
    weights = weights_of(engine)
    if dist.get_rank() == 0:
        masters = {master.dtype for master in engine.optimizer.masters().values()}
        torch.save({"stats": stats, "weights": weights, "masters": masters}, out)


TWO_REPLICAS = {"backend": "archon:d4e4", "archon": ArchonEngineConfig(num_replicas=2)}


@pytest.mark.parametrize(
    ("backend", "changes", "fault"),
    [
        ("archon:d2", {}, "RANK, WORLD_SIZE"),
        ("archon:d4e4", TWO_REPLICAS, "do not divide the 2 that hold .* replicas, 2"),
        ("archon:t2", {"batch_invariant": True}, "batch_invariant needs one rank"),
        ("archon:d2p2", {"enable_tree_training": True}, "cannot be cut into pipeline stages"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(folder, monkeypatch, backend, changes, fault):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    engine = ArchonEngine(TrainEngineConfig(path=folder, **changes))
    with pytest.raises((ValueError, RuntimeError), match=fault):
        engine.create_process_group(ModelAllocation.from_str(backend).parallel)
