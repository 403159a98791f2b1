"""MATH-500: competition mathematics with short final answers in LaTeX.

`path` is the bare name `math500` (the hub's HuggingFaceH4/MATH-500), another hub name, a folder
with `{split}.jsonl` files, or one JSON-lines file. Columns: problem, answer.
"""

from __future__ import annotations

from typing import Any

from areal.dataset.chat_rows import Rows, drop_long_prompts, user_says
from areal.dataset.gsm8k import INSTRUCTION
from areal.dataset.source_files import read_rows

HUB_NAME = "HuggingFaceH4/MATH-500"


def get_math500_rl_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None
) -> Rows:
    """{"messages", "answer"}; the math_verify reward reads the answer."""
    source = HUB_NAME if path == "math500" else path
    rows = [
        {"messages": user_says(row["problem"] + INSTRUCTION), "answer": row["answer"]}
        for row in read_rows(source, split=split, columns=("problem", "answer"))
    ]
    return drop_long_prompts(rows, tokenizer, max_length)
