"""Resolves the forms in which a user may give a workflow: object, class or import path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal.api.workflow_api import RolloutWorkflow, WorkflowLike, is_agent
from areal.utils import import_path


def build_workflow(
    given: WorkflowLike, kwargs: dict[str, Any] | None
) -> tuple[RolloutWorkflow, Callable[[], None] | None]:
    """A workflow, and its `close` if it was built here.

    An object is used as it is; a class is called with `kwargs`; a str is the import path of either.
    """
    found = import_path.load_object(given, key="workflow") if isinstance(given, str) else given
    if isinstance(found, RolloutWorkflow):
        if kwargs:
            raise ValueError("workflow_kwargs build a workflow, but this one is built already")
        return found, None
    if not isinstance(found, type) or not issubclass(found, RolloutWorkflow):
        advice = " (wrap an agent with areal.agents.workflow.agent_workflow)"
        raise ValueError(
            "workflow: expected a RolloutWorkflow, its class or the import path of either, "
            f"got {given!r:.200}{advice if is_agent(found) else ''}"
        )
    try:
        workflow = found(**(kwargs or {}))
    except TypeError as error:
        raise ValueError(f"workflow_kwargs do not fit {found.__name__}: {error}") from error
    return workflow, workflow.close
