"""Rows of questions about images, built on access: all at once would fill memory.

In: a table with `images` (encoded), `problem` (with `<image>` where an image belongs) and `answer`.
Out: {"messages", "images", "answer"}. A message's content is a list of {"type": "image"} and
{"type": "text", "text": ...} in the order of the problem; `images` are encoded bytes in that order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from areal.dataset.chat_rows import report_dropped
from areal.dataset.source_files import TableRows, open_rows

COLUMNS = ("images", "problem", "answer")
_PLACE = "<image>"


def load_image_rows(
    path: str, *, split: str, instruction: str, tokenizer: Any, max_length: int | None
) -> ImageRows:
    """Rows of `split` whose text has at most `max_length` tokens; image tokens are not counted."""
    table = open_rows(path, split=split, columns=COLUMNS)
    if not isinstance(table, TableRows):
        raise ValueError(
            f"dataset.path: {path!r} is JSON-lines, which holds no images; expected Parquet files "
            "or another data set of Hugging Face"
        )
    kept = list(range(len(table)))
    if max_length is not None and kept:
        texts = [problem + instruction for problem in table.column("problem")]
        tokens = tokenizer(texts, add_special_tokens=False)["input_ids"]
        kept = [number for number in kept if len(tokens[number]) <= max_length]
        report_dropped(len(table), len(kept), max_length)
    return ImageRows(table, kept, instruction, path)


class ImageRows(Sequence):
    """Rows `numbers` of `table`, each with `instruction` after its problem."""

    column_names = ("messages", "images", "answer")

    def __init__(self, table: TableRows, numbers: list[int], instruction: str, path: str) -> None:
        self._table, self._numbers = table, numbers
        self._instruction, self._path = instruction, path

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self._numbers[index]
        row = self._table[number]
        images = [image["bytes"] for image in row["images"]]
        places = row["problem"].count(_PLACE)
        if not images or places not in (0, len(images)) or None in images:
            raise ValueError(
                f"data set {self._path!r}: row {number} has {len(images)} images, "
                f"{sum(image is None for image in images)} of them without bytes, for {places} "
                f"{_PLACE} in its problem"
            )
        content = _content(row["problem"], len(images), self._instruction)
        messages = [{"role": "user", "content": content}]
        return {"messages": messages, "images": images, "answer": str(row["answer"])}


def _content(problem: str, num_images: int, instruction: str) -> list[dict[str, str]]:
    """Text and images interleaved; images without a placeholder in the problem come first."""
    marked = problem if _PLACE in problem else _PLACE * num_images + problem
    parts = re.split(f"({_PLACE})", marked + instruction)
    return [
        {"type": "image"} if part == _PLACE else {"type": "text", "text": part}
        for part in parts
        if part
    ]
