r"""ToRL: competition mathematics to be solved with or without tools.

`path` is a Parquet file or a folder with `{split}.parquet`, as in the project GAIR-NLP/ToRL
(data/torl_data), or a hub name. Columns: prompt (a chat) and reward_model {"ground_truth", ...}.
"""

from __future__ import annotations

from typing import Any

from areal.dataset.chat_rows import Rows, drop_long_prompts
from areal.dataset.source_files import read_rows


def get_torl_data_rl_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None
) -> Rows:
    """{"messages", "answer"}; the math_verify reward reads the answer."""
    source = read_rows(path, split=split, columns=("prompt", "reward_model"))
    rows = [
        {"messages": row["prompt"], "answer": _ground_truth(row, number, path)}
        for number, row in enumerate(source)
    ]
    return drop_long_prompts(rows, tokenizer, max_length)


def _ground_truth(row: dict[str, Any], number: int, path: str) -> str:
    verdict = row["reward_model"]
    if not isinstance(verdict, dict) or verdict.get("ground_truth") is None:
        raise ValueError(
            f"data set {path!r}: row {number} has no reward_model.ground_truth; found {verdict!r}"
        )
    return str(verdict["ground_truth"])
