"""`rollout.scheduling_strategy`: who shares a device with the server, and what cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import complaint, load

IN_TURNS = "rollout.scheduling_strategy={type: colocation, target: actor}"
BY_CRITIC = "rollout.scheduling_strategy={type: colocation, target: critic}"
REF = ("actor.kl_ctl=0.1", "ref={}")
BESIDE = "ref.scheduling_strategy={type: colocation, target: actor}"
TWO = ("actor.backend=archon:d2", "rollout.backend=native:d1t2")


@pytest.mark.parametrize(
    ("overrides", "models"),
    [
        ([], []),
        ([IN_TURNS], ["actor"]),
        ([IN_TURNS, *REF], ["actor", "ref"]),  # both in the controller
        ([IN_TURNS, *REF, *TWO], ["actor"]),  # each with processes of its own
        ([IN_TURNS, *REF, *TWO, BESIDE], ["actor", "ref"]),
        ([IN_TURNS, *TWO, "critic={}"], ["actor"]),
        ([BY_CRITIC, *TWO, "critic={backend: archon:d2}"], ["critic"]),
        ([IN_TURNS, "actor.backend=fsdp:d1", "actor.weight_update_mode=ipc"], ["actor"]),
    ],
)
def test_models_that_take_turns(tmp_path: Path, overrides: list[str], models: list[str]) -> None:
    assert load(tmp_path, "ppo", *overrides).time_shared_models() == models


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            [BY_CRITIC],
            "rollout.scheduling_strategy.target must be a model with devices of its own: "
            "['actor'], got 'critic'",
        ),
        (
            ["rollout.scheduling_strategy={type: colocation, target: ref}", *REF, BESIDE],
            "rollout.scheduling_strategy.target must be a model with devices of its own: ['actor']",
        ),
        (
            ["rollout.scheduling_strategy={type: colocation}"],
            "rollout.scheduling_strategy.target must name the role",
        ),
        (
            ["rollout.scheduling_strategy={type: colocation, target: actor, fork: true}"],
            "rollout.scheduling_strategy.fork: unknown key; colocated models share a process, a "
            "server has its own; remove it",
        ),
        (
            [IN_TURNS, "rollout.backend=vllm:d1"],
            "rollout.backend must be native when rollout.scheduling_strategy.target is 'actor': "
            "other servers cannot be offloaded, got 'vllm:d1'",
        ),
        ([IN_TURNS, "rollout.backend=sglang:d1"], "rollout.backend must be native when rollout"),
        (
            [IN_TURNS, "actor.backend=archon:d2"],
            "rollout.backend must have as many ranks as actor.backend (2), whose devices it shares",
        ),
        ([IN_TURNS, "actor.backend=megatron:d1"], "actor.backend must be archon or fsdp when"),
        ([IN_TURNS, "scheduler.type=ray"], "scheduler.type must be local when rollout"),
        (
            [IN_TURNS, "actor.weight_update_mode=direct"],
            "actor.weight_update_mode must be shm, ipc, disk or delta when rollout",
        ),
        (
            [IN_TURNS, "actor.weight_update_mode=xccl"],
            "actor.weight_update_mode must be shm, ipc, disk or delta when rollout",
        ),
        ([IN_TURNS, "rollout.recompute_kv=false"], "rollout.recompute_kv must be true when"),
    ],
)
def test_what_cannot_take_turns(tmp_path: Path, overrides: list[str], says: str) -> None:
    assert says in complaint(tmp_path, "ppo", *overrides)
