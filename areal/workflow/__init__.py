"""Workflows: how one episode runs. Named in the YAML by a short name or an import path.

The classes can be imported from here (`from areal.workflow import RLVRWorkflow`) and are loaded on
first use.
"""

from __future__ import annotations

import importlib
from typing import Any

# Names for `workflow` in the YAML. Anything else is given by its import path.
WORKFLOWS = {
    "env": "areal.workflow.env.EnvWorkflow",
    "multi_turn": "areal.workflow.multi_turn.MultiTurnWorkflow",
    "rlvr": "areal.workflow.rlvr.RLVRWorkflow",
    "tir": "areal.workflow.tir.TIRWorkflow",
    "vision_rlvr": "areal.workflow.vision_rlvr.VisionRLVRWorkflow",
}
_HOMES = {path.rpartition(".")[2]: path.rpartition(".")[0] for path in WORKFLOWS.values()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'areal.workflow' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
