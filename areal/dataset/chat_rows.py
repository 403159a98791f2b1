"""Rows from chats: the formats of each kind of training, shared by all data sets.

In: chat messages and replies to them. Out: lists of rows of at most `max_length` tokens.

For data sets without a test split, `is_held_out` decides by a hash of the problem, independent of
seed and number of rows, so that no run trains on a problem that another one tests with.
`known_options` checks `dataset_kwargs` against the function that a loader passes them to.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

from areal.utils import logging
from areal.utils.tokenizer import Messages, chat_prompts_ids, replies_ids

logger = logging.getLogger("Dataset")
ONE_IN = 10
TEST_SPLITS = ("test", "valid", "validation")


class Rows(list[dict[str, Any]]):
    """Rows with the same columns; a Hugging Face data set names them by the same attribute."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0]) if self else []


def user_says(text: str) -> Messages:
    """A chat of one user turn."""
    return [{"role": "user", "content": text}]


def sft_rows(chats: list[tuple[Messages, str]], tokenizer: Any, max_length: int | None) -> Rows:
    """{"input_ids", "loss_mask"}: the prompt as in rollouts, then the reply and the end token."""
    if not chats:
        return Rows()
    prompts = chat_prompts_ids([messages for messages, _ in chats], tokenizer)
    replies = replies_ids([reply for _, reply in chats], tokenizer)
    rows = [
        {"input_ids": prompt + reply, "loss_mask": [0] * len(prompt) + [1] * len(reply)}
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    if max_length is None:
        return Rows(rows)
    kept = [row for row in rows if len(row["input_ids"]) <= max_length]
    report_dropped(len(rows), len(kept), max_length)
    return Rows(kept)


def pair_rows(
    pairs: list[tuple[Messages, str, str]], tokenizer: Any, max_length: int | None
) -> Rows:
    """{"chosen_ids", "rejected_ids", "prompt_len"} of (prompt, better reply, worse reply).

    Both start with the same `prompt_len` tokens and end with the end token.
    """
    if not pairs:
        return Rows()
    prompts = chat_prompts_ids([messages for messages, _, _ in pairs], tokenizer)
    chosen = replies_ids([better for _, better, _ in pairs], tokenizer)
    rejected = replies_ids([worse for _, _, worse in pairs], tokenizer)
    rows = [
        {
            "chosen_ids": prompt + better,
            "rejected_ids": prompt + worse,
            "prompt_len": len(prompt),
        }
        for prompt, better, worse in zip(prompts, chosen, rejected, strict=True)
    ]
    if max_length is None:
        return Rows(rows)
    kept = [
        row for row in rows if max(len(row["chosen_ids"]), len(row["rejected_ids"])) <= max_length
    ]
    report_dropped(len(rows), len(kept), max_length)
    return Rows(kept)


def drop_long_prompts(rows: list[dict[str, Any]], tokenizer: Any, max_length: int | None) -> Rows:
    """Rows whose prompt has at most `max_length` tokens."""
    if max_length is None or not rows:
        return Rows(rows)
    prompts = chat_prompts_ids([row["messages"] for row in rows], tokenizer)
    pairs = zip(rows, prompts, strict=True)
    kept = [row for row, prompt in pairs if len(prompt) <= max_length]
    report_dropped(len(rows), len(kept), max_length)
    return Rows(kept)


def report_dropped(num_rows: int, num_kept: int, max_length: int) -> None:
    if num_kept < num_rows:
        dropped = num_rows - num_kept
        logger.warning("left out %d of %d rows over %d tokens", dropped, num_rows, max_length)


def is_held_out(problem: str) -> bool:
    digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % ONE_IN == 0


def wants_held_out(split: str) -> bool:
    """Whether `split` names the held-out part."""
    if split != "train" and split not in TEST_SPLITS:
        raise ValueError(f"dataset.split must be train or one of {TEST_SPLITS}, got {split!r}")
    return split in TEST_SPLITS


def known_options(
    options: dict[str, Any], function: Callable[..., Any], *, besides: tuple[str, ...]
) -> dict[str, Any]:
    """`options`, all of them parameters of `function`.

    `besides` are keys the loader handles itself; an error lists them too.
    """
    known = {*inspect.signature(function).parameters, *besides} - {"split"}
    for name in options:
        if name not in known - {*besides}:
            raise ValueError(
                f"dataset_kwargs.{name}: unknown; expected one of {', '.join(sorted(known))}"
            )
    return options
