"""The trajectory of one group (a dict of tensors, see `api/io_struct.py`): format, encoding, dump.

In: the result of a workflow. Out: tensors, also for an agent's interactions; a format check; the
episode of each row; rewards normalized within a group; the span of weight versions that generated
it, its mean reward, and its stored form (safetensors: data only, so a run database from elsewhere
is safe to read).

`TrajectoryDump` writes finished trajectories as text, one file per prompt, one line per sample:

    {logs}/rollout/{version}/{task_id}.jsonl         training
    {logs}/eval-rollout/{version}/{task_id}.jsonl    evaluation

`version` is that of a training group's newest token, or of the evaluated weights. `version_rle`
lists the weights that generated the completion as [[version, number of tokens], ...]; multi-turn
episodes also have `segments`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
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
    """True, or TypeError or ValueError if the result of a workflow cannot be trained on.

    Valid: None (a rejection), a dict of interactions, or a dict of tensors with the required keys,
    `input_ids` `[B, S]`, and every `expected_keys`; `multi_modal_input` is a list of B dicts. Every
    other value starts with `[B, S]` or is `[B]`. A violation of this last rule, a B other than
    `batch_size`, or turns out of order is a warning with a `logger`, an error without.
    """
    if data is None or is_interactions(data):
        return True
    _check_keys(data, expected_keys or ())
    shape = data["input_ids"].shape
    rows = shape[0]
    problems = [] if batch_size in (None, rows) else [f"it has {rows} rows, expected {batch_size}"]
    for key, value in data.items():
        if key == MULTI_MODAL_KEY:
            _check_multi_modal(value, rows)
        elif (its := value.shape) != shape and (not its or its[:2] != shape[: len(its)]):
            problems.append(
                f"trajectory[{key!r}] must begin with [B, S] = {tuple(shape)} or be [B], "
                f"got {tuple(its)}"
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
    """Whether this is the result of an agent's workflow: {completion id: interaction}."""
    return (
        _is_dict(result)
        and len(result) > 0
        and all(isinstance(value, InteractionWithTokenLogpReward) for value in result.values())
    )


