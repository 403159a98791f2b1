"""Whole chats with tools, as `areal export` and other programs write them: SFT and preferences.

    train_dataset: {path: chats.jsonl, dataset_kwargs: {loader: chats}}

    sft      messages: each reply of the assistant is learned, but those with `weight: 0`
    rw, dpo  prompt, chosen, rejected: a chat, and two replies to it, each a list of one message

`tools`, where a row has them, are shown to the model. A reply is written as the chat template
writes it (reasoning, content and calls), after the prompt that rollouts would see.
"""

from __future__ import annotations

from typing import Any

from areal.dataset.chat_rows import Rows, report_dropped
from areal.dataset.source_files import read_rows
from areal.utils.chat_template import for_template, render_chats
from areal.utils.tokenizer import Messages


def get_chats_sft_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None
) -> Rows:
    """{"input_ids", "loss_mask"}: one row per reply, which ends with the end token."""
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(read_rows(path, split=split, columns=("messages",))):
        where = f"data set {path!r}: row {number}"
        chat = _chat(row, "messages", where)
        for place, message in enumerate(chat):
            if message["role"] == "assistant" and message.get("weight", 1):
                prompt, reply = _tokens(chat[:place], [message], row, where, tokenizer)
                mask = [0] * len(prompt) + [1] * len(reply)
                rows.append({"input_ids": prompt + reply, "loss_mask": mask})
    return _kept(rows, ("input_ids",), max_length)


def get_chats_rw_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None
) -> Rows:
    """{"chosen_ids", "rejected_ids", "prompt_len"}, for reward models and for DPO."""
    rows: list[dict[str, Any]] = []
    columns = ("prompt", "chosen", "rejected")
    for number, row in enumerate(read_rows(path, split=split, columns=columns)):
        where = f"data set {path!r}: row {number}"
        prompt, chosen, rejected = (_chat(row, column, where) for column in columns)
        before, better = _tokens(prompt, chosen, row, where, tokenizer)
        again, worse = _tokens(prompt, rejected, row, where, tokenizer)
        # A template may open a turn with reasoning in another way than one without.
        ids = {"chosen_ids": before + better, "rejected_ids": again + worse}
        rows.append({**ids, "prompt_len": _num_equal(before, again)})
    return _kept(rows, ("chosen_ids", "rejected_ids"), max_length)


get_chats_dpo_dataset = get_chats_rw_dataset  # DPO learns from the same pairs


def _chat(row: dict[str, Any], column: str, where: str) -> Messages:
    messages = row[column]
    is_chat = isinstance(messages, list) and messages
    if not is_chat or not all(isinstance(one, dict) and "role" in one for one in messages):
        raise ValueError(
            f"{where}, column {column!r}: expected a list of messages with role and content, found "
            f"{messages!r:.60}"
        )
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise ValueError(
                f"{where}, column {column!r}: the content of a message is a text or a list of "
                f"parts, found {content!r:.60}"
            )
        parts = content if isinstance(content, list) else []
        if any(isinstance(part, dict) and "image" in str(part.get("type")) for part in parts):
            raise ValueError(
                f"{where}, column {column!r}: a message has images, and the loader chats reads "
                "text only: leave such rows out"
            )
    return [for_template({"content": "", **_without_nulls(message)}) for message in messages]


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    """Tables have every key in every row."""
    return {name: value for name, value in message.items() if value is not None}


def _tokens(
    prompt: Messages, reply: Messages, row: dict[str, Any], where: str, tokenizer: Any
) -> tuple[list[int], list[int]]:
    if len(reply) != 1 or reply[0]["role"] != "assistant":
        raise ValueError(f"{where}: a reply is one message of the assistant, found {reply!r:.80}")
    variables = {"enable_thinking": bool(reply[0].get("reasoning_content"))}
    before, whole = render_chats(
        tokenizer, [prompt, [*prompt, *reply]], tools=row.get("tools") or None, variables=variables
    )
    said, ended, _ = whole[len(before) :].partition(tokenizer.eos_token)
    if not whole.startswith(before) or not ended:
        raise ValueError(
            f"{where}: the chat template does not show the reply between the prompt of its turn "
            f"and {tokenizer.eos_token!r}, so it cannot be learned"
        )
    prompt_ids, reply_ids = tokenizer([before, said], add_special_tokens=False)["input_ids"]
    return prompt_ids, [*reply_ids, tokenizer.eos_token_id]


def _num_equal(one: list[int], other: list[int]) -> int:
    """Tokens at the start that both have."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _kept(rows: list[dict[str, Any]], columns: tuple[str, ...], max_length: int | None) -> Rows:
    if max_length is None:
        return Rows(rows)
    kept = [row for row in rows if all(len(row[name]) <= max_length for name in columns)]
    report_dropped(len(rows), len(kept), max_length)
    return Rows(kept)
