"""The inference side of a run: server processes, their client, the weight transport.

In: the config. Out: an InferenceEngine ready to generate, and the WeightUpdateMeta by which new
weights reach it. `rollout.backend` names the engine. `actor.weight_update_mode=direct` keeps the
native engine in this process; the other modes use server processes. The ExitStack closes all that
is opened here.

Each server has a function that starts it, now and again after it dies. With `scheduler.type=local`
it is a child of this process, on its share of `gpus`; with `ray` a child of one worker of role
`rollout`, on the GPUs that Ray assigned to that worker.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.inference_servers import NativeServerConfig, SGLangConfig, vLLMConfig
from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import WeightUpdateMeta
from areal.api.redact import remember_secret
from areal.api.scheduler_api import EngineCreationError
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.remote.engine import RemoteEngine
from areal.engine.remote.native import NativeProtocol, launch_native_server
from areal.engine.remote.protocol import ServerProtocol
from areal.engine.remote.server_control import ControlClient, ServerError
from areal.engine.remote.server_process import HostedServer, Launch, ServerProcess, StartServer
from areal.engine.remote.sglang import SGLangProtocol, launch_sglang_server
from areal.engine.remote.vllm import VLLMProtocol, launch_vllm_server
from areal.infra.jobs import server_job
from areal.infra.scheduler.local import LocalScheduler, visible_gpus
from areal.utils import perf_tracer
from areal.utils.data import MULTI_MODAL_KEY
from areal.utils.device import best_device
from areal.utils.hub import hub_name, model_folder
from areal.utils.model_files import CONFIG_FILE, language_config, read_hf_config
from areal.utils.server_envs import find_interpreter
from areal.utils.startup import stage
from areal.weight_sync.transports import PublicationRoot

if TYPE_CHECKING:
    import torch

    from areal.api.config.experiment import PPOConfig
    from areal.api.scheduler_api import Scheduler, Worker
    from areal.run.paths import RunPaths

TOKEN_VARIABLE = "AREAL_SERVER_TOKEN"  # of servers that somebody else runs


def open_inference(
    config: PPOConfig,
    paths: RunPaths,
    stack: ExitStack,
    scheduler: Scheduler | None,
) -> tuple[InferenceEngine, WeightUpdateMeta]:
    mode = config.actor.weight_update_mode
    name = f"{config.experiment_name}-{config.trial_name}"
    root = stack.enter_context(PublicationRoot(mode, run_name=name, disk_root=paths.weights))
    if mode == "direct":
        engine: InferenceEngine = _local_engine(config)
    elif config.rollout.api_url:
        engine = _attached_engine(config, paths)
    else:
        gpus = server_gpus(config, scheduler)
        engine = _remote_engine(config, paths, stack, scheduler, gpus)
    stack.callback(engine.destroy)
    engine.initialize()
    receiver = ModelAllocation.from_str(config.rollout.backend)
    meta = root.meta(
        recompute_kv=config.rollout.recompute_kv,
        gen_allocation=receiver,
        nccl_master_address=sender_address(config, scheduler),
        use_lora=config.actor.use_lora and takes_adapters(config),
        lora_name=config.rollout.lora_name,
        lora_alpha=config.actor.lora_alpha,
    )
    return engine, meta


def open_teacher(
    config: PPOConfig,
    paths: RunPaths,
    stack: ExitStack,
    scheduler: Scheduler | None,
) -> ServedModel:
    """The servers of `teacher.engine_type: rollout`, which get no weights."""
    view = config.of_teacher()
    gpus = _teacher_gpus(config, scheduler)
    servers = f"servers of the teacher, {view.rollout.backend}"
    with stage(servers, limit_s=view.rollout.setup_timeout):
        engine = _remote_engine(view, paths, stack, scheduler, gpus, role="teacher")
        stack.callback(engine.destroy)
        engine.initialize()
    return ServedModel(engine, "teacher")


class ServedModel:
    """A frozen model that inference servers compute, with the one call of a TrainEngine that is
    made of such."""

    def __init__(self, engine: InferenceEngine, role: str) -> None:
        self._engine = engine
        self._role = role

    def forward_batch(self, input_: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities `[B, S]`, aligned to predictions, zero on padding."""
        if any(input_.get(MULTI_MODAL_KEY) or ()):
            raise ValueError(
                f"{self._role}.engine_type must be train for rows with images: servers score text"
            )
        logp_BS = self._engine.compute_logp(input_)
        if not logp_BS.isfinite().all():
            raise RuntimeError(
                f"the servers of {self._role} give a token probability 0, which cannot be learned: "
                f"is {self._role}.path a model of the same tokenizer?"
            )
        return logp_BS.to(input_["input_ids"].device)


