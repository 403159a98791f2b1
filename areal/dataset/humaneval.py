"""HumanEval: Python functions to complete, with unit tests.

`path` is the bare name `humaneval` (the hub's openai/openai_humaneval), another hub name, a folder
with `{split}.jsonl` files, or one JSON-lines file. Columns: prompt (the head of the function), test
(defines `check(candidate)`), entry_point (its name), canonical_solution (its body).
"""

from __future__ import annotations

from typing import Any

from areal.dataset.chat_rows import Rows, drop_long_prompts, user_says
from areal.dataset.source_files import read_rows

HUB_NAME = "openai/openai_humaneval"
INSTRUCTION = "Complete this Python function. Answer with the whole function in one code block.\n\n"
_COLUMNS = ("prompt", "test", "entry_point", "canonical_solution")


def get_humaneval_rl_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None
) -> Rows:
    """{"messages", "tests", "starter", "solution"}; the unit_tests reward reads the middle two."""
    source = HUB_NAME if path == "humaneval" else path
    rows = [_rl_row(row) for row in read_rows(source, split=split, columns=_COLUMNS)]
    return drop_long_prompts(rows, tokenizer, max_length)


def _rl_row(row: dict[str, Any]) -> dict[str, Any]:
    head = row["prompt"]
    return {
        "messages": user_says(f"{INSTRUCTION}```python\n{head}```"),
        "tests": f"{row['test']}\ncheck({row['entry_point']})\n",
        "starter": head,  # its imports and helpers, which an answer need not repeat
        "solution": f"```python\n{head}{row['canonical_solution']}```",
    }
