"""What a server and models on one device must be able to do: leave it, and wait for their turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.checks import require

if TYPE_CHECKING:
    from areal.api.config.experiment import PPOConfig

_KEY = "rollout.scheduling_strategy.target"


def check_turns(config: PPOConfig) -> None:
    """ValueError when `rollout` shares devices and cannot; nothing when it has its own."""
    target = config.rollout.scheduling_strategy.target
    if target is None:
        return
    models = config.models()
    owners = [role for role, model in models.items() if model.scheduling_strategy.target is None]
    require(target in owners, f"{_KEY} must be a model with devices of its own: {owners}", target)
    in_turns = f"when {_KEY} is {target!r}"
    _check_server(config, target, in_turns)
    for role in config.models_in_turns():
        require(
            models[role].allocation.backend != "megatron",
            f"{role}.backend must be archon or fsdp {in_turns}: megatron does not leave a device",
            models[role].backend,
        )


def _check_server(config: PPOConfig, target: str, in_turns: str) -> None:
    rollout, mode = config.rollout, config.actor.weight_update_mode
    require(
        rollout.engine == "native",
        f"rollout.backend must be native {in_turns}: other servers do not leave a device",
        rollout.backend,
    )
    num_ranks = ModelAllocation.from_str(rollout.backend).parallel.world_size
    expected = config.num_ranks()[target]
    require(
        num_ranks == expected,
        f"rollout.backend must have as many ranks as {target}.backend ({expected}), whose devices "
        "it shares",
        num_ranks,
    )
    require(
        config.scheduler.type == "local",
        f"scheduler.type must be local {in_turns}: Ray gives servers devices of their own",
        config.scheduler.type,
    )
    require(
        mode in ("shm", "ipc", "disk", "delta"),
        f"actor.weight_update_mode must be shm, ipc, disk or delta {in_turns}: the server is a "
        "process of its own, and off the device when new weights come",
        mode,
    )
    require(
        rollout.recompute_kv,
        f"rollout.recompute_kv must be true {in_turns}: a cache does not outlive the turn",
        False,
    )