def takes_adapters(config: PPOConfig) -> bool:
    """Whether the servers get adapters alone: by `rollout.use_lora`, and native ones on the CPU of
    this machine in any case. On a GPU merged weights are loaded in milliseconds, and a step has no
    products beside theirs.
    """
    rollout = config.rollout
    is_here = not config.scheduler.by_ray and not rollout.api_url
    is_plain = rollout.engine == "native" and rollout.tensor_parallel == 1
    return rollout.use_lora or (is_plain and is_here and best_device() == "cpu")


def _local_engine(config: PPOConfig) -> NativeLocalEngine:
    options = native_options(config)
    return NativeLocalEngine(
        config.actor.path,
        seed=config.seed,
        device=best_device(),
        return_routed_experts=config.rollout.return_routed_experts,
        **options,
    )


def _remote_engine(
    config: PPOConfig,
    paths: RunPaths,
    stack: ExitStack,
    scheduler: Scheduler | None,
    gpus: list[str] | None,
    role: str = "rollout",
) -> RemoteEngine:
    rollout, token = config.rollout, secrets.token_urlsafe(32)
    remember_secret(token)  # redacted from the run's output
    kind = _KINDS[rollout.engine](config)
    if not isinstance(config.server, NativeServerConfig):
        kind.options["python"] = find_interpreter(rollout.engine, config.server.python)
    seed = config.seed if kind.seed is None else kind.seed
    name = "server" if role == "rollout" else f"{role}_server"  # of logs and folders
    servers = [
        {
            "token": token,
            "tensor_parallel": rollout.tensor_parallel,
            "threads": config.server.threads,
            "seed": seed + index,  # else servers would sample alike
            "log_path": paths.logs / f"{name}{index}.log",
            "setup_timeout_s": rollout.setup_timeout,
            **kind.options,
        }
        for index in range(rollout.num_servers)
    ]
    if kind.needs_scratch:
        for index, server in enumerate(servers):
            server["scratch"] = paths.root / f"{name}_scratch" / str(index)

    def start(launch: Launch) -> ServerProcess:
        process = ServerProcess(launch)
        stack.callback(process.close)
        return process

    launches = place_servers(config, kind.launch, servers, scheduler, gpus, role=role)
    with ThreadPoolExecutor(rollout.num_servers, thread_name_prefix="launch") as pool:
        processes = list(pool.map(start, launches))
    addresses = [process.address for process in processes]
    file = paths.servers if role == "rollout" else None  # only the controller asks the others
    return _client(config, kind, addresses, token, processes=processes, address_file=file)


def _attached_engine(config: PPOConfig, paths: RunPaths) -> RemoteEngine:
    """A client of servers that somebody else runs."""
    rollout, token = config.rollout, os.environ.get(TOKEN_VARIABLE, "")
    remember_secret(token)
    kind = _KINDS[rollout.engine](config)
    for address in rollout.addresses:
        check_server(config, kind.protocol, address, token, key="rollout.api_url")
    options: dict[str, Any] = {"awaits_weights": True, "address_file": paths.servers}
    return _client(config, kind, rollout.addresses, token, **options)


def check_server(
    config: PPOConfig, protocol: ServerProtocol, address: str, token: str, *, key: str
) -> None:
    """ValueError unless it is of the run's kind and model; `key` is where its address was given."""
    timeout_s = config.rollout.setup_timeout
    control = ControlClient(address, token, timeout_s=timeout_s, kind=protocol.kind)
    try:
        control.wait_until_healthy(timeout_s)
        model = protocol.identify(control)
    except (ServerError, ValueError, LookupError, TypeError) as error:
        cause = error if isinstance(error, ServerError) else f"unexpected reply ({error!r})"
        raise ValueError(
            f"{key}: {address} cannot be used as a {protocol.kind}: {cause}; its token "
            f"is read from {TOKEN_VARIABLE}"
        ) from error
    if not _is_same_model(model, config.actor.path):
        raise ValueError(
            f"{key}: {address} was started with the model {model!r:.200}, expected "
            f"actor.path {config.actor.path!r}: start it with that"
        )


def _is_same_model(found: object, path: str) -> bool:
    """By the repository of a hub name, else by the folder."""
    if not isinstance(found, str):
        return False
    ours, theirs = hub_name(path), hub_name(found)
    if ours is None or theirs is None:
        return ours is theirs and os.path.realpath(found) == os.path.realpath(path)
    return ours.repo == theirs.repo


def _client(
    config: PPOConfig,
    kind: _Kind,
    addresses: list[str],
    token: str,
    **options: Any,
) -> RemoteEngine:
    return RemoteEngine(
        kind.protocol,
        addresses,
        token,
        request_timeout_s=config.rollout.request_timeout,
        request_retries=config.rollout.request_retries,
        setup_timeout_s=config.rollout.setup_timeout,
        max_context=kind.max_context,
        vocab_size=_hf_config(config).get("vocab_size"),
        **options,
    )


