"""`backend`, `scheduling_*`: which layouts a config may ask for, how many processes these are."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import complaint, load

REF = ("actor.kl_ctl=0.1", "ref={}")
SHARED = "ref.scheduling_strategy={type: colocation, target: actor}"


def test_processes_of_each_role(tmp_path: Path) -> None:
    def count(*overrides: str) -> dict[str, int]:
        return load(tmp_path, "ppo", *overrides).num_processes()

    assert count() == {"actor": 0}
    assert count("scheduler.type=ray") == {"actor": 1}
    assert count("actor.backend=fsdp:d2c2t2") == {"actor": 8}
    assert count("actor.backend=archon:d4e2") == {"actor": 4}
    assert count("actor.backend=archon:d2p2e2") == {"actor": 4}
    assert count(*REF, "actor.backend=archon:d2") == {"actor": 2, "ref": 2}
    assert count(*REF, "actor.backend=archon:d2", SHARED) == {"actor": 2, "ref": 0}


def test_replicas_are_a_part_of_the_layout(tmp_path: Path) -> None:
    actor = ("actor.backend=archon:d4", "actor.archon.num_replicas=2")
    config = load(tmp_path, "ppo", *REF, *actor)
    assert config.ref.engine_config(config.actor).archon.num_replicas == 2
    config = load(tmp_path, "ppo", *REF, *actor, "ref.backend=archon:d1")
    assert config.ref.engine_config(config.actor).archon.num_replicas == 1


@pytest.mark.parametrize(
    ("backend", "num_servers", "num_ranks"),
    [("native:d1", 1, 1), ("native:t4", 1, 4), ("native:d3", 3, 1), ("native:d2t2", 2, 2)],
)
def test_servers_and_their_ranks(tmp_path, backend: str, num_servers: int, num_ranks: int) -> None:
    config = load(tmp_path, "ppo", f"rollout.backend={backend}", "native.threads=3")
    assert config.rollout.num_servers == num_servers
    assert config.rollout.tensor_parallel == num_ranks
    job = config.server_job()
    assert (job.role, job.replicas) == ("rollout", num_servers)
    assert job.spec_of(num_servers - 1).cpu == 3 * num_ranks
    counts = [job.num_gpus_of(0, has_gpus=has_gpus) for has_gpus in (True, False)]
    assert counts == [num_ranks, 0]


def test_what_a_server_needs_can_be_said(tmp_path) -> None:
    specs = "rollout.scheduling_spec=[{cpu: 8, mem: 64}, {gpu: 0}]"
    job = load(tmp_path, "ppo", "rollout.backend=native:d2", specs).server_job()
    assert [(spec.cpu, spec.mem) for spec in job.tasks] == [(8, 64), (1, None)]
    assert [job.num_gpus_of(index, has_gpus=True) for index in range(2)] == [1, 0]


def test_several_servers_may_be_batch_invariant(tmp_path: Path) -> None:
    load(tmp_path, "ppo", "rollout.backend=native:d2", "native.batch_invariant=true")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.backend=native:d2p2"], "rollout.backend 'native:d2p2' cannot run in this"),
        (
            ["rollout.backend=native:d2", "actor.weight_update_mode=ipc"],
            "actor.weight_update_mode must be shm, disk, delta or xccl when rollout.backend is "
            "'native:d2'",
        ),
        (["rollout.backend=native:d1t2p2"], "rollout.backend 'native:d1t2p2' cannot run in this"),
        (["rollout.backend=vllm:d2t2"], "rollout.backend 'vllm:d2t2' cannot run in this version"),
        (
            ["actor.backend=fsdp:d2p2"],
            "actor.backend: fsdp has no pipeline parallelism ('fsdp:d2p2'): remove p, or use",
        ),
        (
            ["actor.backend=archon:d2p2", "actor.use_lora=true"],
            "actor.use_lora cannot be cut by t or p: use d or c instead",
        ),
        (
            ["actor.backend=archon:d2p2", "actor.enable_tree_training=true"],
            "actor.enable_tree_training computes a tree on one rank: use d alone",
        ),
        (
            ["actor.backend=archon:d3", "actor.archon.num_replicas=2"],
            "actor.archon.num_replicas must divide the d3 of backend 'archon:d3'",
        ),
        (
            ["actor.backend=archon:d2", "actor.fsdp.num_replicas=2"],
            "actor.fsdp.num_replicas needs backend fsdp (backend is 'archon:d2')",
        ),
        (["actor.archon.num_replicas=0"], "actor.archon.num_replicas must be at least 1"),
        (["actor.backend=archon:(attn:d4t2|ffn:t4e2)"], "ffn takes t1 or t2"),
        (
            ["actor.backend=archon:d2t2", "actor.enable_tree_training=true"],
            "actor.enable_tree_training computes a tree on one rank: use d alone",
        ),
        (
            ["actor.backend=archon:d2", "actor.weight_update_mode=direct"],
            "actor.weight_update_mode must be shm, disk, delta or xccl (backend 'archon:d2' has 2 "
            "ranks)",
        ),
        (
            ["scheduler.type=ray", "actor.weight_update_mode=ipc"],
            "actor.weight_update_mode must be shm, disk, delta or xccl when scheduler.type is ray",
        ),
        (
            ["actor.backend=archon:d2t2", "actor.batch_invariant=true"],
            "actor.batch_invariant needs one rank (backend 'archon:d2t2' has 4 ranks)",
        ),
        (
            ["actor.backend=archon:d2", "actor.scheduling_spec=[{cpu: 1}, {cpu: 1}, {cpu: 1}]"],
            "actor.scheduling_spec must have one entry, or one for each of the 2 ranks",
        ),
        (
            [*REF, "ref.scheduling_spec=[{cpu: 1}, {cpu: 1}]"],
            "ref.scheduling_spec must have one entry, or one for each of the 1 ranks",
        ),
        (
            ["rollout.backend=native:d3", "rollout.scheduling_spec=[{cpu: 1}, {cpu: 1}]"],
            "rollout.scheduling_spec must have one entry, or one for each of the 3 servers",
        ),
        (["actor.scheduling_spec=[{gpus: 1}]"], "actor.scheduling_spec.gpus: unknown key; did you"),
        (["actor.scheduling_spec=[{cpu: 0}]"], "actor.scheduling_spec.cpu must be at least 1"),
        (
            [*REF, "ref.scheduling_strategy={type: colocation}"],
            "ref.scheduling_strategy.target must name the role to share processes with",
        ),
        (
            [*REF, "ref.scheduling_strategy={type: colocation, target: critic}"],
            "ref.scheduling_strategy.target must be a model with processes of its own: ['actor']",
        ),
        (
            [*REF, "actor.backend=archon:d2", "ref.backend=archon:d1", SHARED],
            "ref.backend must have as many ranks as actor.backend (2), whose processes it shares",
        ),
        (
            ["rollout.backend=native:d1t2", "actor.weight_update_mode=direct"],
            "actor.weight_update_mode must be shm, disk, delta or xccl when rollout.backend is "
            "'native:d1t2'",
        ),
        (
            ["rollout.backend=native:d1t2", "native.batch_invariant=true"],
            "native.batch_invariant must be false when rollout.backend is 'native:d1t2'",
        ),
    ],
)
def test_layouts_that_cannot_run(tmp_path: Path, overrides: list[str], says: str) -> None:
    assert says in complaint(tmp_path, "ppo", *overrides)
