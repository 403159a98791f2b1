"""GSM8K: grade-school word problems with worked solutions that end in `#### number`.

`path` is the bare name `gsm8k` (the hub's openai/gsm8k), another hub name, a folder with
`{split}.jsonl` files or a saved data set, or one JSON-lines file. Columns: question, answer.
"""

from __future__ import annotations

from typing import Any

from areal.dataset.chat_rows import Rows, drop_long_prompts, sft_rows, user_says
from areal.dataset.source_files import read_rows

HUB_NAME = "openai/gsm8k"
INSTRUCTION = "\nPlease put your final answer within \\boxed{}."


def get_gsm8k_rl_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None
) -> Rows:
    """{"messages", "answer"}; `answer` is the worked solution, which the gsm8k reward reads."""
    rows = [
        {"messages": user_says(row["question"] + INSTRUCTION), "answer": row["answer"]}
        for row in _read(path, split)
    ]
    return drop_long_prompts(rows, tokenizer, max_length)


def get_gsm8k_sft_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None
) -> Rows:
    chats = [(user_says(row["question"]), row["answer"]) for row in _read(path, split)]
    return sft_rows(chats, tokenizer, max_length)


def _read(path: str, split: str) -> list[dict[str, Any]]:
    source = HUB_NAME if path == "gsm8k" else path
    return read_rows(source, split=split, columns=("question", "answer"), config="main")
