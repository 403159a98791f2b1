"""Where dumps go and what a line says, for one turn and for several."""

from __future__ import annotations

import json

import torch

from areal.rollout.trajectory import TrajectoryDump


class Letters:
    """A tokenizer whose token 1 is `a`, 2 is `b`, ..."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(96 + i) for i in ids)


def group() -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.tensor([[1, 2, 3, 4, 5], [1, 2, 6, 0, 0]], dtype=torch.int32),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool),
        "loss_mask": torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]], dtype=torch.int32),
        "versions": torch.tensor([[-1, -1, 4, 4, 6], [-1, -1, 5, -1, -1]], dtype=torch.int32),
        "rewards": torch.tensor([1.0, 0.0]),
    }


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_per_sample_without_padding(tmp_path):
    path = TrajectoryDump(tmp_path, Letters()).write(17, group(), 6, False)
    assert path == tmp_path / "rollout" / "6" / "17.jsonl"
    first, second = read(path)
    assert first == {
        "task_id": 17,
        "sample_idx": 0,
        "seqlen": 5,
        "prompt_len": 2,
        "head_version": 4,
        "tail_version": 6,
        "version_rle": [[4, 2], [6, 1]],
        "reward": 1.0,
        "prompt": "ab",
        "completion": "cde",
    }
    assert (second["seqlen"], second["completion"], second["version_rle"]) == (3, "f", [[5, 1]])


def test_evaluation_has_its_own_folder(tmp_path):
    path = TrajectoryDump(tmp_path, Letters()).write(3, group(), 6, True)
    assert path == tmp_path / "eval-rollout" / "6" / "3.jsonl"


def test_turns_become_segments(tmp_path):
    trajectory = {key: value[:1] for key, value in group().items()}
    trajectory["loss_mask"] = torch.tensor([[0, 1, 0, 1, 1]])
    trajectory["turn_ids"] = torch.tensor([[-1, 0, -1, 1, 1]])
    (record,) = read(TrajectoryDump(tmp_path, Letters()).write(1, trajectory, 6, False))
    assert record["segments"] == [
        {"turn": -1, "text": "a"},
        {"turn": 0, "text": "b"},
        {"turn": -1, "text": "c"},
        {"turn": 1, "text": "de"},
    ]


def test_sample_without_generated_tokens_is_all_prompt(tmp_path):
    trajectory = group()
    trajectory["loss_mask"][1] = 0
    trajectory["versions"][1] = -1
    second = read(TrajectoryDump(tmp_path, Letters()).write(1, trajectory, 6, False))[1]
    assert (second["prompt_len"], second["completion"], second["tail_version"]) == (3, "", -1)
