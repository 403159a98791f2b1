"""What will this run need, how fast will it be, and what is in its way?

    setup = setup_of(config, {"actor": hf_config, ...}, load_device("h200"))
    plan = plan_setup(setup, load, gpus=8)
    plan.step_s, plan.memory, plan.losses

Devices: models on their ranks and servers have devices of their own where there are enough; models
with the same host share, and with fewer GPUs servers share those of the actor: at the same time, or
in turns (`rollout.scheduling_strategy`), where one is in host memory while the other computes.

Time of a step, with staleness above 0 and devices apart: the longest of generating a batch, of
training on one, and of the longest sample over the steps that it may take. Else generating and
training take turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from areal.api.config.experiment import BaseExperimentConfig, PPOConfig
from areal.api.config.ppo import FrozenModelConfig
from areal.api.config.train_engine import TrainEngineConfig
from areal.planner.devices import GIB, Device
from areal.planner.engines import Servers, Trainer, publish_s, servers_of, trainer_of
from areal.planner.memory import Memory
from areal.planner.shapes import UnplannableError
from areal.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Devices that hold the same processes."""

    name: str
    count: int
    processes: list[Memory]
    takes_turns: bool = False  # the processes are on the device one at a time

    @property
    def peak(self) -> float:
        peaks = [process.peak for process in self.processes]
        return max(peaks) if self.takes_turns else sum(peaks)


def too_large(
    memory: list[DeviceMemory], device: Device, tolerance: float = 1.0
) -> list[DeviceMemory]:
    """Those that would need more than a device has, times `tolerance`."""
    return [place for place in memory if place.peak > tolerance * device.memory_bytes]


