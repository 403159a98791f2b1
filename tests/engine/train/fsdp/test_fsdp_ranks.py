"""FSDPEngine on several ranks gives what one rank gives: real processes joined by gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_world import (
    FT_SPEC,
    PLAIN_SGD,
    assert_close,
    loss_fn,
    loss_tokens,
    make_batch,
    open_engine,
    weights_of,
)
from gloo_ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny import write_tiny_model

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.train_engine import (
    FSDPEngineConfig,
    MicroBatchSpec,
    OptimizerConfig,
    TrainEngineConfig,
)
from areal.api.io_struct import SaveLoadMeta, WeightUpdateMeta
from areal.engine.train.fsdp.engine import FSDPEngine
from areal.utils.data import select_rows

MODULE = "engine.train.fsdp.test_fsdp_ranks"
LORA = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8.0}
ALL, UNEVEN = [[0, 1, 2, 3, 4, 5]], [[0, 2, 3, 4], [1, 5]]  # rows of each data-parallel place


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def untied(tmp_path_factory) -> Path:
    """Another family: biases, no norms of heads, a head of its own."""
    folder = tmp_path_factory.mktemp("untied")
    return write_tiny_model(folder, "qwen2", tie_word_embeddings=False)


def open_on_ranks(
    path: str, backend: str, *, offload: bool = False, num_replicas: int = 1, **changes
) -> FSDPEngine:
    options = {"optimizer": PLAIN_SGD, "mb_spec": MicroBatchSpec(max_tokens_per_mb=15), **changes}
    config = TrainEngineConfig(
        path=path,
        backend=backend,
        fsdp=FSDPEngineConfig(offload_params=offload, num_replicas=num_replicas),
        **options,
    )
    engine = FSDPEngine(config)
    engine.create_process_group(ModelAllocation.from_str(backend).parallel)
    engine.initialize(FT_SPEC)
    return engine


def step_of_each(paths: dict, out: str, cases: list[tuple[str, str, list, dict]]) -> list[Any]:
    """On each rank: one step for every case; rank 0 writes the weights after it."""
    reports = []
    for number, (model, backend, rows_of, changes) in enumerate(cases):
        engine = open_on_ranks(paths[model], backend, **changes)
        rows = rows_of[engine.data_parallel_rank]
        mine = select_rows(make_batch(), rows)
        before = engine.forward_batch(mine)
        stats = engine.train_batch(mine, loss_fn, loss_tokens)
        weights = weights_of(engine)
        assert (dist.get_rank() == 0) == bool(weights)
        if weights:
            save_file(weights, f"{out}/{number}")
        reports.append([stats, rows, before.tolist(), engine.forward_batch(mine).tolist()])
    return reports


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (
            2,
            [
                ("tied", "fsdp:d2", UNEVEN, {}),
                ("tied", "fsdp:d2", [*ALL, []], {"gradient_checkpointing": True}),
                ("tied", "fsdp:d2", UNEVEN, {"offload": True}),
                ("tied", "fsdp:d2", UNEVEN, LORA),
                ("tied", "fsdp:c2", ALL, {}),
                ("tied", "fsdp:c2", ALL, {"gradient_checkpointing": True}),
                ("tied", "fsdp:t2", ALL, {}),
                ("untied", "fsdp:t2", ALL, {"gradient_checkpointing": True}),
            ],
        ),
        pytest.param(
            4,
            [
                ("tied", "fsdp:d2c2", UNEVEN, {}),
                ("tied", "fsdp:d2t2", UNEVEN, {}),
                ("untied", "fsdp:c2t2", ALL, {}),
                ("tied", "fsdp:d4", [[0, 2], [4], [1], [3, 5]], {"num_replicas": 2}),
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_equal_one_rank(folder, untied, tmp_path, world_size: int, cases: list):
    paths = {"tied": str(folder), "untied": str(untied)}
    by_rank = run_ranks(
        world_size, f"{MODULE}:step_of_each", paths, str(tmp_path), cases, timeout_s=900
    )
    batch = make_batch()
    for number, (model, _, _, changes) in enumerate(cases):
        lora = changes if changes == LORA else {}
        one = open_engine(paths[model], optimizer=PLAIN_SGD, **lora)
        before, stats = one.forward_batch(batch), one.train_batch(batch, loss_fn, loss_tokens)
        after = one.forward_batch(batch)
        for rank in range(world_size):
            rank_stats, rows, *outputs = by_rank[rank][number]
            assert rank_stats == pytest.approx(stats, rel=1e-5)
            for got, expected in zip(outputs, (before, after), strict=True):
                got = torch.tensor(got).view_as(expected[rows])
                torch.testing.assert_close(got, expected[rows], rtol=1e-5, atol=1e-5)
        assert_close(load_file(tmp_path / str(number)), weights_of(one), atol=1e-6)


class Receiver:
    """The part of an inference engine that receives weights, or refuses them."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses

    def update_weights(self, meta, named_tensors) -> None:
        self.names = []
        for name, _ in named_tensors:
            self.names.append(name)
            if self.refuses:
                raise RuntimeError("receiver is broken")


def save_and_send(path: str, out: str) -> list[str]:
    engine = open_on_ranks(path, "fsdp:d2", optimizer=OptimizerConfig(lr=1e-2))
    mine = select_rows(make_batch(), UNEVEN[dist.get_rank()])
    engine.train_batch(mine, loss_fn, loss_tokens)
    engine.step_lr_scheduler()
    engine.set_version(5)
    engine.save(SaveLoadMeta(path=f"{out}/point", weight_format="dcp", with_optim=True))
    engine.save(SaveLoadMeta(path=f"{out}/hf", weight_format="hf"))
    receiver = Receiver()
    engine.connect_engine(receiver, WeightUpdateMeta(type="direct"))
    engine.update_weights(6)
    engine.connect_engine(Receiver(refuses=True), WeightUpdateMeta(type="direct"))
    try:
        engine.update_weights(7)
    except RuntimeError as error:
        failure = str(error)
    again = open_on_ranks(path, "fsdp:d2", optimizer=OptimizerConfig(lr=1e-2))
    again.load(SaveLoadMeta(path=f"{out}/point", weight_format="dcp", with_optim=True))
    again.train_batch(select_rows(make_batch(1), UNEVEN[dist.get_rank()]), loss_fn, loss_tokens)
    again.save(SaveLoadMeta(path=f"{out}/next", weight_format="hf"))
    return [failure, *(receiver.names if dist.get_rank() == 0 else [])]


def test_a_checkpoint_of_two_ranks_goes_on_on_one(folder, tmp_path):
    first, second = run_ranks(
        2, f"{MODULE}:save_and_send", str(folder), str(tmp_path), timeout_s=900
    )
    one = open_engine(folder)
    one.train_batch(make_batch(), loss_fn, loss_tokens)
    one.step_lr_scheduler()
    assert_close(weights_of(open_engine(tmp_path / "hf")), weights_of(one), atol=1e-5)
    resumed = open_engine(folder)
    resumed.load(SaveLoadMeta(str(tmp_path / "point"), weight_format="dcp", with_optim=True))
    assert resumed.get_version() == 5
    for engine in (one, resumed):
        engine.train_batch(make_batch(1), loss_fn, loss_tokens)
    assert_close(weights_of(resumed), weights_of(one), atol=1e-5)
    assert_close(weights_of(open_engine(tmp_path / "next")), weights_of(one), atol=1e-5)
    assert first[0] == "receiver is broken" and "rank 0" in second[0]
    assert first[1:] == list(weights_of(one))
