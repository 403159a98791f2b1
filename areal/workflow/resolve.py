"""Resolves the forms in which a user may give a workflow: object, class, name or import path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal.api.workflow_api import RolloutWorkflow, WorkflowLike, is_agent
from areal.utils import import_path
from areal.workflow import WORKFLOWS

if TYPE_CHECKING:
    from areal.api.config.run import DatasetConfig


def find_workflow(given: WorkflowLike) -> Any:
    """A RolloutWorkflow, an agent, or the class of either."""
    found: Any = given
    if isinstance(given, str):
        is_path = given not in WORKFLOWS and "." in given
        find = import_path.load_object if is_path else _load_shipped
        found = find(given, key="workflow")
    kind = found if isinstance(found, type) else type(found)
    if not issubclass(kind, RolloutWorkflow) and not is_agent(found):
        raise ValueError(
            f"workflow: {given!r:.200} is neither a RolloutWorkflow nor an agent (a class or an "
            f"object with `async def run(self, data, **kwargs)`), got {found!r:.200}"
        )
    return found


def _load_shipped(name: str, *, key: str) -> Any:
    return import_path.load_named(name, WORKFLOWS, key=key)


def build_workflow(given: WorkflowLike, kwargs: dict[str, Any] | None) -> RolloutWorkflow:
    """A workflow; a class is called with `kwargs`, an object takes none."""
    found = find_workflow(given)
    if isinstance(found, RolloutWorkflow):
        if kwargs:
            raise ValueError("workflow_kwargs build a workflow, but this one is built already")
        return found
    if is_agent(found):
        raise ValueError(
            f"workflow: expected a RolloutWorkflow, got {given!r:.200} (wrap an agent with "
            "areal.agents.workflow.agent_workflow)"
        )
    try:
        return found(**(kwargs or {}))
    except TypeError as error:
        raise ValueError(f"workflow_kwargs do not fit {found.__name__}: {error}") from error


def agent_image_refusal(section: str, dataset: DatasetConfig | None, model: str) -> str:
    """Error text for rows with images and agents of a text-only model."""
    path = "" if dataset is None else f" {dataset.path!r}"
    return (
        f"{section}.path: the rows of{path} have images, and the model that the agents talk to, "
        f"{model!r}, reads text only: name one with a vision tower in actor.path, or use a data "
        "set of text"
    )


def image_refusal(section: str, dataset: DatasetConfig | None, workflow: Any) -> str:
    """Error text for rows with images and a text-only workflow."""
    path = "" if dataset is None else f" {dataset.path!r}"
    name = workflow if isinstance(workflow, str) else getattr(workflow, "__name__", workflow)
    return (
        f"{section}.path: the rows of{path} have images, and workflow {str(name)!r:.99} reads text "
        "only: set workflow: vision_rlvr, or use a data set of text"
    )
