"""Finished trajectories as text a human can read, one file per prompt.

    {logs}/rollout/{version}/{task_id}.jsonl         training
    {logs}/eval-rollout/{version}/{task_id}.jsonl    evaluation

`version` is that of the newest token of a training group, and of the evaluated weights. A file has
one line per sample: ids and lengths, the reward, prompt and completion as text, and `version_rle`,
the weights that wrote the completion as [[version, number of tokens], ...]. Episodes of several
turns also list their `segments`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.json_text import well_formed
from areal.utils.fs import atomic_write_text

if TYPE_CHECKING:
    import torch


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
