"""`backend`, `scheduling_*`: which layouts a config may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import complaint, load

REF = ("actor.kl_ctl=0.1", "ref={}")
SHARED = "ref.scheduling_strategy={type: colocation, target: actor}"


def test_replicas_are_a_part_of_the_layout(tmp_path: Path) -> None:
    actor = ("actor.backend=archon:d4", "actor.archon.num_replicas=2")
    config = load(tmp_path, "ppo", *REF, *actor)
    assert config.ref.engine_config(config.actor).archon.num_replicas == 2
    config = load(tmp_path, "ppo", *REF, *actor, "ref.backend=archon:d1")
    assert config.ref.engine_config(config.actor).archon.num_replicas == 1


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
        (
            ["actor.backend=fsdp:d2p2"],
            "actor.backend: fsdp has no pipeline parallelism ('fsdp:d2p2'): remove p, or use",
        ),
        (
            ["actor.backend=archon:d2p2", "actor.enable_tree_training=true"],
            "actor.enable_tree_training cannot be cut into pipeline stages: use d, t or c",
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
        (
            ["rollout.backend=native:d1t2", "native.dtype=fp8"],
            "native.dtype must be bfloat16 or null when rollout.backend is 'native:d1t2'",
        ),
    ],
)
def test_layouts_that_cannot_run(tmp_path: Path, overrides: list[str], says: str) -> None:
    assert says in complaint(tmp_path, "ppo", *overrides)