class _Kind(NamedTuple):
    """Servers of one kind, as the config describes them."""

    protocol: ServerProtocol
    launch: StartServer
    options: dict[str, Any]  # of `launch`
    max_context: int | None = None  # where the client has to know it
    seed: int | None = None  # of the first server; None: the run's
    needs_scratch: bool = False


def _native_kind(config: PPOConfig) -> _Kind:
    device = None  # the best one of its machine
    options = {"model_path": config.actor.path, "device": device, **native_options(config)}
    protocol = NativeProtocol(return_routed_experts=config.rollout.return_routed_experts)
    return _Kind(protocol, launch_native_server, options)


def protocol_of(config: PPOConfig) -> ServerProtocol:
    return _KINDS[config.rollout.engine](config).protocol


def native_options(config: PPOConfig) -> dict[str, Any]:
    native = config.native
    return {
        "dtype": native.dtype or config.actor.dtype,
        "page_size": native.page_size,
        "num_pages": native.num_pages,
        "max_running": native.max_running,
        "batch_invariant": native.batch_invariant,
    }


def _vllm_kind(config: PPOConfig) -> _Kind:
    vllm, max_context = config.vllm, config.vllm.max_context or _model_context(config)
    options = _stock_options(config, vllm) | {
        "max_model_len": max_context,
        "max_num_seqs": vllm.max_num_seqs,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "cpu_cache_gb": vllm.cpu_cache_gb,
        "enforce_eager": vllm.enforce_eager,
    }
    protocol = VLLMProtocol(config.actor.path, lora_name=_stock_lora_name(config))
    return _Kind(
        protocol, launch_vllm_server, options, max_context, seed=vllm.seed, needs_scratch=True
    )


def _sglang_kind(config: PPOConfig) -> _Kind:
    sglang, max_context = config.sglang, config.sglang.max_context or _model_context(config)
    options = _stock_options(config, sglang) | {
        "context_length": max_context,
        "max_running_requests": sglang.max_running_requests,
        "mem_fraction_static": sglang.mem_fraction_static,
        "attention_backend": sglang.attention_backend,
        "lora_target_modules": config.actor.target_modules,
    }
    protocol = SGLangProtocol(config.actor.path, lora_name=_stock_lora_name(config))
    return _Kind(protocol, launch_sglang_server, options, max_context, sglang.seed)


def _stock_options(config: PPOConfig, section: vLLMConfig | SGLangConfig) -> dict[str, Any]:
    """Options that both stock servers are launched with."""
    return {
        "model_path": config.actor.path,
        "dtype": section.dtype or config.actor.dtype,
        "lora_rank": config.actor.lora_rank if config.rollout.use_lora else None,
        "extra_args": section.arguments,
        "pipeline_parallel": config.rollout.pipeline_parallel,
    }


def _stock_lora_name(config: PPOConfig) -> str:
    """Of the adapter that a stock server gets; "" if it gets none."""
    return config.rollout.lora_name if config.rollout.use_lora else ""


def max_context(config: PPOConfig) -> int | None:
    """Most tokens of one sequence in this run's servers; None: only they know.

    Another one's server may have a model that this machine does not.
    """
    path, engine = config.actor.path, config.rollout.engine
    if hub_name(path) is None and not (Path(path) / CONFIG_FILE).is_file():
        return None
    own = {"vllm": config.vllm.max_context, "sglang": config.sglang.max_context}.get(engine)
    return own or _model_context(config)


_KINDS = {"native": _native_kind, "vllm": _vllm_kind, "sglang": _sglang_kind}


def _model_context(config: PPOConfig) -> int | None:
    return _hf_config(config).get("max_position_embeddings")


def _hf_config(config: PPOConfig) -> Mapping[str, Any]:
    return language_config(read_hf_config(model_folder(config.actor.path, weights=False)))


