"""`areal launch ray` joins, checks and trains on a real Ray cluster of two machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray_cluster import ray_cluster
from tiny_run import query

from areal.api.scheduler_api import GPUAllocationError, Job
from areal.cli.demo import make_model
from areal.cli.main import main

RECIPE = str(Path(__file__).parents[2] / "examples" / "sft" / "arithmetic_sft.yaml")


@pytest.fixture(scope="module")
def address():
    with ray_cluster() as cluster:
        for _ in range(2):
            cluster.add_node(num_cpus=1, num_gpus=0)
        yield cluster.address


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("ray")
    make_model(root / "tiny_model")
    return root


def launch(root: Path, address: str, trial: str, *overrides: str, join_timeout: int = 900) -> int:
    import ray

    argv = [
        "--address",
        address,
        "--join-timeout",
        str(join_timeout),
        RECIPE,
        f"trial_name={trial}",
    ]
    argv += [f"cluster.fileroot={root}", f"actor.path={root / 'tiny_model'}"]
    argv += ["train_dataset.batch_size=8", "train_dataset.dataset_kwargs={num_rows: 64}"]
    argv += ["valid_dataset=null", "evaluator={}", "total_train_steps=2"]
    try:
        return main(["launch", "ray", *argv, *overrides])
    finally:
        ray.shutdown()


def test_machines_that_do_not_come(root, address, capsys):
    assert launch(root, address, "few", "cluster.n_nodes=3", join_timeout=2) == 1
    assert "2 of cluster.n_nodes=3 machines joined" in capsys.readouterr().err


def test_machines_that_are_too_small(root, address, capsys):
    assert launch(root, address, "big", "cluster.n_nodes=2", "actor.backend=archon:d4") == 1
    error = capsys.readouterr().err
    assert "actor" in error and "4 workers need 4 CPUs and the Ray cluster has 2" in error
    assert not (root / "arithmetic" / "big").exists()


def test_a_role_that_finds_no_room_beside_another(address, monkeypatch):
    import ray

    from areal.infra.scheduler.ray import RayScheduler

    monkeypatch.setenv("RAY_ADDRESS", address)
    scheduler = RayScheduler()
    try:
        scheduler.create_workers(Job("actor", 2))
        says = "rollout.*its 1 workers need 1 CPUs beside the 2 of other roles.* cluster has 2"
        with pytest.raises(GPUAllocationError, match=says):
            scheduler.create_workers(Job("rollout", 1))
        scheduler.delete_workers()
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_machines_that_are_alike_and_reach_each_other(address, capsys):
    assert main(["validate", "--cluster", address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("ok   machine ")]) == 2


@pytest.mark.slow
def test_a_cluster_that_is_not_there(capsys):
    assert main(["validate", "--cluster", "127.0.0.1:1"]) == 1
    assert "no Ray head answers at 127.0.0.1:1" in capsys.readouterr().out


def test_two_machines_train_one_model(root, address):
    """One CPU each: the two ranks cannot be on the same one."""
    assert launch(root, address, "two", "cluster.n_nodes=2", "actor.backend=archon:d2") == 0
    run = root / "arithmetic" / "two"
    assert len(query(run, "SELECT step FROM steps WHERE step >= 0")) == 2
    assert (run / "model" / "model.safetensors").is_file()
    assert {"actor0.log", "actor1.log"} <= {file.name for file in (run / "logs").iterdir()}


def test_an_actor_logs_into_the_run_and_survives_a_question_for_its_stacks(tmp_path):
    """Without Ray: the actor's class in a process of its own, as Ray would make it."""
    (tmp_path / "logs").mkdir()
    stacks = tmp_path / "logs" / "stacks.txt"
    env = {**os.environ, "AREAL_RUN_FOLDER": str(tmp_path), "AREAL_STACKS": str(stacks)}
    subprocess.run([sys.executable, "-c", ASKED_ACTOR], env=env, check=True, timeout=900)
    assert (tmp_path / "logs" / "actor0.log").read_text() == "alive\n"
    assert "most recent call first" in stacks.read_text()


ASKED_ACTOR = """
import os, signal
from areal.infra.scheduler.ray import _RayWorker
_RayWorker(os.getcwd(), "actor/0")
os.kill(os.getpid(), signal.SIGUSR1)
print("alive", flush=True)
"""


def test_the_port_where_ranks_meet_is_held_until_they_do(tmp_path):
    """Also without Ray: another program that opens ports cannot get it in between."""
    subprocess.run([sys.executable, "-c", FIRST_RANK], cwd=tmp_path, check=True, timeout=900)


FIRST_RANK = """
import os, socket
from urllib.parse import urlsplit
from areal.infra.scheduler.ray import _RayWorker
worker = _RayWorker(os.getcwd(), "actor/0")
meeting = worker.listen()
assert worker.listen() == meeting, "of a second role"
place = urlsplit(meeting)
try:
    socket.socket().bind((place.hostname, place.port))
except OSError:
    worker.meet_at(meeting)
else:
    raise AssertionError("it is free")
os.environ.update(RANK="0", WORLD_SIZE="1")
from areal.engine.train.process_group import join_ranks
join_ranks()
import torch.distributed as dist
assert dist.get_world_size() == 1
dist.destroy_process_group()
"""
