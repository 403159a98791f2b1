"""The worker processes that a config asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import load

from areal.infra.jobs import all_jobs, num_processes, server_job

REF = ("actor.kl_ctl=0.1", "ref={}")
SHARED = "ref.scheduling_strategy={type: colocation, target: actor}"


def test_processes_of_each_role(tmp_path: Path) -> None:
    def count(*overrides: str) -> dict[str, int]:
        return num_processes(load(tmp_path, "ppo", *overrides))

    assert count() == {"actor": 0}
    assert count("scheduler.type=ray") == {"actor": 1}
    assert count("actor.backend=fsdp:d2c2t2") == {"actor": 8}
    assert count("actor.backend=archon:d4e2") == {"actor": 4}
    assert count("actor.backend=archon:d2p2e2") == {"actor": 4}
    assert count(*REF, "actor.backend=archon:d2") == {"actor": 2, "ref": 2}
    assert count(*REF, "actor.backend=archon:d2", SHARED) == {"actor": 2, "ref": 0}


@pytest.mark.parametrize(
    ("overrides", "roles"),
    [
        (["actor.backend=archon:d2"], ["actor", "rollout"]),
        (["rollout.workers=3"], ["rollout", "rollout_worker"]),
        ([*REF, "scheduler.type=ray", SHARED], ["actor", "rollout"]),
    ],
)
def test_a_job_for_each_role_with_processes(tmp_path: Path, overrides, roles) -> None:
    assert [job.role for job in all_jobs(load(tmp_path, "ppo", *overrides))] == roles


def test_an_offline_trainer_has_no_servers(tmp_path: Path) -> None:
    config = load(tmp_path, "dpo", "actor.backend=archon:d2")
    assert [(job.role, job.replicas) for job in all_jobs(config)] == [("actor", 2), ("ref", 2)]


@pytest.mark.parametrize(
    ("backend", "num_servers", "num_ranks"),
    [("native:d1", 1, 1), ("native:t4", 1, 4), ("native:d3", 3, 1), ("native:d2t2", 2, 2)],
)
def test_servers_and_their_ranks(tmp_path, backend: str, num_servers: int, num_ranks: int) -> None:
    config = load(tmp_path, "ppo", f"rollout.backend={backend}", "native.threads=3")
    assert config.rollout.num_servers == num_servers
    assert config.rollout.tensor_parallel == num_ranks
    job = server_job(config)
    assert (job.role, job.replicas) == ("rollout", num_servers)
    assert job.spec_of(num_servers - 1).cpu == 3 * num_ranks
    counts = [job.num_gpus_of(0, has_gpus=has_gpus) for has_gpus in (True, False)]
    assert counts == [num_ranks, 0]


def test_what_a_server_needs_can_be_said(tmp_path) -> None:
    specs = "rollout.scheduling_spec=[{cpu: 8, mem: 64}, {gpu: 0}]"
    job = server_job(load(tmp_path, "ppo", "rollout.backend=native:d2", specs))
    assert [(spec.cpu, spec.mem) for spec in job.tasks] == [(8, 64), (1, None)]
    assert [job.num_gpus_of(index, has_gpus=True) for index in range(2)] == [1, 0]
