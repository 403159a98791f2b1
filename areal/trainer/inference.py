"""Brings up the inference side of a run: the server process, its client, and the weight transport.

In: the config. Out: an InferenceEngine ready to generate and the order by which new weights reach
it. `actor.weight_update_mode=direct` keeps the engine in this process; the other transports mean a
server process of its own, on `gpus` where they are given. What is opened here is closed by the
ExitStack it was opened on.
"""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import WeightUpdateMeta
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.native.remote_engine import NativeRemoteEngine, launch_native_server
from areal.utils import perf_tracer
from areal.utils.device import best_device
from areal.weight_sync.transports import PublicationRoot

if TYPE_CHECKING:
    from areal.api.config.experiment import PPOConfig
    from areal.utils.run_paths import RunPaths


def open_inference(
    config: PPOConfig, paths: RunPaths, stack: ExitStack, *, gpus: list[str] | None = None
) -> tuple[InferenceEngine, WeightUpdateMeta]:
    mode = config.actor.weight_update_mode
    name = f"{config.experiment_name}-{config.trial_name}"
    root = stack.enter_context(PublicationRoot(mode, run_name=name, disk_root=paths.weights))
    options = _engine_options(config)
    if mode == "direct":
        engine: InferenceEngine = NativeLocalEngine(config.actor.path, **options)
    else:
        engine = _remote_engine(config, {**options, "gpus": gpus}, paths, stack)
    stack.callback(engine.destroy)
    engine.initialize()
    return engine, root.meta(recompute_kv=config.rollout.recompute_kv)


def _engine_options(config: PPOConfig) -> dict[str, Any]:
    native = config.native
    return {
        "device": best_device(),
        "dtype": native.dtype or config.actor.dtype,
        "page_size": native.page_size,
        "num_pages": native.num_pages,
        "max_running": native.max_running,
        "batch_invariant": native.batch_invariant,
        "seed": config.seed,
    }


def _remote_engine(
    config: PPOConfig, options: dict[str, Any], paths: RunPaths, stack: ExitStack
) -> InferenceEngine:
    rollout = config.rollout
    token = secrets.token_urlsafe(32)
    process, address = launch_native_server(
        config.actor.path,
        token=token,
        threads=config.native.threads,
        tensor_parallel=rollout.tensor_parallel,
        log_path=paths.logs / "server0.log",
        setup_timeout_s=rollout.setup_timeout,
        **options,
    )
    stack.callback(process.terminate)
    return NativeRemoteEngine(
        [address],
        token,
        request_timeout_s=rollout.request_timeout,
        request_retries=rollout.request_retries,
        setup_timeout_s=rollout.setup_timeout,
    )


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
