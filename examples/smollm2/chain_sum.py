"""Sums such as `27 - 14 + 61 =`: how rows are read and how answers are scored.

`grpo.yaml` names both functions by import path; `prepare.py` writes the files that `load` reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal.reward.answer_text import last_number


def load(
    path: str,
    *,
    split: str,
    tokenizer: Any,
    max_length: int | None = None,
    num_rows: int | None = None,
) -> list[dict[str, Any]]:
    """{"messages", "answer"} of `{path}/{split}.jsonl`. The prompts are all short."""
    file = Path(path) / f"{split}.jsonl"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: run examples/smollm2/prepare.py first")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:num_rows]]
    return [
        {"messages": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}
        for row in rows
    ]


def last_number_reward_fn(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **data: Any
) -> float:
    """1 when the last number of the completion is the answer, else 0."""
    found = last_number(completions)
    return float(found is not None and found.replace(",", "") == answer)
