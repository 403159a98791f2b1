"""Scores the stored trajectories of a run again, with another reward or a corrected one.

    run.db (read only) -> text of each sample -> reward, in its sandbox -> old and new score

A run keeps the trajectories that a recover point may need, so usually those of its last steps. The
row of a prompt is read again from the run's `train_dataset`; the text is that of a sample's last
turn, as the `rlvr` workflow passes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal.api.config.experiment import PPOConfig
from areal.dataset import get_custom_dataset
from areal.evaluation.settings import run_config
from areal.reward import get_reward_fn
from areal.rollout.failures import describe
from areal.rollout.trajectory import decode
from areal.run.database import open_read_only, read_ledger_view
from areal.run.paths import RunPaths
from areal.sandbox.pool import AsyncRewardWrapper, RewardError
from areal.utils.tokenizer import load_hf_tokenizer
from areal.workflow.chat import REWARD_ARGUMENTS

_AT_ONCE = 256  # calls in the sandbox


@dataclass(frozen=True, slots=True)
class Rescored:
    task_id: int
    sample: int
    step: int | None  # that trained on it
    old: float
    new: float | None  # None: the reward failed
    why: str  # of a failure
    completion: str

    @property
    def has_changed(self) -> bool:
        return self.new is not None and self.new != self.old


@dataclass(frozen=True, slots=True)
class _Stored:
    task_id: int
    sample: int
    step: int | None
    reward: float
    prompt_ids: list[int]
    output_ids: list[int]
    row: dict[str, Any]


def reverify(folder: Path, reward: str) -> list[Rescored]:
    """In the order of prompts. ValueError if the run has no trajectory."""
    paths = RunPaths(folder)
    reward_fn = get_reward_fn(reward, key="--reward")
    config = run_config(paths)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    section = config.train_dataset
    rows = get_custom_dataset(section.split, section, tokenizer)
    stored = _read(paths, rows)
    if not stored:
        raise ValueError(
            f"{folder} has no stored trajectories: a run keeps those of its steps since the oldest "
            "recover point (recover.mode=on; recover.keep holds more)"
        )
    options = config.workflow_kwargs.get("reward_kwargs") or {}
    wrapper = AsyncRewardWrapper(reward_fn, **options)
    try:
        return asyncio.run(_score_all(wrapper, stored, tokenizer, config))
    finally:
        wrapper.close()


def _read(paths: RunPaths, rows: Sequence[dict[str, Any]]) -> list[_Stored]:
    with closing(open_read_only(paths.database)) as connection:
        connection.execute("BEGIN")  # one snapshot of a live run
        read_ledger_view(connection, paths.database)  # refuses another format
        found = connection.execute(
            """SELECT task_id, row, step, data FROM tasks JOIN trajectories USING (task_id)
               ORDER BY task_id"""
        ).fetchall()
    stored = []
    for task in found:
        if task["row"] >= len(rows):
            raise ValueError(
                f"train_dataset.path: it has {len(rows)} rows now, and prompt {task['task_id']} is "
                f"row {task['row']}: the data set has changed since the run"
            )
        stored += _samples(task, rows[task["row"]])
    return stored


def _samples(task: Any, row: dict[str, Any]) -> list[_Stored]:
    group = decode(task["data"])
    rewards = group.get("original_rewards", group["rewards"]).tolist()
    samples = []
    for i, reward in enumerate(rewards):
        length = int(group["attention_mask"][i].sum())
        ids, said = group["input_ids"][i, :length].tolist(), group["loss_mask"][i, :length].tolist()
        # The last turn: from the end back to a token that the model did not generate.
        start = next((at + 1 for at in range(length - 1, -1, -1) if not said[at]), 0)
        samples.append(
            _Stored(task["task_id"], i, task["step"], reward, ids[:start], ids[start:], row)
        )
    return samples


async def _score_all(
    wrapper: AsyncRewardWrapper, stored: Sequence[_Stored], tokenizer: Any, config: PPOConfig
) -> list[Rescored]:
    stops = set(config.gconfig.new_with_stop_and_pad_token_ids(tokenizer).stop_token_ids)
    turn = asyncio.Semaphore(_AT_ONCE)

    async def score(one: _Stored) -> Rescored:
        ids = one.output_ids
        text = tokenizer.decode(ids[:-1] if ids and ids[-1] in stops else ids)
        columns = {key: v for key, v in one.row.items() if key not in REWARD_ARGUMENTS}
        new, why = None, ""
        async with turn:
            try:
                prompt = tokenizer.decode(one.prompt_ids)
                given = await wrapper(prompt, text, one.prompt_ids, ids, **columns)
                new = float(np.float32(given))  # as the run has stored it
            except RewardError as error:  # named in the result, never a score
                why = describe(error)
        return Rescored(one.task_id, one.sample, one.step, one.reward, new, why, text)

    return await asyncio.gather(*map(score, stored))
