"""Rows of a file by the names of its columns: training data without a line of Python.

    train_dataset: {path: rows.jsonl, prompt: question, answer: answer}

`path` is a JSON-lines, CSV, TSV or Parquet file, a folder with `{split}.jsonl` (or .csv, ...), or a
hub name. `prompt` is a text, or a chat as a list of {"role", "content"}. The other columns reach
the reward function too, under their own names.
"""

from __future__ import annotations

from typing import Any

from areal.dataset.chat_rows import drop_long_prompts, sft_rows, user_says
from areal.dataset.source_files import read_rows
from areal.utils.tokenizer import Messages


def load_rl(
    path: str,
    *,
    split: str,
    tokenizer: Any,
    prompt: str,
    answer: str | None = None,
    max_length: int | None = None,
) -> list[dict[str, Any]]:
    """{"messages", "answer", other columns}."""
    rows = []
    for number, row in enumerate(_read(path, split, prompt, answer)):
        others = {name: value for name, value in row.items() if name not in (prompt, answer)}
        made = {**others, "messages": _chat(row, number, prompt, path)}
        rows.append(made if answer is None else {**made, "answer": row[answer]})
    return drop_long_prompts(rows, tokenizer, max_length)


def load_sft(
    path: str,
    *,
    split: str,
    tokenizer: Any,
    prompt: str,
    answer: str,
    max_length: int | None = None,
) -> list[dict[str, Any]]:
    """The answer is what the model learns to write."""
    chats = [
        (_chat(row, number, prompt, path), _reply(row, number, answer, path))
        for number, row in enumerate(_read(path, split, prompt, answer))
    ]
    return sft_rows(chats, tokenizer, max_length)


def _read(path: str, split: str, prompt: str, answer: str | None) -> list[dict[str, Any]]:
    columns = (prompt,) if answer is None else (prompt, answer)
    return read_rows(path, split=split, columns=columns)


def _chat(row: dict[str, Any], number: int, column: str, path: str) -> Messages:
    value = row[column]
    if isinstance(value, str) and value.strip():
        return user_says(value)
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return value
    raise ValueError(
        f"data set {path!r}: row {number}, column {column!r}: expected a text or a list of "
        f'{{"role", "content"}}, found {value!r:.60}'
    )


def _reply(row: dict[str, Any], number: int, column: str, path: str) -> str:
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(
            f"data set {path!r}: row {number}, column {column!r}: expected a text to learn, found "
            f"{value!r:.60}"
        )
    return str(value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value
