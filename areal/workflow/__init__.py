"""Workflows: how one episode runs. Named in the YAML by a short name or an import path.

The classes can be imported from here (`from areal.workflow import RLVRWorkflow`) and are loaded on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from areal.utils import import_path

if TYPE_CHECKING:
    from areal.api.config.run import DatasetConfig

# Names for `workflow` in the YAML. Anything else is given by its import path.
WORKFLOWS = {
    "multi_turn": "areal.workflow.multi_turn.MultiTurnWorkflow",
    "rlvr": "areal.workflow.rlvr.RLVRWorkflow",
}
_HOMES = {path.rpartition(".")[2]: path.rpartition(".")[0] for path in WORKFLOWS.values()}
_NOT_HERE = {
    "VisionRLVRWorkflow": "areal ships no workflow for images: write a class with "
    "`async def arun_episode(self, engine, data)` that reads data['images'] (areal.api."
    "RolloutWorkflow), and an engine that takes ModelRequest.image_data",
}


def image_refusal(section: str, dataset: DatasetConfig | None, workflow: Any) -> str:
    """Error text for rows with images and a text-only workflow."""
    path = "" if dataset is None else f" {dataset.path!r}"
    name = workflow if isinstance(workflow, str) else getattr(workflow, "__name__", workflow)
    return (
        f"{section}.path: the rows of{path} have images, and workflow {str(name)!r:.99} reads text "
        "alone: use a data set of text, or a workflow class of your own that reads images"
    )


def find_workflow(name: str, *, key: str = "workflow") -> Any:
    """Resolves a name or import path to a RolloutWorkflow, an agent, or the class of either.

    `key` is the config key for error messages.
    """
    from areal.api.workflow_api import RolloutWorkflow, is_agent

    if name in WORKFLOWS or "." not in name:
        return import_path.load_named(name, WORKFLOWS, key=key)
    found = import_path.load_object(name, key=key)
    kind = found if isinstance(found, type) else type(found)
    if not issubclass(kind, RolloutWorkflow) and not is_agent(found):
        raise ValueError(
            f"{key}: {name!r} is neither a RolloutWorkflow nor an agent (a class or an object with "
            f"`async def run(self, data, **kwargs)`), got {found!r:.200}"
        )
    return found


def __getattr__(name: str) -> Any:
    if name in _NOT_HERE:
        raise ImportError(_NOT_HERE[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'areal.workflow' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
