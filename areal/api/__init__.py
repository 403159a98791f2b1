"""The contracts. This package imports nothing else of areal, and no torch at run time.

Each name below can be imported from here (`from areal.api import RolloutWorkflow`) and is loaded on
first use. The configuration is imported from `areal.api.cli_args`.
"""

from __future__ import annotations

from typing import Any

_HOMES = {
    "AllocationMode": "alloc_mode",
    "AllocationValidationError": "alloc_mode",
    "InvalidAllocationModeError": "alloc_mode",
    "ModelAllocation": "alloc_mode",
    "ParallelStrategy": "alloc_mode",
    "InferenceEngine": "engine_api",
    "TrainEngine": "engine_api",
    "InteractionCache": "interaction",
    "InteractionWithTokenLogpReward": "interaction",
    "FinetuneSpec": "io_struct",
    "HttpGenerationResult": "io_struct",
    "HttpRequest": "io_struct",
    "LocalInfServerInfo": "io_struct",
    "ModelRequest": "io_struct",
    "ModelResponse": "io_struct",
    "ParamSpec": "io_struct",
    "RolloutStat": "io_struct",
    "SaveLoadMeta": "io_struct",
    "StepInfo": "io_struct",
    "WeightUpdateMeta": "io_struct",
    "AsyncRewardWrapper": "reward_api",
    "Job": "scheduler_api",
    "Scheduler": "scheduler_api",
    "SchedulerError": "scheduler_api",
    "SchedulingSpec": "scheduler_api",
    "SchedulingStrategy": "scheduler_api",
    "Worker": "scheduler_api",
    "Agent": "workflow_api",
    "AgentWorkflow": "workflow_api",
    "RolloutWorkflow": "workflow_api",
    "WorkflowLike": "workflow_api",
    "GenerationHyperparameters": "config.inference",
}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]  # loaded lazily


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'areal.api' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"areal.api.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