class ServerTrace:
    """Adds the busy intervals of the servers to the run's trace."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._since = time.time()

    def update(self) -> None:
        """Add the intervals since the last call; no-op when tracing is off."""
        if not perf_tracer.is_tracing():
            return
        now = time.time()
        for server, intervals in self._engine.busy_intervals(self._since).items():
            perf_tracer.add_spans(f"server {server}", "generate", intervals)
        self._since = now


def place_servers(
    config: PPOConfig,
    launch: StartServer,
    servers: Sequence[dict[str, Any]],
    scheduler: Scheduler | None,
    gpus: Sequence[str] | None,
    *,
    role: str = "rollout",
) -> list[Launch]:
    """`servers` holds the arguments of `launch` for each server."""
    if config.scheduler.by_ray:
        return _in_workers(config, launch, servers, _opened(scheduler), role)
    size = config.rollout.ranks_per_server
    shares = [None if gpus is None else gpus[i * size :][:size] for i in range(len(servers))]
    return [
        partial(launch, gpus=share, **options)
        for share, options in zip(shares, servers, strict=True)
    ]


def server_gpus(config: PPOConfig, scheduler: Scheduler | None) -> list[str] | None:
    """The GPUs of the colocated ranks, or those not used by training on this machine. None: the
    servers see all GPUs, or Ray assigns them."""
    rollout, gpus = config.rollout, visible_gpus()
    if config.scheduler.by_ray:
        return None
    wanted = rollout.num_servers * rollout.ranks_per_server
    target = rollout.scheduling_strategy.target
    if target is not None:
        if config.hosts()[target] == "controller":
            return None
        assert isinstance(scheduler, LocalScheduler), "the ranks of the target have opened it"
        return scheduler.gpus_of(target) or None
    if isinstance(scheduler, LocalScheduler):
        free = scheduler.take_free_gpus(wanted)
    elif rollout.num_servers == 1:
        return None
    else:
        others = gpus[1:]  # the first is for training
        free = others[:wanted] if len(others) >= wanted else None
    if free is None and rollout.num_servers > 1 and len(gpus) > 1:
        raise ValueError(
            f"rollout.backend {rollout.backend!r} needs {wanted} GPUs that are not used for "
            f"training, and fewer are free among {', '.join(gpus)}: lower d"
        )
    return free


def _teacher_gpus(config: PPOConfig, scheduler: Scheduler | None) -> list[str] | None:
    """Those not used by training and by the policy's servers; None: the servers see all GPUs, or
    Ray assigns them."""
    servers, policy, gpus = config.of_teacher().rollout, config.rollout, visible_gpus()
    if config.scheduler.by_ray:
        return None
    wanted = servers.num_servers * servers.ranks_per_server
    if isinstance(scheduler, LocalScheduler):
        free = scheduler.take_free_gpus(wanted)
    else:
        elsewhere = policy.api_url or policy.scheduling_strategy.target is not None
        theirs = 0 if elsewhere else policy.num_servers * policy.ranks_per_server
        others = gpus[1 + theirs :]  # the first is for training
        free = others[:wanted] if len(others) >= wanted else None
    if free is None and len(gpus) > 1:
        raise ValueError(
            f"teacher.backend {servers.backend!r} needs {wanted} GPUs beside those of training and "
            f"of rollout.backend, and fewer are free among {', '.join(gpus)}: lower d, or set "
            "teacher.engine_type to train"
        )
    return free


def sender_address(config: PPOConfig, scheduler: Scheduler | None) -> str:
    """Address of the actor's rank 0, for weights sent through a process group."""
    if not config.scheduler.by_ray:
        return "127.0.0.1"
    return _opened(scheduler).get_workers("actor", config.actor.setup_timeout)[0].ip


def _opened(scheduler: Scheduler | None) -> Scheduler:
    assert scheduler is not None, "with Ray the actor's ranks have opened it"
    return scheduler


def _in_workers(
    config: PPOConfig,
    launch: StartServer,
    servers: Sequence[dict[str, Any]],
    scheduler: Scheduler,
    role: str,
) -> list[Launch]:
    job, timeout_s = server_job(config, role), config.rollout.setup_timeout
    scheduler.create_workers(job)
    workers = scheduler.get_workers(job.role, timeout_s)
    _fetch_model(config, scheduler, workers)
    if config.actor.weight_update_mode == "shm":
        _require_one_machine([*workers, *scheduler.get_workers("actor", timeout_s)])
    return [
        HostedServer(scheduler, worker, launch, options, setup_timeout_s=timeout_s).launch
        for worker, options in zip(workers, servers, strict=True)
    ]


def _fetch_model(config: PPOConfig, scheduler: Scheduler, workers: Sequence[Worker]) -> None:
    """Download the model on the servers' machines, which may differ from those of the ranks. Done
    first, so that it does not count towards a server's setup timeout."""
    path, limit_s = config.actor.path, config.actor.setup_timeout
    if hub_name(path) is None:
        return

    def fetch(worker: Worker) -> None:
        name = "areal.utils.hub.model_folder"
        try:
            scheduler.create_engine(worker.id, name, "model", path, timeout_s=limit_s)
        except EngineCreationError as error:
            raise error.__cause__ or error from None

    with (
        stage(f"{path} on the servers' machines", limit_s=limit_s),
        ThreadPoolExecutor(len(workers), thread_name_prefix="fetch") as pool,
    ):
        list(pool.map(fetch, workers))


def _require_one_machine(workers: Sequence[Worker]) -> None:
    machines = sorted({worker.ip for worker in workers})
    if len(machines) > 1:
        raise ValueError(
            "actor.weight_update_mode must be disk, delta or xccl, got 'shm': Ray has placed actor "
            f"and rollout on {', '.join(machines)}, and memory is not shared between machines"
        )