def _is_dict(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def as_tensors(result: Any) -> dict[str, Any] | None:
    """The result of one episode as one dict of tensors, with a row per interaction of an agent.

    The full check runs on the whole group; here only results that cannot be concatenated fail.
    """
    if is_interactions(result):
        return concat_padded_tensors([item.to_tensor_dict() for item in result.values()])
    if result is not None and not _is_dict(result):
        check_trajectory_format(result)  # raises
    return result


def number_episodes(results: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """The episodes of a group that are not rejected, with `episode_ids`: the sample index of each
    row. An episode that exports several rows is still one episode."""
    members: list[dict[str, Any]] = []
    for index, member in enumerate(results):
        if member is not None:
            _check_keys(member, ())
            ids = torch.full(member["input_ids"].shape[:1], index, dtype=torch.int32)
            members.append({**member, EPISODE_KEY: ids})
    return members


def number_rows(group: dict[str, Any], num_samples: int) -> dict[str, Any]:
    """As `number_episodes`, for a group that a workflow made at once, which is checked whole: row i
    is sample i."""
    _check_rows(group, num_samples)
    # Not torch.arange, which releases the GIL and waits for the trainer to give it back.
    ids = torch.from_numpy(np.arange(num_samples, dtype=np.int32))  # pyright: ignore[reportUnknownMemberType]  # torch has no type for it
    return {**group, EPISODE_KEY: ids}


def split_rows(group: dict[str, Any], num_samples: int) -> list[dict[str, Any]]:
    """Each row of a group as an episode of its own, without its padding."""
    _check_rows(group, num_samples)
    lengths = group["attention_mask"].sum(1).tolist()
    width = group["input_ids"].shape[1]
    return [
        {
            key: value[i : i + 1, :length] if _is_wide(value, width) else value[i : i + 1]
            for key, value in group.items()
        }
        for i, length in enumerate(lengths)
    ]


def _check_rows(group: dict[str, Any], num_samples: int) -> None:
    check_trajectory_format(group)
    if len(group["input_ids"]) != num_samples:
        raise ValueError(
            f"arun_group: expected a row for each of {num_samples} samples that did not fail, got "
            f"{len(group['input_ids'])} rows"
        )


def _is_wide(value: Any, width: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == width


def normalize_rewards(members: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """(r - mean) / (biased std + 1e-8) over the episodes of a group; `original_rewards` are kept.

    A member is an episode and counts once; all its rows use the same mean.
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
    """Oldest and newest weight version of the generated tokens; None if not recorded."""
    if "versions" not in trajectory:
        return None
    versions = trajectory["versions"].numpy(force=True)
    # Prompt tokens carry -1. Padding carries 0, which is also a version, hence the mask.
    real = trajectory["attention_mask"].numpy(force=True).astype(bool)
    generated = versions[real & (versions >= 0)]
    if generated.size == 0:
        return None
    return int(generated.min()), int(generated.max())


def mean_reward(trajectory: dict[str, torch.Tensor]) -> float | None:
    """Mean over episodes of the unnormalized rewards."""
    rewards = episode_rewards(trajectory)
    return None if rewards is None else math.fsum(rewards) / len(rewards)


def episode_rewards(trajectory: dict[str, torch.Tensor]) -> list[float] | None:
    """The unnormalized reward of each episode of a group; None if it has no rewards."""
    rewards = trajectory.get("original_rewards", trajectory.get("rewards"))
    if rewards is None:
        return None
    ids = trajectory.get(EPISODE_KEY)
    # An episode is one row unless an agent made it. Plain Python: this runs for every group.
    if ids is None or len(set(_numbers(ids))) == len(rewards):
        return _numbers(rewards)
    return _numbers(episode_means(rewards, ids))


def _numbers(vector: torch.Tensor) -> list[float]:
    return cast(list[float], vector.tolist())  # pyright: ignore[reportUnknownMemberType]  # untyped in torch


def encode(trajectory: dict[str, Any]) -> bytes:
    """The safetensors bytes; this runs for every group."""
    if MULTI_MODAL_KEY in trajectory:
        trajectory = _flatten_images(trajectory)
    if any(tensor.dtype not in _STORED for tensor in trajectory.values()):
        tensors = {key: value.detach().cpu().contiguous() for key, value in trajectory.items()}
        return safetensors.torch.save(tensors)  # such as bfloat16, which numpy lacks
    # Sorted: equal trajectories have equal bytes, whether a worker or the controller made them.
    tensors = sorted(trajectory.items())
    layout = tuple((key, value.dtype, tuple(value.shape)) for key, value in tensors)
    arrays = [value.contiguous().numpy(force=True) for _, value in tensors]
    return b"".join((_head_of(layout), *arrays))


# Little-endian, as numpy has them on every machine that torch runs on.
_STORED = {
    torch.int32: "I32",
    torch.float32: "F32",
    torch.bool: "BOOL",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.uint8: "U8",
    torch.int16: "I16",
}


@lru_cache(maxsize=1024)
def _head_of(layout: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> bytes:
    """What safetensors writes before the data. Cached: many groups have one layout, and writing it
    takes longer than copying the data."""
    entries: dict[str, Any] = {}
    end = 0
    for key, dtype, shape in layout:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[key] = {"dtype": _STORED[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def decode(data: bytes) -> dict[str, Any]:
    """Keys are sorted: safetensors returns them in no fixed order."""
    tensors = dict(sorted(safetensors.torch.load(data).items()))
    if MULTI_MODAL_KEY not in tensors:
        return tensors
    return _unflatten_images(tensors)


# Stored form of a list of dicts of tensors: `multi_modal_input` holds the number of rows, and
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
        """Write the group of one prompt; replaces a file of the same task and version."""
        records = [
            {"task_id": task_id, "sample_idx": i, **self._describe(_row(trajectory, i))}
            for i in range(len(trajectory["input_ids"]))
        ]
        kind = "eval-rollout" if is_eval else "rollout"
        path = self._logs / kind / str(version) / f"{task_id}.jsonl"
        lines = (well_formed(json.dumps(record, ensure_ascii=False)) + "\n" for record in records)
        # No fsync: losing a dump to a power cut is harmless.
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
        """Runs of equal turn id: a turn of the model, or -1 for text it did not generate."""
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
