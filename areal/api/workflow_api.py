"""How one episode runs: the contract a workflow fulfils, and the forms a user may name one in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from areal.api.engine_api import InferenceEngine


class RolloutWorkflow(ABC):
    """One call = one sample. The executor runs `group_size` calls per prompt concurrently.

    class Echo(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            reply = await engine.agenerate(ModelRequest(input_ids=data["ids"]))
            return trajectory_of(reply, reward=1.0)
    """

    @abstractmethod
    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> dict[str, torch.Tensor] | None:
        """A trajectory of batch size 1 (see `io_struct`), or None to reject the episode.

        `data` is this episode's own copy of the row. An exception is a failure, never data: it is
        counted, retried within a bound, and shown.
        """

    def close(self) -> None:  # noqa: B027 - most workflows have nothing to end
        """End what the workflow started (processes, clients). Called after the last episode."""


# A workflow, its class (then `workflow_kwargs` build it), or the import path of either.
WorkflowLike = RolloutWorkflow | type[RolloutWorkflow] | str
