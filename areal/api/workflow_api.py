"""How one episode runs: the contract of a workflow, and the forms in which users name one."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

if TYPE_CHECKING:
    import torch

    from areal.api.engine_api import InferenceEngine
    from areal.api.interaction import InteractionWithTokenLogpReward


class RolloutWorkflow(ABC):
    """One call = one sample. The executor runs `group_size` calls per prompt concurrently.

    class Echo(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            reply = await engine.agenerate(ModelRequest(input_ids=data["ids"]))
            return trajectory_of(reply, reward=1.0)
    """

    text_only: ClassVar[bool] = False  # rows with images are rejected before the first episode

    @abstractmethod
    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> dict[str, torch.Tensor] | dict[str, InteractionWithTokenLogpReward] | None:
        """A trajectory of batch size 1 (see `io_struct`), or None to reject the episode.

        An agent's episode has several rows: a dict of its interactions by completion id.

        `data` is this episode's own copy of the row. An exception is a failure, never data: it is
        counted, retried up to a bound, and reported.
        """

    async def arun_group(
        self, engine: InferenceEngine, data: dict[str, Any], num_samples: int
    ) -> GroupResult:
        """All episodes of a prompt at once, where that is cheaper; see `runs_groups`.

        Must do what `num_samples` calls of `arun_episode` do, with `workflow_context.next_seeds`.
        A sample that fails is retried by `arun_episode`; an exception fails all of them.
        """
        raise NotImplementedError(f"{type(self).__name__} runs one episode at a time")

    def close(self) -> None:  # noqa: B027 - most workflows have nothing to end
        """End what the workflow started (processes, clients). Called after the last episode."""


@dataclass(frozen=True, slots=True)
class GroupResult:
    trajectory: dict[str, torch.Tensor] | None  # a row per sample that did not fail, or reject all
    failures: dict[int, Exception] = field(default_factory=dict[int, Exception])  # by sample


def runs_groups(kind: type[RolloutWorkflow]) -> bool:
    """Whether `arun_group` stands for this class's `arun_episode`: not if a subclass has written
    the latter anew."""
    for base in kind.__mro__:
        if "arun_group" in vars(base):
            return base is not RolloutWorkflow
        if "arun_episode" in vars(base):
            return False
    return False


class Agent(Protocol):
    """Any object that calls the model through OpenAI's API; it need not know areal.

    class Solver:
        async def run(self, data, **extra_kwargs):
            client = AsyncOpenAI(**extra_kwargs)
            reply = await client.chat.completions.create(model="policy", messages=data["messages"])
            return float(data["answer"] in reply.choices[0].message.content)
    """

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float | dict[str, float]:
        """The reward of the last completion, or rewards by completion id.

        `extra_kwargs`: `base_url` and `api_key` of the episode's session, and with
        `rollout.agent.mode: inline` an `http_client` (httpx.AsyncClient). An exception is a
        failure, never data.
        """
        ...


class AgentWorkflow(ABC):
    """An agent by inheritance. Not needed: any class with such a `run` is an agent (`Agent`)."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        warnings.warn(
            f"{cls.__name__} need not inherit from AgentWorkflow: any class with "
            "`async def run(self, data, **extra_kwargs)` is an agent",
            DeprecationWarning,
            stacklevel=2,
        )
        return super().__new__(cls)

    @abstractmethod
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float | dict[str, float]:
        """As `Agent.run`."""


# A workflow or an agent, the class of one (built with `workflow_kwargs`), or the import path of any
# of these. None only with `rollout.agent.mode: online`, where external clients run the episodes.
WorkflowLike = RolloutWorkflow | type[RolloutWorkflow] | Agent | type[Agent] | str


def is_agent(thing: Any) -> bool:
    """Whether it is an agent or the class of one, which runs through the proxy."""
    kind = thing if isinstance(thing, type) else type(thing)
    return callable(getattr(thing, "run", None)) and not issubclass(kind, RolloutWorkflow)
