"""Checks of where models and servers run: processes, devices, and the way weights travel.

A combination that some engine, server or scheduler does not support is rejected when the config is
loaded, with the key to change. Jobs for a scheduler are made in infra/jobs.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.inference import (
    GenerationHyperparameters,
    InferenceEngineConfig,
)
from areal.api.config.inference_servers import (
    MAX_VLLM_LORA_RANK,
    NativeServerConfig,
)
from areal.api.config.ppo import FrozenModelConfig
from areal.api.config.run import ClusterSpecConfig, SchedulerConfig
from areal.api.config.section import require
from areal.api.config.train_engine import TrainEngineConfig, check_allocation, check_offload


class Experiment(Protocol):
    """What the checks read of the root of a config file."""

    cluster: ClusterSpecConfig
    scheduler: SchedulerConfig
    allocation_mode: str

    @property
    def actor(self) -> TrainEngineConfig: ...

    def models(self) -> dict[str, TrainEngineConfig | FrozenModelConfig]: ...
    def hosts(self) -> dict[str, str]: ...


class RLExperiment(Experiment, Protocol):
    gconfig: GenerationHyperparameters
    rollout: InferenceEngineConfig
    native: NativeServerConfig

    def time_shared_models(self) -> list[str]: ...


def check_models(config: Experiment) -> None:
    """Each rank has the devices it needs; colocated roles have equal numbers of ranks."""
    models, mode = config.models(), config.actor.weight_update_mode
    require(
        not config.scheduler.by_ray or mode in ("shm", "disk", "delta", "xccl"),
        "actor.weight_update_mode must be shm, disk, delta or xccl when scheduler.type is "
        f"{config.scheduler.type}",
        mode,
    )
    require(
        config.cluster.n_nodes == 1 or config.scheduler.by_ray,
        f"scheduler.type must be ray or slurm when cluster.n_nodes is {config.cluster.n_nodes}",
        config.scheduler.type,
    )
    owners = [role for role, model in models.items() if model.scheduling_strategy.target is None]
    for role, section in models.items():
        _check_num_specs(role, section, section.num_ranks, "ranks")
        if isinstance(section, FrozenModelConfig):
            kind, options = section.allocation.backend, config.actor.fsdp
            check_offload(f"{role}.offload", section.offload, kind, options)
        target = section.scheduling_strategy.target
        if target is None:
            continue
        others = [name for name in owners if name != role]
        require(
            target in others,
            f"{role}.scheduling_strategy.target must be a model with processes of its own: "
            f"{others}",
            target,
        )
        expected = models[target].num_ranks
        require(
            section.num_ranks == expected,
            f"{role}.backend must have as many ranks as {target}.backend ({expected}), whose "
            "processes it shares",
            section.num_ranks,
        )
    check_allocation(config.allocation_mode, "training", config.actor.backend)


def _check_num_specs(
    role: str,
    section: TrainEngineConfig | FrozenModelConfig | InferenceEngineConfig,
    count: int,
    workers: str,
) -> None:
    found = len(section.scheduling_spec)
    require(
        found in (0, 1, count),
        f"{role}.scheduling_spec must have one entry, or one for each of the {count} {workers} of "
        f"{section.backend!r}",
        f"{found} entries",
    )


def check_servers(config: RLExperiment) -> None:
    """The inference servers and rollout workers fit the models, the devices and each other."""
    rollout = config.rollout
    _check_num_specs("rollout", rollout, rollout.num_servers, "servers")
    mode = config.actor.weight_update_mode
    for modes, why in _weight_update_modes(config):
        *others, last = modes
        allowed = f"{', '.join(others)} or {last}" if others else last
        require(mode in modes, f"actor.weight_update_mode must be {allowed} {why}", mode)
    require(
        config.native.dtype != "fp8" or rollout.tensor_parallel == 1,
        f"native.dtype must be bfloat16 or null when rollout.backend is {rollout.backend!r}: one "
        "process computes a model in FP8",
        config.native.dtype,
    )
    require(
        not config.native.batch_invariant or rollout.tensor_parallel == 1,
        f"native.batch_invariant must be false when rollout.backend is {rollout.backend!r}, "
        "several processes",
        True,
    )
    require(
        not rollout.api_url or rollout.scheduling_strategy.target is None,
        "rollout.scheduling_strategy must be left out when rollout.api_url is set: the run does "
        "not place its servers",
        rollout.scheduling_strategy.target,
    )
    _check_adapters(config)
    _check_workers(config)
    _check_stock_server(config)
    _check_time_shared(config)
    check_allocation(config.allocation_mode, "inference", rollout.backend)


def check_teacher_servers(rollout: InferenceEngineConfig) -> None:
    """`rollout` as the teacher's servers see it."""
    _check_num_specs("teacher", rollout, rollout.num_servers, "servers")


