"""Checkpoints of one layout resumed by others: weights, the optimizer's state, schedule, version.

A run of one rank is saved halfway and goes on. Every layout that resumes from there must end where
it ended; what a layout saves must be good for all others.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine.train.archon_world import make_batch, open_engine, train, weights_of
from gloo_ranks import run_ranks
from tiny import write_tiny_model

from areal.api.config.train_engine import OptimizerConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.train.archon import ArchonEngine

# Adam divides by the root of tiny moments: without them a resumed run takes other steps at once.
ADAM = OptimizerConfig(lr=1e-3, eps=1e-6, lr_scheduler_type="cosine", warmup_steps=2)
BODY = "engine.train.test_archon_checkpoint:resume_and_save"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3"))


def point(folder: Path | str) -> SaveLoadMeta:
    return SaveLoadMeta(path=str(folder), weight_format="dcp", with_optim=True)


def go_on(engine: ArchonEngine, steps: range) -> None:
    for step in steps:
        train(engine, make_batch(step))
        engine.step_lr_scheduler()


def resume_and_save(folder: str, scratch: str, backends: list[str]) -> list[list]:
    """Each layout goes on from what the one before it saved, at the same step."""
    found = []
    last = Path(scratch) / "one_rank"
    for backend in backends:
        engine = open_engine(folder, backend, optimizer=ADAM)
        engine.load(point(last))
        found.append([engine.get_version(), engine.optimizer.lr])
        last = Path(scratch) / backend.replace(":", "_")
        with ThreadPoolExecutor() as thread:
            written = thread.submit(engine.capture(), last)
            go_on(engine, range(2, 4))  # both talk to the other ranks at the same time
        written.result()
        weights = weights_of(engine)
        if dist.get_rank() == 0:
            torch.save(weights, last.with_suffix(".pt"))
    return found


def check(folder: str, scratch: Path, num_ranks: int, backends: list[str]) -> None:
    straight = open_engine(folder, "archon:d1", optimizer=ADAM)
    go_on(straight, range(2))
    straight.set_version(7)
    straight.save(point(scratch / "one_rank"))
    lr = straight.optimizer.lr
    go_on(straight, range(2, 4))
    expected = weights_of(straight)

    found = run_ranks(num_ranks, BODY, folder, str(scratch), backends, timeout_s=900)
    assert found == [[[7, pytest.approx(lr)]] * len(backends)] * num_ranks
    for backend in backends:
        got = torch.load((scratch / backend.replace(":", "_")).with_suffix(".pt"))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)

    resumed = open_engine(folder, "archon:d1", optimizer=ADAM)
    resumed.load(point(scratch / backends[-1].replace(":", "_")))
    go_on(resumed, range(2, 4))
    # One rank again: nothing was lost in the shards, not a bit.
    assert all(torch.equal(expected[name], weight) for name, weight in resumed.hf_weights())
    assert not list(scratch.glob(".*"))


def test_weights_loaded_without_the_optimizer_train_on(folder, tmp_path):
    weights = SaveLoadMeta(path=str(tmp_path / "weights"), weight_format="dcp")
    trained, other = (
        open_engine(folder, "archon:d1", optimizer=ADAM, dtype="bfloat16") for _ in range(2)
    )
    go_on(trained, range(2))
    trained.save(weights)
    other.load(weights)
    other.optimizer.write_back()  # as every step: the masters must not bring old weights back
    expected = weights_of(trained)
    assert all(torch.equal(expected[name], weight) for name, weight in other.hf_weights())


def test_one_rank_to_two_and_back(folder, tmp_path):
    check(folder, tmp_path, 2, ["archon:d2", "archon:t2", "archon:c2"])


def test_one_rank_to_a_pipeline_and_back(tmp_path):
    folder = str(write_tiny_model(tmp_path / "model", "qwen3", num_hidden_layers=4))
    # The last two are one layout under two names: it saves for one rank, and loads from shards.
    check(folder, tmp_path / "points", 2, ["archon:p2", "archon:d2", "archon:d1p2"])


@pytest.mark.slow
def test_one_rank_to_four_and_back(folder, tmp_path):
    check(folder, tmp_path, 4, ["archon:d2t2", "archon:d4", "archon:c2t2", "archon:d2c2"])


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_what_was_there(folder, tmp_path):
    (tmp_path / "point").mkdir()
    (tmp_path / "point" / "kept").write_text("old")
    found = run_ranks(2, "engine.train.test_archon_checkpoint:fail_to_save", folder, str(tmp_path))
    for full_disk, no_folder, damage in found:
        assert "File too large" in full_disk and "File exists" in no_folder
        assert "whole is damaged: rank1.bin: its checksum" in damage
    assert [path.name for path in tmp_path.rglob("*") if path.parent.name != "whole"] == [
        *("point", "whole", "kept")
    ]


def fail_to_save(folder: str, scratch: str) -> list[str]:
    """To a disk that is full for rank 1, and to where rank 0 can make no folder; and to load what
    is damaged in a file that one of them reads."""
    engine = open_engine(folder, "archon:d2", optimizer=ADAM)
    no_folder = _failed(engine.save, f"{scratch}/point/kept/inside")
    engine.save(point(f"{scratch}/whole"))
    if dist.get_rank() == 0:
        shard = Path(scratch) / "whole" / "rank1.bin"
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    dist.barrier()
    damage = _failed(engine.load, f"{scratch}/whole")
    if dist.get_rank() == 1:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, hard))
    return [_failed(engine.save, f"{scratch}/point"), no_folder, damage]


def _failed(act: Callable[[SaveLoadMeta], None], path: str) -> str:
    try:
        act(point(path))
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""
