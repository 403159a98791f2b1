"""What will a run without generation need, and how fast will it be? Trainers sft, rw and dpo.

load, assumed = offline_load(config, {"output": 400})
plan = plan_offline(config, {"actor": hf_config}, load_device("h200"), load, gpus=8)
plan.step_s, plan.memory, plan.loss
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from areal.api.config.experiment import BaseExperimentConfig
from areal.api.config.offline import SFTConfig
from areal.api.config.train_engine import TrainEngineConfig
from areal.planner.devices import Device
from areal.planner.engines import Trainer
from areal.planner.layouts import best_trainer, layout_name
from areal.planner.plan import (
    DeviceMemory,
    Loss,
    num_devices,
    offloaded_roles,
    too_large,
    trainers_of,
    training_memory,
)
from areal.planner.workload import Workload

_DEFAULT_PROMPT, _DEFAULT_OUTPUT = 256, 256
_LONGEST = 4  # times an average answer


@dataclass(frozen=True, slots=True)
class BetterLayout:
    name: str
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePlan:
    device: Device
    gpus: int
    load: Workload
    memory: list[DeviceMemory]
    train_s: float  # of a step: forward, backward, optimizer
    forward_s: float  # of models that are only asked
    again_s: float  # of `train_s`: blocks computed again in the backward pass
    better: BetterLayout | None  # the fastest layout of as many devices

    @property
    def step_s(self) -> float:
        return self.train_s + self.forward_s

    @property
    def tokens_per_s(self) -> float:
        return self.load.tokens / self.step_s

    @property
    def fits(self) -> bool:
        return not too_large(self.memory, self.device)

    @property
    def loss(self) -> Loss:
        """The largest."""
        again = Loss(
            "blocks computed again in the backward pass",
            self.again_s,
            "archon.ac_mode selective, or a smaller mb_spec.max_tokens_per_mb without "
            "gradient_checkpointing, if memory allows",
        )
        frozen = Loss(
            "log-probabilities of the reference model",
            self.forward_s,
            "a ref.backend with more ranks, or the actor's devices for both "
            "(ref.scheduling_strategy), so that no device waits",
        )
        return max(again, frozen, key=lambda loss: loss.device_s)


def offline_load(
    config: BaseExperimentConfig, given: Mapping[str, Any]
) -> tuple[Workload, list[str]]:
    """The workload of a config, and what had to be assumed. A pair is two samples of a prompt;
    `given` are values by field. No config says how long answers are."""
    assumed: list[str] = []

    def value(name: str, default: int, what: str) -> int:
        if given.get(name) is not None:
            return given[name]
        assumed.append(f"{what} of {default} tokens")
        return default

    longest = config.train_dataset.max_length
    prompt = value("prompt", longest // 2 if longest else _DEFAULT_PROMPT, "prompts")
    output = value("output", _DEFAULT_OUTPUT, "answers")
    assumed.append(f"answers of at most {_LONGEST * output:g} tokens")
    spread = given.get("spread")
    load = Workload(
        prompts=config.train_dataset.batch_size,
        samples=1 if isinstance(config, SFTConfig) else 2,
        prompt=max(prompt, 1),
        image=given.get("image") or 0,
        output=output,
        max_output=round(_LONGEST * output),
        **({} if spread is None else {"spread": spread}),
        steps=given.get("steps") or config.max_train_steps,
    )
    return load, assumed


def plan_offline(
    config: BaseExperimentConfig,
    hf_configs: Mapping[str, Mapping[str, Any]],
    device: Device,
    load: Workload,
    *,
    gpus: int | None = None,
) -> OfflinePlan:
    """ValueError if there are fewer GPUs than the layouts need."""
    trainers, groups = trainers_of(config, _actor(config), hf_configs, device)
    wanted = sum(num_devices(trainers, roles) for roles in groups)
    if gpus is not None and gpus < wanted:
        raise ValueError(
            f"--gpus: {gpus} are fewer than the {wanted} of the layouts: lower d of actor.backend"
        )
    actor = trainers["actor"]
    plain = replace(actor, training=replace(actor.training, recompute="none"))
    train_s = actor.train_s(load)
    forward_s = _forward_s(trainers, load)
    return OfflinePlan(
        device=device,
        gpus=gpus or wanted,
        load=load,
        memory=training_memory(trainers, groups, load, offloaded_roles(config)),
        train_s=train_s,
        forward_s=forward_s,
        again_s=train_s - plain.train_s(load),
        better=_better(actor, load, forward_s, (gpus or wanted) - (wanted - actor.layout.world)),
    )


def offline_trainers(
    config: BaseExperimentConfig, hf_configs: Mapping[str, Mapping[str, Any]], device: Device
) -> dict[str, Trainer]:
    """Models by role."""
    return trainers_of(config, _actor(config), hf_configs, device)[0]


def rows_step_s(trainers: Mapping[str, Trainer], load: Workload) -> float:
    """Of a step: training, and the models that are only asked."""
    return trainers["actor"].train_s(load) + _forward_s(trainers, load)


def _actor(config: BaseExperimentConfig) -> TrainEngineConfig:
    return cast(TrainEngineConfig, config.models()["actor"])


def _forward_s(trainers: Mapping[str, Trainer], load: Workload) -> float:
    """Of models that are only asked."""
    return sum(one.forward_s(load) for role, one in trainers.items() if role != "actor")


def _better(actor: Trainer, load: Workload, forward_s: float, devices: int) -> BetterLayout | None:
    best = best_trainer(actor, load, devices)
    if best is None:
        return None
    kept = " with archon.ac_mode full" if best.rank.mode == "full" else ""
    rate = load.tokens / (best.train_s(load) + forward_s)
    return BetterLayout(f"archon:{layout_name(best.layout)}{kept}", rate)
