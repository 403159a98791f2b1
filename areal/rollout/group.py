"""Runs a group: one prompt, `group_size` concurrent episodes, one trajectory.

In: a row of data. Out: the samples concatenated to `[G, S]`, or None if the workflow rejected all
of them. A group may have fewer samples than `group_size`, because algorithms use real group sizes,
unless `drop_incomplete_group` is set. An agent's episode may have several rows; `episode_ids` marks
them, because baselines compare episodes, not rows.

A workflow that runs groups (`arun_group`) makes the first attempt of all samples in one call, on
the group's own task; the rest is as for episodes that run one by one.

An episode that raises is retried with the same seeds, up to `limits.max_retries` times; then the
whole group fails, since training on the surviving episodes would bias towards easy answers. A
RewardError is final: the reward was retried already, and the same seeds give the same tokens.

In an evaluation an episode that fails for good costs only itself: the others are scored, and the
group fails if none is left.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from areal.api.engine_api import EngineLostError
from areal.api.workflow_api import GroupResult, runs_groups
from areal.api.workflow_context import Episode, episode
from areal.rollout.episode_time import record_time
from areal.rollout.trajectory import (
    as_tensors,
    check_trajectory_format,
    normalize_rewards,
    number_episodes,
    number_rows,
    split_rows,
)
from areal.sandbox.pool import RewardError
from areal.utils.data import concat_padded_tensors
from areal.utils.waits import progress, waiting

if TYPE_CHECKING:
    import torch

    from areal.api.engine_api import InferenceEngine
    from areal.api.workflow_api import RolloutWorkflow
    from areal.rollout.failures import FailureLimits

MAX_RETRY_DELAY_S = 5.0


class Groups(Protocol):
    """Runs the groups of one prompt stream: here (`GroupRunner`) or in workers (`PlacedGroups`)."""

    @property
    def is_eval(self) -> bool: ...
    async def run(self, task_id: int, data: dict[str, Any]) -> dict[str, torch.Tensor] | None: ...


@dataclass(frozen=True, slots=True)
class GroupRunner:
    """Runs the groups of one prompt stream (or one evaluation) in this process."""

    engine: InferenceEngine
    workflow: RolloutWorkflow
    group_size: int
    run_seed: int
    is_eval: bool
    limits: FailureLimits
    on_attempt_failed: Callable[[Exception, bool], None]  # error, whether it is retried
    reward_normalization: bool = False
    drop_incomplete_group: bool = False

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"gconfig.n_samples must be at least 1, got {self.group_size}")

    async def run(self, task_id: int, data: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        lost: dict[int, Exception] = {}  # only of an evaluation
        if not runs_groups(type(self.workflow)):
            results = await self._samples(task_id, data, range(self.group_size), lost)
            return self._assemble(list(results.values()), lost)
        result = await self._at_once(task_id, data, lost)
        if result.trajectory is not None and not result.failures and not self.reward_normalization:
            return number_rows(result.trajectory, self.group_size)
        num_rows = self.group_size - len(result.failures)
        made = result.trajectory
        rows = iter([None] * num_rows if made is None else split_rows(made, num_rows))
        again = [sample for sample in result.failures if sample not in lost]
        retried = await self._samples(task_id, data, again, lost, first_attempt=1)
        retried |= dict.fromkeys(lost)
        return self._assemble(
            [retried[i] if i in retried else next(rows) for i in range(self.group_size)], lost
        )

    async def run_sample(
        self, task_id: int, sample: int, data: dict[str, Any]
    ) -> dict[str, Any] | None:
        """One episode of a group by itself, with its retries: an evaluation keeps each sample as it
        ends, and one that fails costs only itself. Raises the error of the last attempt."""
        return await self._sample(task_id, sample, data, first_attempt=0)

    async def _at_once(
        self, task_id: int, data: dict[str, Any], lost: dict[int, Exception]
    ) -> GroupResult:
        """The first attempt of all episodes, in one call of the workflow."""
        try:
            with (
                self._episode(task_id, 0, is_group=True) as current,
                waiting(f"workflow {type(self.workflow).__name__}"),
            ):
                result = await self.workflow.arun_group(
                    self.engine, copy_row(data), self.group_size
                )
            record_time(current)
        except EngineLostError:
            raise
        except Exception as error:
            result = GroupResult(None, dict.fromkeys(range(self.group_size), error))
        finally:
            progress()
        for sample, error in result.failures.items():
            try:
                self._on_failure(error, attempt=0)
            except Exception as final:
                self._lose(sample, final, lost)
        return result

    async def _samples(
        self,
        task_id: int,
        data: dict[str, Any],
        which: Iterable[int],
        lost: dict[int, Exception],
        first_attempt: int = 0,
    ) -> dict[int, Any]:
        """The results of these episodes, each in a task of its own; None for lost ones."""
        samples = {
            i: asyncio.create_task(
                self._sample(task_id, i, data, first_attempt), name=f"task-{task_id}/{i}"
            )
            for i in which
        }
        try:
            ended = await asyncio.gather(*samples.values(), return_exceptions=self.is_eval)
            results = dict(zip(samples, ended, strict=True))
            for sample, result in results.items():
                if isinstance(result, BaseException):
                    self._lose(sample, result, lost)
            return results | dict.fromkeys(lost)
        except BaseException:
            for sample in samples.values():
                sample.cancel()
            await asyncio.gather(*samples.values(), return_exceptions=True)
            raise

    def _lose(self, sample: int, error: BaseException, lost: dict[int, Exception]) -> None:
        """An evaluation goes on without the episode; anything else ends with its error."""
        if not self.is_eval or isinstance(error, EngineLostError):
            raise error
        if not isinstance(error, Exception):
            raise error  # cancelled
        lost[sample] = error

    def _assemble(
        self, results: Sequence[Any], lost: dict[int, Exception]
    ) -> dict[str, torch.Tensor] | None:
        members = number_episodes(results)
        if not members and lost:
            raise next(iter(lost.values()))
        incomplete = len(members) < self.group_size
        if not members or (incomplete and self.drop_incomplete_group):
            return None
        if self.reward_normalization:
            members = normalize_rewards(members)
        group = concat_padded_tensors(members)
        check_trajectory_format(group)
        return group

    async def _sample(
        self, task_id: int, index: int, data: dict[str, Any], first_attempt: int
    ) -> Any:
        """One episode with its retries; each attempt gets a fresh copy of the row."""
        for attempt in range(first_attempt, self.limits.max_retries + 1):
            if attempt:
                delay_s = self.limits.retry_delay_s * 2 ** (attempt - 1)
                await asyncio.sleep(min(delay_s, MAX_RETRY_DELAY_S))
            try:
                with (
                    self._episode(task_id, index) as current,
                    waiting(f"workflow {type(self.workflow).__name__}"),
                ):
                    result = await self.workflow.arun_episode(self.engine, copy_row(data))
                record_time(current)
                return as_tensors(result)
            except EngineLostError:
                raise
            except Exception as error:
                self._on_failure(error, attempt)
            finally:
                progress()

    def _on_failure(self, error: Exception, attempt: int) -> None:
        """Counts a failed attempt of an episode; raises the error of the last one."""
        if isinstance(error, EngineLostError):
            raise error
        final = attempt == self.limits.max_retries or isinstance(error, RewardError)
        self.on_attempt_failed(error, not final)
        if final:
            raise error

    def _episode(
        self, task_id: int, sample: int, *, is_group: bool = False
    ) -> AbstractContextManager[Episode]:
        return episode(
            task_id=task_id,
            sample=sample,
            is_eval=self.is_eval,
            run_seed=self.run_seed,
            is_group=is_group,
        )


def copy_row(value: Any) -> Any:
    """A deep copy for every episode. Rows of plain text and numbers in dicts and lists, the usual
    case, are copied here: `copy.deepcopy` takes ten times as long."""
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]  # of Any it is unknown
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return value
    if kind is dict:
        return {key: copy_row(item) for key, item in value.items()}
    if kind is list:
        return [copy_row(item) for item in value]
    return copy.deepcopy(value)
