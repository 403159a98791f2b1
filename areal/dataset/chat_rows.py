"""Rows from chats: what RL and supervised training need, made the same way for every data set.

In: pairs of chat messages and the reply. Out: lists of rows no longer than `max_length` tokens.
"""

from __future__ import annotations

from typing import Any

from areal.utils import logging
from areal.utils.tokenizer import Messages, chat_prompts_ids, replies_ids

logger = logging.getLogger("Dataset")


def user_says(text: str) -> Messages:
    """A chat of one user turn."""
    return [{"role": "user", "content": text}]


def sft_rows(
    chats: list[tuple[Messages, str]], tokenizer: Any, max_length: int | None
) -> list[dict[str, Any]]:
    """{"input_ids", "loss_mask"}: the prompt as in rollouts, then the reply and the end token."""
    if not chats:
        return []
    prompts = chat_prompts_ids([messages for messages, _ in chats], tokenizer)
    replies = replies_ids([reply for _, reply in chats], tokenizer)
    rows = [
        {"input_ids": prompt + reply, "loss_mask": [0] * len(prompt) + [1] * len(reply)}
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    if max_length is None:
        return rows
    return _report(rows, [row for row in rows if len(row["input_ids"]) <= max_length], max_length)


def drop_long_prompts(
    rows: list[dict[str, Any]], tokenizer: Any, max_length: int | None
) -> list[dict[str, Any]]:
    """Rows whose prompt has at most `max_length` tokens."""
    if max_length is None or not rows:
        return rows
    prompts = chat_prompts_ids([row["messages"] for row in rows], tokenizer)
    pairs = zip(rows, prompts, strict=True)
    kept = [row for row, prompt in pairs if len(prompt) <= max_length]
    return _report(rows, kept, max_length)


def _report(rows: list, kept: list, max_length: int) -> list:
    if len(kept) < len(rows):
        dropped = len(rows) - len(kept)
        logger.warning("left out %d of %d rows over %d tokens", dropped, len(rows), max_length)
    return kept
