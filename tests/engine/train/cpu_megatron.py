"""megatron-core's schedules and optimizer on a CPU, for tests: its calls for a GPU end here.

    with on_cpu():
        engine = open_cpu_engine(folder, "megatron:d1p2", optimizer=OptimizerConfig())
        engine.train_batch(batch, loss_fn, loss_weight_fn)

The package makes its scalars and buffers on the device "cuda" and asks of a float32 weight that it
be a GPU's; gloo carries what NCCL would. Nothing of its logic or of areal's is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from fsdp_world import FT_SPEC
from torch.overrides import TorchFunctionMode

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.train_engine import MegatronEngineConfig, TrainEngineConfig


@contextmanager
def on_cpu() -> Iterator[None]:
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        mock.patch.object(torch.cuda, "synchronize", lambda *_: None),
        _CudaMeansCPU(),
    ):
        yield


class _CudaMeansCPU(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            result = result.replace("torch.", "torch.cuda.")
        return result


def open_cpu_engine(folder: str, backend: str, *, num_stages: int = 1, **changes: Any) -> Any:
    """A MegatronEngine that does not refuse a CPU; it computes and trains inside `on_cpu`."""
    from areal.engine.train.megatron.engine import MegatronEngine

    class CPUEngine(MegatronEngine):
        def _require_cuda(self) -> None:
            """The tests see to what it misses."""

    megatron = MegatronEngineConfig(virtual_pipeline_parallel_size=num_stages)
    config = TrainEngineConfig(path=folder, backend=backend, megatron=megatron, **changes)
    engine = CPUEngine(config)
    engine.create_process_group(ModelAllocation.from_str(backend).parallel)
    engine.initialize(FT_SPEC)
    # As on a GPU; experts, which would then ask for their exchange there, are not trained here.
    engine.stages[0].config.variable_seq_lengths = num_stages == 1
    return engine