@dataclass(frozen=True, slots=True)
class Loss:
    """Time of devices that trains nothing, per step."""

    what: str
    device_s: float
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a step's parts, each as if it had its devices for itself."""

    generate: float
    train: float  # forward passes, backward, optimizer, and the controller's work
    forward: float  # of it: passes without gradient
    again: float  # of it: blocks computed again in the backward pass
    publish: float  # the trainer hands its weights over
    stall: float  # servers stand still for them
    recompute: float  # of `generate`: the cache, after an update
    longest: float  # from the start of the longest sample to its reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    device: Device
    gpus: int
    training_devices: int
    generation_devices: int  # 0: servers use those of training
    teacher_devices: int = 0  # of servers; they wait but for the scores of a batch
    load: Workload
    times: Times
    memory: list[DeviceMemory]

    @property
    def shares_devices(self) -> bool:
        return self.generation_devices == 0

    @property
    def overlaps(self) -> bool:
        return self.load.staleness > 0 and not self.shares_devices

    @property
    def _trained_s(self) -> float:
        """The trainer's part of a step; on a CPU it leaves cores to servers that run beside it."""
        slower = self.device.training_beside if self.overlaps and self.is_cpu else 1.0
        return self.times.train / slower + self.times.publish

    @property
    def is_cpu(self) -> bool:
        return self.device.kind == "cpu"

    @property
    def step_s(self) -> float:
        times, trained = self.times, self._trained_s
        if not self.overlaps:
            return times.generate + self.load.longest_environment_s + trained + times.stall
        return max(times.generate + times.stall, trained, self._longest_s)

    @property
    def _longest_s(self) -> float:
        """A group that begins with version u is trained on by step u + staleness: all steps until
        then, less the last one's training, are as long as the longest sample."""
        return (self.times.longest + self._trained_s) / (self.load.staleness + 1)

    @property
    def bound(self) -> str:
        """What sets the pace."""
        if not self.overlaps:
            return "generation and training in turns"
        times = self.times
        parts = {
            "generation": times.generate + times.stall,
            "training": self._trained_s,
            "the longest samples": self._longest_s,
        }
        return max(parts, key=lambda part: parts[part])

    @property
    def training_idle(self) -> float:
        """Share of the step."""
        return 1 - self._trained_s / self.step_s

    @property
    def generation_idle(self) -> float:
        return 1 - (self.times.generate + self.times.stall) / self.step_s

    @property
    def staleness(self) -> float:
        """Versions between a token and its training, on average. Where training is behind, groups
        wait for their turn as long as they may; else only while they are generated."""
        if not self.overlaps:
            return 0.0
        if self.bound == "training":
            return float(self.load.staleness)
        mean_s = self.times.longest * self.load.output / self.load.max_output
        return min(float(self.load.staleness), mean_s / self.step_s)

    @property
    def tokens_per_s(self) -> float:
        """Trained, prompts included."""
        return self.load.tokens / self.step_s

    @property
    def duration_s(self) -> float | None:
        return None if self.load.steps is None else self.load.steps * self.step_s

    def too_large(self, tolerance: float = 1.0) -> list[DeviceMemory]:
        """Devices that would need more than they have, times `tolerance`."""
        return too_large(self.memory, self.device, tolerance)

    @property
    def losses(self) -> list[Loss]:
        """Largest first."""
        return sorted(_losses(self), key=lambda loss: -loss.device_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The engines of a run and how they work together; `plan_setup` adds the load."""

    trainers: dict[str, Trainer]  # by role
    groups: list[list[str]]  # roles that share devices
    servers: Servers
    asks_actor: bool  # log-probabilities before the update
    update_mode: str
    takes_turns: bool  # servers and models of the first group
    offloaded: frozenset[str] = frozenset()  # roles on their devices only while they are used
    teacher: Servers | None = None  # on devices of their own

    @property
    def training_devices(self) -> int:
        return sum(num_devices(self.trainers, roles) for roles in self.groups)

    @property
    def teacher_devices(self) -> int:
        return 0 if self.teacher is None else self.teacher.num_devices


def num_devices(trainers: Mapping[str, Trainer], roles: list[str]) -> int:
    """That these roles share."""
    return max(trainers[role].layout.world for role in roles)


def training_memory(
    trainers: Mapping[str, Trainer],
    groups: list[list[str]],
    load: Workload,
    offloaded: frozenset[str] = frozenset(),
) -> list[DeviceMemory]:
    return [
        DeviceMemory(
            " + ".join(roles),
            num_devices(trainers, roles),
            _processes({role: trainers[role].memory(load, role) for role in roles}, offloaded),
        )
        for roles in groups
    ]


def trainers_of(
    config: BaseExperimentConfig,
    actor: TrainEngineConfig,
    hf_configs: Mapping[str, Mapping[str, Any]],
    device: Device,
) -> tuple[dict[str, Trainer], list[list[str]]]:
    """Models by role, and the roles that share devices."""
    trainers: dict[str, Trainer] = {}
    groups: dict[str, list[str]] = {}
    for role, section in config.models().items():
        if isinstance(section, FrozenModelConfig):
            section = section.engine_config(actor)
        try:
            trainers[role] = trainer_of(section, hf_configs[role], device)
        except UnplannableError as error:
            raise UnplannableError(f"{role}.path: {error}") from None
        groups.setdefault(config.hosts()[role], []).append(role)
    return trainers, list(groups.values())


def setup_of(
    config: PPOConfig, hf_configs: Mapping[str, Mapping[str, Any]], device: Device
) -> Setup:
    """`hf_configs`: the config.json of each role."""
    trainers, groups = trainers_of(config, config.actor, hf_configs, device)
    actor = config.actor
    asks_actor = actor.recompute_logprob
    if actor.use_decoupled_loss:
        asks_actor = actor.prox_logp_method in ("recompute", "metrics")
    return Setup(
        trainers=trainers,
        groups=groups,
        servers=servers_of(config, hf_configs["actor"], device),
        asks_actor=asks_actor,
        update_mode=actor.weight_update_mode,
        takes_turns=config.rollout.scheduling_strategy.target is not None,
        offloaded=offloaded_roles(config),
        teacher=_teacher_of(config, hf_configs, device),
    )


def _teacher_of(
    config: PPOConfig, hf_configs: Mapping[str, Mapping[str, Any]], device: Device
) -> Servers | None:
    if not config.served_models():
        return None
    try:
        return servers_of(config.of_teacher(), hf_configs["teacher"], device)
    except UnplannableError as error:
        raise UnplannableError(f"teacher.path: {error}") from None


def offloaded_roles(config: BaseExperimentConfig) -> frozenset[str]:
    return frozenset(role for role, model in config.models().items() if model.offload)


def plan_setup(setup: Setup, load: Workload, *, gpus: int | None = None) -> Plan:
    """ValueError if there are fewer GPUs than the layouts need."""
    servers, training, teacher = setup.servers, setup.training_devices, setup.teacher
    wanted = training + (0 if setup.takes_turns else servers.num_devices) + setup.teacher_devices
    gpus = wanted if gpus is None else gpus
    if teacher is not None and gpus < wanted:
        raise UnplannableError(
            f"--gpus: {gpus} are fewer than the {wanted} of the layouts, {setup.teacher_devices} "
            "of them for the servers of the teacher; devices that these share are not planned"
        )
    has_own = not setup.takes_turns and gpus >= wanted
    if gpus < training or (not has_own and not setup.takes_turns and training > 1):
        raise ValueError(
            f"--gpus: {gpus} are fewer than the {wanted} of the layouts (training {training}, "
            f"servers {servers.num_devices}): lower d of actor.backend or rollout.backend"
        )
    memory = training_memory(setup.trainers, setup.groups, load, setup.offloaded)
    if has_own:
        memory.append(DeviceMemory("rollout", servers.num_devices, [servers.memory("rollout")]))
    else:
        beside = 0.0 if setup.takes_turns else _held(memory[0])
        servers = replace(servers, rank=replace(servers.rank, reserved_bytes=beside))
        memory[0] = _with_server(memory[0], servers.memory("rollout"), setup.takes_turns)
    if teacher is not None:
        memory.append(DeviceMemory("teacher", teacher.num_devices, [teacher.memory("teacher")]))
    return Plan(
        device=servers.rank.device,
        gpus=gpus,
        training_devices=training,
        generation_devices=servers.num_devices if has_own else 0,
        teacher_devices=setup.teacher_devices,
        load=load,
        times=_times(setup, servers, load, gpus),
        memory=memory,
    )


def _processes(memory: dict[str, Memory], offloaded: frozenset[str]) -> list[Memory]:
    """Of the models of one host. Offloaded ones are there one at a time, while the others hold
    weights and optimizer but do not compute: what that leaves of their peaks need not be counted
    again."""
    kept = [process for role, process in memory.items() if role not in offloaded]
    in_turn = [role for role in memory if role in offloaded]
    if not in_turn or len(memory) == 1:
        return list(memory.values())
    free = sum(process.peak - _held_by(process) for process in kept)
    phases = {role: {role: max(memory[role].peak - free, 0.0)} for role in in_turn}
    return [*kept, Memory(" | ".join(in_turn), phases)]


def _held(place: DeviceMemory) -> float:
    """What training has taken when a server starts."""
    return sum(map(_held_by, place.processes))


def _held_by(process: Memory) -> float:
    """Weights and optimizer."""
    parts = process.phases[process.peak_phase]
    held = ("weights", "gathered", "optimizer", "libraries")
    return sum(parts.get(part, 0.0) for part in held)


def _with_server(place: DeviceMemory, server: Memory, takes_turns: bool) -> DeviceMemory:
    processes = [*place.processes, server]
    if takes_turns and len(place.processes) > 1:
        # Models of one host compute one after the other, but stay on the device together.
        name = " + ".join(process.process for process in place.processes)
        phases = {"all": {process.process: process.peak for process in place.processes}}
        processes = [Memory(name, phases), server]
    return replace(
        place, name=f"{place.name} + rollout", processes=processes, takes_turns=takes_turns
    )


def _times(setup: Setup, servers: Servers, load: Workload, gpus: int) -> Times:
    actor, device = setup.trainers["actor"], servers.rank.device
    forward = actor.forward_s(load) if setup.asks_actor else 0.0
    train = actor.train_s(load)
    for role, trainer in setup.trainers.items():
        if role != "actor":
            forward += trainer.forward_s(load)
        if role == "critic":
            train += trainer.train_s(load)
    if setup.teacher is not None:
        forward += setup.teacher.score_s(load)
    plain = replace(actor, training=replace(actor.training, recompute="none"))
    host = device.sample_us * load.num_samples * 1e-6
    generate = servers.steady_s(load) if load.staleness else servers.whole_s(load)
    shape, item = actor.training.shape, actor.training.itemsize
    return Times(
        generate=generate,
        train=forward + train + host,
        forward=forward,
        again=actor.train_s(load) - plain.train_s(load),
        publish=publish_s(setup.update_mode, shape, item, device, gpus),
        stall=servers.stall_s(),
        recompute=servers.recompute_s(load),
        longest=servers.latency_s(load, load.max_output) + load.longest_environment_s,
    )


def _losses(plan: Plan) -> list[Loss]:
    times, load, step = plan.times, plan.load, plan.step_s
    training, generation = plan.training_devices, plan.generation_devices
    found = [
        Loss(
            "blocks computed again in the backward pass",
            times.again * training,
            "archon.ac_mode selective, or a smaller mb_spec.max_tokens_per_mb without "
            "gradient_checkpointing, if memory allows",
        ),
        Loss(
            "log-probabilities of frozen weights",
            times.forward * training,
            "actor.prox_logp_method loglinear or reuse_train_logp, or no reference model",
        ),
        Loss(
            "weights on their way to the servers",
            times.publish * training + times.stall * generation,
            "actor.weight_update_mode xccl (ipc on one GPU)",
        ),
        Loss(
            "caches of running requests computed again after each update",
            times.recompute * generation,
            "rollout.recompute_kv false: the rest of a sample then reads a cache of older weights",
        ),
    ]
    if plan.shares_devices:
        return found
    waits = "rollout.max_head_offpolicyness 1 or more: generation then goes on while training"
    more = "move GPUs to generation" if load.staleness else waits
    if plan.bound == "the longest samples":
        more = "a larger rollout.max_head_offpolicyness: a long sample may then take more steps"
    fewer = "move GPUs to training" if load.staleness else waits
    found.append(Loss("training waits for generation", plan.training_idle * step * training, more))
    found.append(Loss("servers wait for training", plan.generation_idle * step * generation, fewer))
    return found


def refusal(memory: list[DeviceMemory], device: Device, tolerance: float = 1.0) -> str | None:
    """Why the run cannot fit, with the numbers; None if it does."""
    for place in too_large(memory, device, tolerance):
        process = max(place.processes, key=lambda process: process.peak)
        parts = sorted(process.phases[process.peak_phase].items(), key=lambda part: -part[1])
        largest = ", ".join(f"{part} {size / GIB:.1f}" for part, size in parts[:3])
        return (
            f"{place.name} needs {place.peak / GIB:.1f} GiB of each {device.name}, which has "
            f"{device.memory_bytes / GIB:.1f} GiB (at its peak, {process.process} in "
            f"{process.peak_phase}: {largest}): {_remedy(place, parts[0][0])}"
        )
    return None


_REMEDIES = {
    "activations": "set actor.gradient_checkpointing (with archon.ac_mode full for the least), or "
    "lower mb_spec.max_tokens_per_mb",
    "staged": "use actor.weight_update_mode shm, disk or delta",
    "cache": "lower native.num_pages or native.max_running",
    "head": "lower actor.logprobs_chunk_size",
    "graphs": "lower native.max_running",
}


def _remedy(place: DeviceMemory, part: str) -> str:
    role = place.processes[0].process
    if place.name == "rollout":
        role = "rollout"
    sharded = f"shard it over more ranks (d, t or p of {role}.backend)"
    return f"{_REMEDIES[part]}, or {sharded}" if part in _REMEDIES else sharded
