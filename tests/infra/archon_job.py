"""The same work for an engine in this process and for one on ranks of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engine.train.archon_world import make_batch, num_loss_tokens

from areal.algorithm.loss import sft_loss
from areal.api.config.train_engine import (
    ArchonEngineConfig,
    MicroBatchSpec,
    OptimizerConfig,
    TrainEngineConfig,
)
from areal.api.engine_api import TrainEngine
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta
from areal.utils import stats_tracker

FT_SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=1)


def config_of(folder: Path, backend: str = "archon:d1", **archon: Any) -> TrainEngineConfig:
    optimizer = OptimizerConfig(lr=1e-2, lr_scheduler_type="linear", warmup_steps=1)
    return TrainEngineConfig(
        path=str(folder),
        backend=backend,
        optimizer=optimizer,
        mb_spec=MicroBatchSpec(max_tokens_per_mb=20),
        archon=ArchonEngineConfig(**archon),
    )


def loss_fn(logprobs_T: torch.Tensor, entropy_T: torch.Tensor, mb: dict[str, Any]) -> torch.Tensor:
    stats_tracker.denominator(n_tokens=mb["loss_mask"])
    stats_tracker.stat("n_tokens", logp=logprobs_T.detach())
    return sft_loss(logprobs_T, mb["loss_mask"])


def pair_loss(logprobs_T: torch.Tensor, entropy_T: torch.Tensor, mb: dict[str, Any]):
    assert len(mb["cu_seqlens"]) % 2 == 1, "a pair was torn"
    return loss_fn(logprobs_T, entropy_T, mb)


def work(engine: TrainEngine, folder: Path) -> dict[str, Any]:
    """Everything a trainer asks of an engine, but to be connected to another one."""
    stats_tracker.export()
    batch = make_batch()
    found: dict[str, Any] = {"forward": engine.forward_batch(batch)}
    found["entropy"] = engine.forward_batch(batch, with_entropy=True)[..., 1]
    found["packed"] = engine.train().eval().forward(batch)
    engine.optimizer_zero_grad()
    with stats_tracker.scope("job"):
        found["eval"] = engine.eval_batch(batch, loss_fn, num_loss_tokens).item()
        found["step"] = engine.train_batch(batch, loss_fn, num_loss_tokens)
    found["stats"] = stats_tracker.export("job")
    engine.step_lr_scheduler()
    engine.offload()
    engine.onload()
    found["one_row"] = engine.train_batch(make_batch(2, (6,)), loss_fn, num_loss_tokens)
    engine.set_version(3)
    write = engine.capture()
    pairs = make_batch(1, (5, 9, 3, 7, 12, 2))
    found["pairs"] = engine.train_batch(pairs, pair_loss, num_loss_tokens, rows_per_unit=2)
    engine.set_version(4)
    write(folder / "dcp")  # the state of before, after a step more
    engine.load(SaveLoadMeta(str(folder / "dcp"), weight_format="dcp", with_optim=True))
    found["version"] = engine.get_version()
    found["again"] = engine.train_batch(pairs, pair_loss, num_loss_tokens, rows_per_unit=2)
    engine.save(SaveLoadMeta(str(folder / "hf"), weight_format="hf"))
    return found
