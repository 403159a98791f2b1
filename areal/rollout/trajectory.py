"""One group's trajectory (a dict of tensors, see `api/io_struct.py`): its form, figures and bytes.

In: what a workflow returned. Out: tensors, also for an agent's interactions; a check that they are
a trajectory at all; the episode of each row; rewards normalised within a group; the span of weight
versions that wrote it, its mean reward, and its stored form (safetensors: data only, no code, so a
run database from elsewhere is safe to read).

Finished trajectories as text a human can read, one file per prompt.

    {logs}/rollout/{version}/{task_id}.jsonl         training
    {logs}/eval-rollout/{version}/{task_id}.jsonl    evaluation

`version` is that of the newest token of a training group, and of the evaluated weights. A file has
one line per sample: ids and lengths, the reward, prompt and completion as text, and `version_rle`,
the weights that wrote the completion as [[version, number of tokens], ...]. Episodes of several
turns also list their `segments`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import safetensors.numpy
import safetensors.torch
import torch

from areal.algorithm.advantage import check_turn_ids
from areal.algorithm.normalization import episode_means, normalize
from areal.api.interaction import InteractionWithTokenLogpReward
from areal.api.io_struct import EPISODE_KEY
from areal.api.json_text import well_formed
from areal.utils.data import MULTI_MODAL_KEY, concat_padded_tensors
from areal.utils.fs import atomic_write_text

if TYPE_CHECKING:
    from logging import Logger

    import torch


REQUIRED_KEYS = ("input_ids", "attention_mask")
_EPS = 1e-8  # of `gconfig.reward_normalization`


def check_trajectory_format(
    data: Any,
    batch_size: int | None = None,
    expected_keys: Collection[str] | None = None,
    logger: Logger | None = None,
) -> bool:
    """True, or TypeError or ValueError when a workflow returned what cannot be trained on.

    None (a rejection) and a dict of interactions are fine. Else it is a dict of tensors with the
    required keys, `input_ids` `[B, S]`, and every `expected_keys`; `multi_modal_input` is a list of
    B dicts. Every other value begins with `[B, S]` or is `[B]`: with a `logger` one that does not,
    a B other than `batch_size`, or turns that do not count up, is a warning, without one an error.
    """
    if data is None or is_interactions(data):
        return True
    _check_keys(data, expected_keys or ())
    rows, width = data["input_ids"].shape
    problems = [] if batch_size in (None, rows) else [f"it has {rows} rows, expected {batch_size}"]
    for key, value in data.items():
        if key == MULTI_MODAL_KEY:
            _check_multi_modal(value, rows)
        elif value.dim() == 0 or value.shape[:2] != (rows, width)[: value.dim()]:
            problems.append(
                f"trajectory[{key!r}] must begin with [B, S] = {(rows, width)} or be [B], "
                f"got {tuple(value.shape)}"
            )
    if not problems and {"turn_ids", "loss_mask"} <= data.keys():
        try:
            check_turn_ids(data["turn_ids"], data["loss_mask"])
        except ValueError as error:
            problems.append(str(error))
    for problem in problems:
        if logger is None:
            raise ValueError("; ".join(problems))
        logger.warning("%s", problem)
    return True


def _check_keys(data: Any, expected_keys: Collection[str]) -> None:
    if not _is_dict(data) or not data:
        raise TypeError(
            "a workflow must return a non-empty dict of tensors, a dict of interactions, or None; "
            f"got {data!r:.200}"
        )
    missing = [key for key in dict.fromkeys((*REQUIRED_KEYS, *expected_keys)) if key not in data]
    if missing:
        raise ValueError(f"a trajectory needs {missing}, got only {sorted(data)}")
    for key, value in data.items():
        if not isinstance(value, torch.Tensor) and key != MULTI_MODAL_KEY:
            raise TypeError(f"trajectory[{key!r}] must be a tensor, got {type(value).__name__}")
    shape = data["input_ids"].shape
    if len(shape) != 2:
        raise ValueError(f"trajectory['input_ids'] must be [B, S], got {tuple(shape)}")


def _check_multi_modal(value: Any, num_rows: int) -> None:
    rows = cast(list[Any], value) if isinstance(value, list) else None
    if rows is None or len(rows) != num_rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(
            f"trajectory[{MULTI_MODAL_KEY!r}] must be a list of {num_rows} dicts (one per row, "
            f"{{}} without images), got {value!r:.100}"
        )
    for row in rows:
        for key, tensor in row.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"trajectory[{MULTI_MODAL_KEY!r}][...][{key!r}] must be a tensor, got "
                    f"{type(tensor).__name__}"
                )


def is_interactions(result: Any) -> TypeGuard[dict[str, InteractionWithTokenLogpReward]]:
    """Whether an agent's workflow returned this: {completion id: interaction}."""
    return (
        _is_dict(result)
        and len(result) > 0
        and all(isinstance(value, InteractionWithTokenLogpReward) for value in result.values())
    )


