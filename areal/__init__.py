"""areal trains language models by asynchronous reinforcement learning.

The names below are imported when they are first used, so `import areal` is quick and loads no
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.api.workflow_context import workflow_context
    from areal.infra.train_controller import TrainController
    from areal.rollout.controller import RolloutController
    from areal.rollout.executor import WorkflowExecutor
    from areal.rollout.staleness import StalenessManager
    from areal.trainer.offline import DPOTrainer, RWTrainer, SFTTrainer
    from areal.trainer.rl_trainer import PPOTrainer
    from areal.utils.device import current_platform

__version__ = "0.1.0"

_HOMES = {
    "DPOTrainer": "areal.trainer.offline",
    "PPOTrainer": "areal.trainer.rl_trainer",
    "RWTrainer": "areal.trainer.offline",
    "SFTTrainer": "areal.trainer.offline",
    "RolloutController": "areal.rollout.controller",
    "StalenessManager": "areal.rollout.staleness",
    "TrainController": "areal.infra.train_controller",
    "WorkflowExecutor": "areal.rollout.executor",
    "current_platform": "areal.utils.device",
    "workflow_context": "areal.api.workflow_context",
}
__all__ = [
    "DPOTrainer",
    "PPOTrainer",
    "RWTrainer",
    "RolloutController",
    "SFTTrainer",
    "StalenessManager",
    "TrainController",
    "WorkflowExecutor",
    "__version__",
    "current_platform",
    "workflow_context",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'areal' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
