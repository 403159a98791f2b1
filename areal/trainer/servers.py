"""Brings up the inference side of a run: server processes, their client, the weight transport.

In: the config. Out: an InferenceEngine ready to generate and the order by which new weights reach
it. `rollout.backend` names the engine; `actor.weight_update_mode=direct` keeps the native one in
this process, the other transports mean server processes of their own: children of this process,
each on a share of `gpus` where they are given, or of Ray's workers (places.py). A server
that dies is replaced. What is opened here is closed by the ExitStack it was opened on.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from areal.api.alloc_mode import ModelAllocation
from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import WeightUpdateMeta
from areal.api.redact import remember_secret
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.remote.engine import HttpEngine
from areal.engine.remote.native import NativeRemoteEngine
from areal.engine.remote.protocol import ServerProtocol
from areal.engine.remote.server_process import Launch, ServerProcess
from areal.engine.remote.sglang import SGLangProtocol, launch_sglang_server
from areal.engine.remote.vllm import VLLMProtocol, launch_vllm_server
from areal.models.hf_io import language_config, read_hf_config
from areal.trainer.places import place_servers, sender_address, server_gpus
from areal.utils import perf_tracer
from areal.utils.device import best_device
from areal.utils.hub import model_folder
from areal.utils.server_envs import find_interpreter
from areal.weight_sync.transports import PublicationRoot

if TYPE_CHECKING:
    from areal.api.config.experiment import PPOConfig
    from areal.api.config.servers import SGLangConfig, VLLMConfig
    from areal.api.scheduler_api import Scheduler
    from areal.run.paths import RunPaths


def open_inference(
    config: PPOConfig,
    paths: RunPaths,
    stack: ExitStack,
    scheduler: Scheduler | None,
) -> tuple[InferenceEngine, WeightUpdateMeta]:
    gpus = server_gpus(config, scheduler)
    mode = config.actor.weight_update_mode
    name = f"{config.experiment_name}-{config.trial_name}"
    root = stack.enter_context(PublicationRoot(mode, run_name=name, disk_root=paths.weights))
    if config.rollout.engine == "native":
        engine = _native_engine(config, paths, stack, scheduler, gpus)
    else:
        engine = _STOCK[config.rollout.engine](config, paths, stack, gpus)
    stack.callback(engine.destroy)
    engine.initialize()
    receiver = ModelAllocation.from_str(config.rollout.backend)
    meta = root.meta(
        recompute_kv=config.rollout.recompute_kv,
        gen_allocation=receiver,
        nccl_master_address=sender_address(config, scheduler),
    )
    return engine, meta


def _native_engine(
    config: PPOConfig,
    paths: RunPaths,
    stack: ExitStack,
    scheduler: Scheduler | None,
    gpus: list[str] | None,
) -> InferenceEngine:
    native, rollout = config.native, config.rollout
    options = {
        "dtype": native.dtype or config.actor.dtype,
        "page_size": native.page_size,
        "num_pages": native.num_pages,
        "max_running": native.max_running,
        "batch_invariant": native.batch_invariant,
    }
    if config.actor.weight_update_mode == "direct":
        device = best_device()
        return NativeLocalEngine(config.actor.path, seed=config.seed, device=device, **options)
    token = _new_token()
    servers = [
        {
            "model_path": config.actor.path,
            "token": token,
            "threads": native.threads,
            "tensor_parallel": rollout.tensor_parallel,
            "device": None,  # the best of the machine it comes to
            "log_path": paths.logs / f"server{index}.log",
            "setup_timeout_s": rollout.setup_timeout,
            "seed": config.seed + index,  # else two servers would draw alike
            **options,
        }
        for index in range(rollout.num_servers)
    ]

    def start(launch: Launch) -> ServerProcess:
        process = ServerProcess(launch)
        stack.callback(process.close)
        return process

    launches = place_servers(config, servers, scheduler, gpus)
    with ThreadPoolExecutor(rollout.num_servers, thread_name_prefix="launch") as pool:
        processes = list(pool.map(start, launches))
    # Only a publication is there for a new server to load; what the other modes sent has passed.
    can_load_again = config.actor.weight_update_mode in ("shm", "disk")
    restarts = {} if can_load_again else {"max_restarts": 0}
    addresses = [process.address for process in processes]
    return NativeRemoteEngine(
        addresses,
        token,
        vocab_size=_vocab_size(config),
        processes=processes,
        address_file=paths.servers,
        **_time_limits(config),
        **restarts,
    )


def _vllm_engine(
    config: PPOConfig, paths: RunPaths, stack: ExitStack, gpus: list[str] | None
) -> InferenceEngine:
    vllm, token = config.vllm, _new_token()
    launch = partial(
        launch_vllm_server,
        model_folder(config.actor.path),
        python=find_interpreter("vllm", vllm.python),
        token=token,
        scratch=paths.root / "server_scratch",
        dtype=_server_dtype(config),
        max_model_len=_max_context(config, vllm),
        max_num_seqs=vllm.max_num_seqs,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        cpu_cache_gb=vllm.cpu_cache_gb,
        enforce_eager=vllm.enforce_eager,
        extra_args=vllm.extra_args,
        gpus=gpus,
        **_launch_options(config, paths),
    )
    return _http_engine(VLLMProtocol(), launch, token, config, vllm, stack)


def _sglang_engine(
    config: PPOConfig, paths: RunPaths, stack: ExitStack, gpus: list[str] | None
) -> InferenceEngine:
    sglang, token = config.sglang, _new_token()
    launch = partial(
        launch_sglang_server,
        model_folder(config.actor.path),
        python=find_interpreter("sglang", sglang.python),
        token=token,
        dtype=_server_dtype(config),
        context_length=_max_context(config, sglang),
        max_running_requests=sglang.max_running_requests,
        mem_fraction_static=sglang.mem_fraction_static,
        attention_backend=sglang.attention_backend,
        device=best_device(),
        extra_args=sglang.extra_args,
        gpus=gpus,
        **_launch_options(config, paths),
    )
    return _http_engine(SGLangProtocol(), launch, token, config, sglang, stack)


_STOCK = {"vllm": _vllm_engine, "sglang": _sglang_engine}


def _http_engine(
    protocol: ServerProtocol,
    launch: Launch,
    token: str,
    config: PPOConfig,
    server: VLLMConfig | SGLangConfig,
    stack: ExitStack,
) -> InferenceEngine:
    process = ServerProcess(launch)
    stack.callback(process.close)
    return HttpEngine(
        protocol,
        [process.address],
        token,
        model_path=model_folder(config.actor.path),
        max_context=_max_context(config, server),
        vocab_size=_vocab_size(config),
        processes=[process],
        **_time_limits(config),
    )


def _launch_options(config: PPOConfig, paths: RunPaths) -> dict[str, Any]:
    return {
        "tensor_parallel": config.rollout.tensor_parallel,
        "threads": config.server.threads,
        "seed": config.seed,
        "log_path": paths.logs / "server0.log",
        "setup_timeout_s": config.rollout.setup_timeout,
    }


def _time_limits(config: PPOConfig) -> dict[str, Any]:
    return {
        "request_timeout_s": config.rollout.request_timeout,
        "request_retries": config.rollout.request_retries,
        "setup_timeout_s": config.rollout.setup_timeout,
    }


def _server_dtype(config: PPOConfig) -> str:
    default = "bfloat16" if best_device() == "cuda" else "float32"
    return config.server.dtype or config.actor.dtype or default


def _max_context(config: PPOConfig, server: VLLMConfig | SGLangConfig) -> int | None:
    return server.max_context or _hf_config(config).get("max_position_embeddings")


def _vocab_size(config: PPOConfig) -> int | None:
    return _hf_config(config).get("vocab_size")


def _hf_config(config: PPOConfig) -> Mapping[str, Any]:
    return language_config(read_hf_config(model_folder(config.actor.path, weights=False)))


def _new_token() -> str:
    """For the servers of this run, and kept out of whatever it writes."""
    token = secrets.token_urlsafe(32)
    remember_secret(token)
    return token


class ServerTrace:
    """Copies what the servers were doing into the run's trace, beside the controller's phases."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._since = time.time()

    def update(self) -> None:
        """Add the work since the last call; nothing is asked when tracing is off."""
        if not perf_tracer.is_tracing():
            return
        now = time.time()
        for server, intervals in self._engine.busy_intervals(self._since).items():
            perf_tracer.add_spans(f"server {server}", "generate", intervals)
        self._since = now
