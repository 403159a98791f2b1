"""How one episode runs: classes with one async method, named in the YAML or by import path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal.utils import import_path

if TYPE_CHECKING:
    from areal.api.workflow_api import RolloutWorkflow

# Names for `workflow` in the YAML. Any other class is given by its import path.
WORKFLOWS = {
    "multi_turn": "areal.workflow.multi_turn.MultiTurnWorkflow",
    "rlvr": "areal.workflow.rlvr.RLVRWorkflow",
}


def get_workflow_class(name: str, *, key: str = "workflow") -> type[RolloutWorkflow]:
    """The class behind a name or an import path; `key` is the config key that errors name."""
    from areal.api.workflow_api import RolloutWorkflow

    found = import_path.load_named(name, WORKFLOWS, key=key)
    if not isinstance(found, type) or not issubclass(found, RolloutWorkflow):
        raise ValueError(f"{key}: {name!r} is not a RolloutWorkflow class, got {found!r:.200}")
    return found