def _weight_update_modes(config: RLExperiment) -> Iterator[tuple[tuple[str, ...], str]]:
    """The transports that each part of the placement supports, and which part it is."""
    rollout, num_nodes = config.rollout, config.cluster.n_nodes
    chosen = f"when rollout.backend is {rollout.backend!r}"
    if rollout.num_servers * rollout.ranks_per_server > 1:
        yield ("shm", "disk", "delta", "xccl"), f"{chosen}, several processes"
    if rollout.engine in ("vllm", "sglang"):
        yield ("shm", "disk", "xccl"), chosen
    if rollout.engine == "sglang" and rollout.pipeline_parallel > 1:
        yield ("shm", "disk"), f"{chosen}: its pipeline stages join no common process group"
    if rollout.use_lora and rollout.engine != "native":
        yield ("shm", "disk"), "when rollout.use_lora is true: adapters are loaded from a folder"
    if rollout.api_url:
        yield (
            ("disk",),
            "when rollout.api_url is set: its servers read weights from the run's folder",
        )
    if num_nodes > 1:
        shared = f"when cluster.n_nodes is {num_nodes}: memory is not shared between machines"
        yield ("disk", "delta", "xccl"), shared
    if rollout.scheduling_strategy.target is not None:
        reason = "the server is a separate process, and offloaded when new weights arrive"
        yield ("shm", "ipc", "disk", "delta"), f"{_when_time_shared(config)}: {reason}"


def _check_adapters(config: RLExperiment) -> None:
    rollout, actor = config.rollout, config.actor
    if not rollout.use_lora:
        return
    require(
        actor.use_lora,
        "rollout.use_lora must be false when actor.use_lora is: there is no adapter to send",
        True,
    )
    require(
        rollout.engine == "native" or not rollout.api_url,
        "rollout.use_lora must be false when rollout.api_url is set: servers that somebody else "
        "runs get whole weights",
        True,
    )
    require(
        rollout.engine != "native" or rollout.tensor_parallel == 1,
        "rollout.use_lora must be false when native servers have several devices: they get "
        f"adapters merged into the weights (rollout.backend: {rollout.backend!r})",
        True,
    )
    require(
        rollout.engine != "vllm" or actor.lora_rank <= MAX_VLLM_LORA_RANK,
        f"actor.lora_rank must be at most {MAX_VLLM_LORA_RANK} when vLLM serves the adapters "
        "(rollout.use_lora)",
        actor.lora_rank,
    )


def _check_workers(config: RLExperiment) -> None:
    if config.rollout.workers == 0:
        return
    agent, mode = config.rollout.agent, config.actor.weight_update_mode
    in_workers = "when rollout.workers is above 0"
    require(
        mode != "direct",
        f"actor.weight_update_mode must not be direct {in_workers}: they need a server",
        mode,
    )
    if agent.mode == "online":  # a router has the address, and passes on to the workers
        require(
            config.cluster.n_nodes == 1 or agent.host in ("0.0.0.0", "::"),
            f"rollout.agent.host must be 0.0.0.0 {in_workers} on several machines "
            "(cluster.n_nodes): each listens on its own",
            agent.host,
        )
        return
    require(
        agent.port == 0,
        f"rollout.agent.port must be 0 {in_workers}: each has a proxy of its own",
        agent.port,
    )
    require(
        agent.advertise_url is None,
        f"rollout.agent.advertise_url must be left out {in_workers}: each has a proxy of its own",
        agent.advertise_url,
    )


def _check_stock_server(config: RLExperiment) -> None:
    """Reject, not ignore, options that a stock server does not support."""
    rollout = config.rollout
    if rollout.engine == "native":
        return
    chosen = f"when rollout.backend is {rollout.backend!r}"
    require(
        rollout.recompute_kv,
        f"rollout.recompute_kv must be true {chosen}: requests that an update interrupts are sent "
        "again",
        False,
    )
    require(
        not config.native.batch_invariant,
        f"native.batch_invariant must be false {chosen}: the native server does not run",
        True,
    )
    if rollout.engine == "sglang":
        default = GenerationHyperparameters()
        for name in ("top_p", "top_k", "min_p"):
            value = getattr(config.gconfig, name)
            require(
                value == getattr(default, name),
                f"gconfig.{name} must be left out {chosen}: its log-probabilities ignore the "
                "truncation, so they are not those of the samples",
                value,
            )


_SHARED_DEVICES = "rollout.scheduling_strategy.target"


def _when_time_shared(config: RLExperiment) -> str:
    return f"when {_SHARED_DEVICES} is {config.rollout.scheduling_strategy.target!r}"


def _check_time_shared(config: RLExperiment) -> None:
    """Models and server can alternate on the devices of `target`; no-op without one."""
    rollout, models = config.rollout, config.models()
    target = rollout.scheduling_strategy.target
    if target is None:
        return
    owners = [role for role, model in models.items() if model.scheduling_strategy.target is None]
    require(
        target in owners,
        f"{_SHARED_DEVICES} must be a model with devices of its own: {owners}",
        target,
    )
    shared = _when_time_shared(config)
    require(
        rollout.engine == "native",
        f"rollout.backend must be native {shared}: other servers cannot be offloaded",
        rollout.backend,
    )
    num_ranks = ModelAllocation.from_str(rollout.backend).parallel.world_size
    expected = models[target].num_ranks
    require(
        num_ranks == expected,
        f"rollout.backend must have as many ranks as {target}.backend ({expected}), whose devices "
        "it shares",
        num_ranks,
    )
    require(
        config.scheduler.type == "local",
        f"scheduler.type must be local {shared}: Ray gives servers devices of their own",
        config.scheduler.type,
    )
    require(
        rollout.recompute_kv,
        f"rollout.recompute_kv must be true {shared}: the KV cache is dropped when the server is "
        "offloaded",
        False,
    )
    for role in config.time_shared_models():
        require(
            models[role].allocation.backend != "megatron",
            f"{role}.backend must be archon or fsdp {shared}: megatron cannot be offloaded",
            models[role].backend,
        )
