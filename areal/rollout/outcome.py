"""How a group ends: the verdict on what its workflow returned or raised.

In: a trajectory, None, or an exception. Out: an `Outcome`, which the ledger records and the pool
counts. Pure: nothing is written or counted here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from areal.rollout.failures import describe
from areal.rollout.trajectory import version_span

if TYPE_CHECKING:
    import torch

    from areal.rollout.source import Prompt

    Trajectory = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Running:
    """A group between its admission and its outcome."""

    prompt: Prompt
    issued_version: int  # policy version at its admission
    since: float  # time.monotonic()


@dataclass(frozen=True, slots=True)
class Outcome:
    """`rejected` may carry the trajectory that was turned down."""

    task_id: int
    state: Literal["finished", "rejected", "failed"]
    issued_version: int
    head_version: int  # oldest token version
    tail_version: int  # newest token version
    why: str = ""
    trajectory: Trajectory | None = None
    error: Exception | None = None  # of a failed group


@dataclass(frozen=True, slots=True)
class Finished:
    """A result that waits for its batch. Without a trajectory: a rejected group that counts."""

    task_id: int
    issued_version: int
    head_version: int
    trajectory: Trajectory | None


def judge(
    group: Running,
    trajectory: Trajectory | None,
    should_accept: Callable[[Trajectory], bool] | None,
    *,
    version: int,
) -> Outcome:
    """`version` is the policy version now. Exceptions of `should_accept` are the caller's."""
    state, why = "finished", ""
    if trajectory is None:
        state, why = "rejected", "workflow returned None"
    elif not accepts(should_accept, trajectory):
        state, why = "rejected", "should_accept_fn"
    # Without recorded versions the safe bounds are: as old as its admission, as new as now.
    span = None if trajectory is None else version_span(trajectory)
    head, tail = span or (group.issued_version, version)
    task_id = group.prompt.task_id
    return Outcome(task_id, state, group.issued_version, head, tail, why, trajectory)


def accepts(
    should_accept: Callable[[Trajectory], bool] | None, trajectory: Trajectory | None
) -> bool:
    """Whether the user's filter keeps a group. It sees the rewards as the workflow gave them:
    normalised ones have a mean of 0 in every group, so there would be nothing to tell by."""
    if trajectory is None or should_accept is None:
        return True
    raw = trajectory.get("original_rewards")
    return bool(should_accept(trajectory if raw is None else {**trajectory, "rewards": raw}))


def failed(group: Running, error: Exception, *, version: int) -> Outcome:
    return Outcome(
        task_id=group.prompt.task_id,
        state="failed",
        issued_version=group.issued_version,
        head_version=group.issued_version,
        tail_version=version,
        why=describe(error),
        error=error,
    )
