"""Reward: computed again for the same tokens and row, and for the other rows.

A reward that fits another row's answer better than its own was given for the wrong row; one that
fits none is not a function of the row (a judge that samples, shaping by the workflow). Where no two
samples of a prompt differ, the row's own answer is tried against nonsense (reference.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from areal.doctor.reference import Row, Told, Untold, tell
from areal.doctor.report import Chart
from areal.reward import get_reward_fn
from areal.rollout.source import Prompt
from areal.sandbox.pool import AsyncRewardWrapper, RewardError
from areal.workflow import WORKFLOWS
from areal.workflow.chat import REWARD_ARGUMENTS

if TYPE_CHECKING:
    from areal.api.config.experiment import PPOConfig
    from areal.rollout.event_loop import TaskRunner

_MAX_SAMPLES = 16  # that are graded again, each for up to _MAX_ROWS rows
_MAX_ROWS = 4

_READ_REPLY = "compare the reply, given as `completions`, with a column that the rows have"

Graded = dict[int, list[float]]  # by row, the reward of each sample under that row's columns


@dataclass(frozen=True, slots=True)
class Sample:
    """One graded reply: a row of a trajectory with one turn."""

    prompt: Prompt
    prompt_ids: list[int]
    reply_ids: list[int]
    reward: float


def single_turn_samples(
    prompts: Sequence[Prompt], trajectories: Sequence[dict[str, Any]]
) -> list[Sample]:
    """Rows of one reply each, with the reward as the reward function gave it."""
    samples = []
    for prompt, trajectory in zip(prompts, trajectories, strict=True):
        rewards = rewards_of(trajectory)
        for row, mask in enumerate(trajectory["loss_mask"].bool()):
            sampled = mask.nonzero().flatten()
            if not len(sampled) or int(sampled[-1] - sampled[0]) + 1 != len(sampled):
                continue  # no reply, or several
            start, end = int(sampled[0]), int(sampled[-1]) + 1
            ids = trajectory["input_ids"][row].tolist()
            samples.append(Sample(prompt, ids[:start], ids[start:end], rewards[row].item()))
    return samples[:_MAX_SAMPLES]


def check_rewards(
    chart: Chart,
    config: PPOConfig,
    runner: TaskRunner,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    trajectories: Sequence[dict[str, Any]],
) -> None:
    rewards = torch.cat([rewards_of(one) for one in trajectories]).float()
    if not bool(rewards.isfinite().all()):
        return chart.fault(
            "reward", "a reward is not finite", change="return a finite number, or raise"
        )
    samples = single_turn_samples(prompts, trajectories)
    grader = None if config.reward_fn is None else _Grader(config, runner, tokenizer)
    if grader is None or not samples:
        chart.unseen("reward", "no reply that a reward function graded alone")
    else:
        _check_samples(chart, grader, samples)
    if grader is not None:
        _check_spread(chart, grader, prompts, trajectories)


@dataclass(frozen=True, slots=True)
class _Grader:
    """Calls the reward function of `config`, in processes that end with each question."""

    config: PPOConfig
    runner: TaskRunner
    tokenizer: Any

    def grade(self, samples: Sequence[Sample]) -> Graded:
        tokenizer = self.tokenizer
        rows = {one.prompt.row: one.prompt.data for one in samples}
        stops = {tokenizer.eos_token_id, tokenizer.pad_token_id}

        async def grade() -> Graded:
            calls = {
                number: [_call(reward, tokenizer, one, data, stops) for one in samples]
                for number, data in list(rows.items())[:_MAX_ROWS]
            }
            return {number: await asyncio.gather(*row) for number, row in calls.items()}

        with self._reward() as reward:
            return self.runner.run(grade()).result()

    def ask(self, rows: Sequence[Row]) -> Told | Untold:
        name = self.config.reward_fn
        assert name is not None

        def encode(text: str) -> list[int]:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]

        with self._reward() as reward:
            return self.runner.run(tell(reward, name, get_reward_fn(name), rows, encode)).result()

    def _reward(self) -> closing[AsyncRewardWrapper]:
        function = get_reward_fn(self.config.reward_fn)
        options = self.config.workflow_kwargs.get("reward_kwargs", {})
        return closing(AsyncRewardWrapper(function, **options))


def _check_samples(chart: Chart, grader: _Grader, samples: Sequence[Sample]) -> None:
    """Their rewards, computed again."""
    try:
        graded = grader.grade(samples)
        if wrong := _wrong(samples, graded):
            is_steady = grader.grade(samples) == graded
            return _accuse(chart, grader.config, samples, graded, wrong, is_steady=is_steady)
    except RewardError as error:
        return chart.fault("reward", str(error), change="correct the reward function")
    chart.ok("reward", f"{len(samples)} rewards, computed again, are equal")


def _check_spread(
    chart: Chart,
    grader: _Grader,
    prompts: Sequence[Prompt],
    trajectories: Sequence[dict[str, Any]],
) -> None:
    """Samples of a prompt whose rewards differ show that the reward reads replies; if all are the
    same, other texts are tried."""
    if any(len(set(rewards_of(one).tolist())) > 1 for one in trajectories):
        return
    rows = [
        _row(prompt, trajectory, grader.tokenizer)
        for prompt, trajectory in zip(prompts[:_MAX_ROWS], trajectories, strict=False)
        if isinstance(prompt.data, Mapping)
    ]
    told = grader.ask(rows)
    alike = "no two samples of a prompt earn different rewards"
    if isinstance(told, Told):
        return chart.ok(
            "reward",
            f"{alike}, but other texts earn {told.lowest:g} to {told.highest:g}: the task is too "
            "hard or solved, and teaches nothing if it stays so",
        )
    if told.is_certain:
        return chart.fault("reward", f"{alike}: {told.why}", change=_READ_REPLY)
    if told.is_suspect:
        return chart.doubt("reward", f"{alike}, and {told.why}")
    text = f"{alike}, which teaches nothing if it stays so; not compared with other texts: "
    is_graded = any(one.stage == "reward" and one.state == "ok" for one in chart.findings)
    (chart.ok if is_graded else chart.unseen)("reward", text + told.why)


def rewards_of(trajectory: dict[str, Any]) -> torch.Tensor:
    """As the reward function gave them [B]."""
    return trajectory.get("original_rewards", trajectory["rewards"])


def _row(prompt: Prompt, trajectory: dict[str, Any], tokenizer: Any) -> Row:
    mask = trajectory["loss_mask"][0].bool()
    ids = trajectory["input_ids"][0, : int(mask.int().argmax())].tolist()
    return Row(prompt.row, prompt.data, tokenizer.decode(ids), ids)


def _wrong(samples: Sequence[Sample], graded: Graded) -> list[int]:
    """Samples with another reward than that of their own row."""
    return [
        i
        for i, one in enumerate(samples)
        if one.prompt.row in graded and not _same(one.reward, graded[one.prompt.row][i])
    ]


def _accuse(
    chart: Chart,
    config: PPOConfig,
    samples: Sequence[Sample],
    graded: Graded,
    wrong: Sequence[int],
    *,
    is_steady: bool,
) -> None:
    """`is_steady`: the reward function gave the same numbers twice."""
    first = samples[wrong[0]]
    text = (
        f"{len(wrong)} of {len(samples)} rewards differ when computed again: {first.reward:g} is "
        f"stored for row {first.prompt.row}, which gives {graded[first.prompt.row][wrong[0]]:g}"
    )
    if not is_steady:
        return chart.unseen("reward", f"{text}; but the function varies from call to call")
    groups = {samples[i].prompt.row for i in wrong}
    permuted = [row for row in groups if _is_permuted(row, samples, graded)]
    if 2 * len(permuted) >= len(groups):
        return chart.fault(
            "reward",
            f"{text}; they are the rewards of other samples of the same prompt",
            change="keep each reward with the tokens that it was computed for",
        )
    explained = [row for row in groups if _fits_another(row, samples, graded)]
    if 2 * len(explained) >= len(groups):
        return chart.fault(
            "reward",
            f"{text}; they are the reward of another row",
            change="pass the columns of the sample's own row to the reward function",
        )
    if config.workflow in WORKFLOWS:
        return chart.fault(
            "reward",
            text,
            change="look at what changed: the reward function, the data set, or the stored rewards",
        )
    chart.unseen("reward", f"{text}; no other row explains it, so the workflow may shape it")


def _fits_another(row: int, samples: Sequence[Sample], graded: Graded) -> bool:
    """Whether another row gives the rewards of this group. Equal rewards prove nothing: a workflow
    may set them to 0."""
    group = [i for i, one in enumerate(samples) if one.prompt.row == row]
    if len({samples[i].reward for i in group}) < 2:
        return False
    others = [rewards for number, rewards in graded.items() if number != row]
    return any(all(_same(samples[i].reward, given[i]) for i in group) for given in others)


def _is_permuted(row: int, samples: Sequence[Sample], graded: Graded) -> bool:
    """Whether this group has its own rewards, at least two different ones, in another order."""
    group = [i for i, one in enumerate(samples) if one.prompt.row == row]
    found = sorted(samples[i].reward for i in group)
    expected = sorted(graded[row][i] for i in group)
    return found[0] != found[-1] and all(map(_same, found, expected))


def _call(
    reward: AsyncRewardWrapper, tokenizer: Any, one: Sample, data: dict[str, Any], stops: set[int]
) -> asyncio.Future[float]:
    """As the shipped workflows call it."""
    text_ids = one.reply_ids[:-1] if one.reply_ids[-1] in stops else one.reply_ids
    return reward.start(
        tokenizer.decode(one.prompt_ids),
        tokenizer.decode(text_ids),
        one.prompt_ids,
        one.reply_ids,
        **{key: value for key, value in data.items() if key not in REWARD_ARGUMENTS},
    )


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(1.0, abs(a), abs(b))  # stored in float32
