"""Workflows: how one episode runs. Named in the YAML by a short name or an import path."""

from __future__ import annotations

# Names for `workflow` in the YAML. Anything else is given by its import path.
WORKFLOWS = {
    "multi_turn": "areal.workflow.multi_turn.MultiTurnWorkflow",
    "rlvr": "areal.workflow.rlvr.RLVRWorkflow",
}