def _is_dict(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def as_tensors(result: Any) -> dict[str, Any] | None:
    """What one episode returned as one dict of tensors, a row per interaction of an agent.

    The whole check comes when the group is together; here is refused what could not get there.
    """
    if is_interactions(result):
        return concat_padded_tensors([item.to_tensor_dict() for item in result.values()])
    if result is not None and not _is_dict(result):
        check_trajectory_format(result)  # raises
    return result


def number_episodes(results: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """The episodes of a group that gave a trajectory, each row with `episode_ids`: its place among
    the samples of the prompt. Whatever rows an episode exports, it stays one episode."""
    members: list[dict[str, Any]] = []
    for index, member in enumerate(results):
        if member is not None:
            _check_keys(member, ())
            ids = torch.full(member["input_ids"].shape[:1], index, dtype=torch.int32)
            members.append({**member, EPISODE_KEY: ids})
    return members


def normalize_rewards(members: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """(r - mean) / (biased std + 1e-8) over the episodes of a group; `original_rewards` are kept.

    A member is an episode and counts once; all its rows are compared with the same mean.
    """
    for member in members:
        if "rewards" not in member:
            raise ValueError(
                "gconfig.reward_normalization needs 'rewards' in each trajectory, got only "
                f"{sorted(member)}"
            )
    rows = [len(member["rewards"]) for member in members]
    rewards = normalize(
        torch.cat([member["rewards"].float() for member in members]),
        group_sizes=[sum(rows)],
        mean_level="group",
        std_level="group",
        std_unbiased=False,
        eps=_EPS,
        episode_ids=torch.repeat_interleave(torch.arange(len(members)), torch.tensor(rows)),
    )
    return [
        {**member, "rewards": normalized, "original_rewards": member["rewards"]}
        for member, normalized in zip(members, torch.split(rewards, rows), strict=True)
    ]


def version_span(trajectory: dict[str, torch.Tensor]) -> tuple[int, int] | None:
    """Oldest and newest weight version among the generated tokens; None when it is not recorded."""
    if "versions" not in trajectory:
        return None
    versions = trajectory["versions"].numpy(force=True)
    # Prompt tokens carry -1. Padding carries 0, which is a version too: the mask tells them apart.
    real = trajectory["attention_mask"].numpy(force=True).astype(bool)
    generated = versions[real & (versions >= 0)]
    if generated.size == 0:
        return None
    return int(generated.min()), int(generated.max())


def mean_reward(trajectory: dict[str, torch.Tensor]) -> float | None:
    """Of the episodes, from the rewards as the workflow gave them."""
    rewards = trajectory.get("original_rewards", trajectory.get("rewards"))
    if rewards is None:
        return None
    return float(episode_means(rewards, trajectory.get(EPISODE_KEY)).mean())


def encode(trajectory: dict[str, Any]) -> bytes:
    """The safetensors bytes. Runs for every group, so it takes the library's quicker way."""
    if MULTI_MODAL_KEY in trajectory:
        trajectory = _flatten_images(trajectory)
    if any(tensor.dtype == torch.bfloat16 for tensor in trajectory.values()):
        tensors = {key: value.detach().cpu().contiguous() for key, value in trajectory.items()}
        return safetensors.torch.save(tensors)  # numpy knows no bfloat16; a third of the speed
    return safetensors.numpy.save(
        {key: value.contiguous().numpy(force=True) for key, value in trajectory.items()}
    )


def decode(data: bytes) -> dict[str, Any]:
    """Keys come back sorted: the library reads them in no fixed order."""
    tensors = dict(sorted(safetensors.torch.load(data).items()))
    if MULTI_MODAL_KEY not in tensors:
        return tensors
    return _unflatten_images(tensors)


# A list of dicts of tensors as tensors: `multi_modal_input` counts the rows, and
# `multi_modal_input/3/pixel_values` is a tensor of row 3.


def _flatten_images(trajectory: dict[str, Any]) -> dict[str, torch.Tensor]:
    flat = dict(trajectory)
    rows = flat.pop(MULTI_MODAL_KEY)
    flat[MULTI_MODAL_KEY] = torch.tensor(len(rows))
    for place, row in enumerate(rows):
        flat |= {f"{MULTI_MODAL_KEY}/{place}/{key}": tensor for key, tensor in row.items()}
    return flat


def _unflatten_images(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    rows: list[dict[str, torch.Tensor]] = [{} for _ in range(int(tensors[MULTI_MODAL_KEY]))]
    trajectory: dict[str, Any] = {}
    for key, tensor in tensors.items():
        if not key.startswith(f"{MULTI_MODAL_KEY}/"):
            trajectory[key] = tensor
            continue
        _, place, name = key.split("/", 2)
        rows[int(place)][name] = tensor
    return {**trajectory, MULTI_MODAL_KEY: rows}


class TrajectoryDump:
    """Writes trajectories below `logs`; `tokenizer` turns ids into text."""

    def __init__(self, logs: Path, tokenizer: Any) -> None:
        self._logs = logs
        self._tokenizer = tokenizer

    def write(
        self, task_id: int, trajectory: Mapping[str, torch.Tensor], version: int, is_eval: bool
    ) -> Path:
        """Write the group of one prompt; an older file of the same task and version is replaced."""
        records = [
            {"task_id": task_id, "sample_idx": i, **self._describe(_row(trajectory, i))}
            for i in range(len(trajectory["input_ids"]))
        ]
        kind = "eval-rollout" if is_eval else "rollout"
        path = self._logs / kind / str(version) / f"{task_id}.jsonl"
        lines = (well_formed(json.dumps(record, ensure_ascii=False)) + "\n" for record in records)
        # Not flushed to the disk: a dump is for reading, and losing one to a power cut is no harm.
        atomic_write_text(path, "".join(lines), durable=False)
        return path

    def _describe(self, row: Mapping[str, Any]) -> dict[str, Any]:
        ids = row["input_ids"]
        prompt_len = row["loss_mask"].index(1) if 1 in row["loss_mask"] else len(ids)
        versions = [v for v in row["versions"] if v >= 0]
        record = {
            "seqlen": len(ids),
            "prompt_len": prompt_len,
            "head_version": min(versions, default=-1),
            "tail_version": max(versions, default=-1),
            "version_rle": [[v, len(list(run))] for v, run in groupby(versions)],
            "reward": row["rewards"],
            "prompt": self._tokenizer.decode(ids[:prompt_len]),
            "completion": self._tokenizer.decode(ids[prompt_len:]),
        }
        if "turn_ids" in row and max(row["turn_ids"]) > 0:
            record["segments"] = self._segments(ids, row["turn_ids"])
        return record

    def _segments(self, ids: Sequence[int], turn_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Runs of one author: the model's turn, or -1 for text it did not write."""
        segments: list[dict[str, Any]] = []
        start = 0
        for turn, run in groupby(turn_ids):
            end = start + len(list(run))
            segments.append({"turn": turn, "text": self._tokenizer.decode(ids[start:end])})
            start = end
        return segments


def _row(trajectory: Mapping[str, torch.Tensor], index: int) -> dict[str, Any]:
    """One sample as Python lists, without its padding."""
    length = int(trajectory["attention_mask"][index].sum())
    row: dict[str, Any] = {"rewards": float(trajectory["rewards"][index])}
    for key in ("input_ids", "loss_mask", "versions", "turn_ids"):
        if key in trajectory:
            values = trajectory[key][index, :length]
            row[key] = values.tolist()  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
    return row
