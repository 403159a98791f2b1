"""Archon on two worker processes does what it does in this one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine.train.archon_world import make_batch
from infra.archon_job import FT_SPEC, config_of, work
from safetensors.torch import load_file
from tiny import write_tiny_model

from areal.api.alloc_mode import ModelAllocation
from areal.api.scheduler_api import Job, SchedulingStrategy
from areal.engine.train.archon import ArchonEngine
from areal.infra.scheduler.local import LocalScheduler
from areal.infra.train_controller import TrainController

pytestmark = pytest.mark.usefixtures("forked_children")

ARCHON = "areal.engine.train.archon.ArchonEngine"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    engine = ArchonEngine(config_of(model))
    engine.initialize(FT_SPEC)
    return work(engine, folder), load_file(next((folder / "hf").glob("*.safetensors")))


def check(scheduler, model: Path, folder: Path, backend: str, expected, **archon) -> None:
    config = config_of(model, backend, **archon)
    layout = ModelAllocation.from_str(backend).parallel
    job = Job(role="actor", replicas=layout.world_size)
    actor = TrainController(scheduler, job, ARCHON, layout, config)
    shared = SchedulingStrategy("colocation", "actor")
    job = Job(role="ref", replicas=layout.world_size, scheduling_strategy=shared)
    ref = TrainController(scheduler, job, ARCHON, layout, config)
    try:
        actor.initialize(FT_SPEC)
        ref.initialize()
        found = work(actor, folder)
        numbers, weights = expected
        close = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(found["forward"], numbers["forward"], **close)
        # At a row's last token it is undefined.
        defined = make_batch()["attention_mask"].roll(-1, 1)
        defined[:, -1] = False
        torch.testing.assert_close(found["entropy"][defined], numbers["entropy"][defined], **close)
        torch.testing.assert_close(found["packed"], numbers["packed"], **close)
        for key in ("eval", "step", "one_row", "pairs", "again", "stats", "version"):
            assert found[key] == pytest.approx(numbers[key], rel=1e-4, abs=1e-5), key
        assert found["again"] == found["pairs"]  # the checkpoint brought the same state back
        saved = load_file(next((folder / "hf").glob("*.safetensors")))
        # Adam divides by the root of a squared gradient: where that is tiny, its rounding shows.
        torch.testing.assert_close(saved, weights, rtol=1e-4, atol=1e-4)
        # The reference model was not trained, though it lives in the same processes.
        torch.testing.assert_close(ref.forward_batch(make_batch()), numbers["forward"], **close)
    finally:
        ref.destroy()
        actor.destroy()


def test_two_ranks_as_one(model, expected, tmp_path):
    scheduler = LocalScheduler(tmp_path / "logs", gpus=[])
    check(scheduler, model, tmp_path, "archon:d2", expected)


def test_two_stages_as_one(model, expected, tmp_path):
    """The last stage has the statistics of losses: here it is on the first rank."""
    scheduler = LocalScheduler(tmp_path / "logs", gpus=[])
    check(scheduler, model, tmp_path, "archon:p2", expected, pp_schedule="ZBVZeroBubble")


@pytest.mark.slow
def test_four_ranks_two_stages(model, expected, tmp_path):
    """The last stage is on the last ranks."""
    scheduler = LocalScheduler(tmp_path / "logs", gpus=[])
    check(scheduler, model, tmp_path, "archon:d2p2", expected, num_replicas=2)


@pytest.mark.slow
def test_four_ranks_two_of_which_share_rows(model, expected, tmp_path):
    scheduler = LocalScheduler(tmp_path / "logs", gpus=[])
    check(scheduler, model, tmp_path, "archon:d2t2", expected)


@pytest.mark.slow
def test_two_ranks_by_ray(model, expected, tmp_path):
    ray = pytest.importorskip("ray", reason="scheduler.type=ray needs the extra `ray`")
    from areal.infra.scheduler.ray import RayScheduler

    try:
        check(RayScheduler(), model, tmp_path, "archon:d2", expected)
    finally:
        ray.shutdown()
