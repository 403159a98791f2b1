"""Rows of questions about images, built on access: all at once would fill memory.

In: a table with images (encoded, or the names of files), a question (with `<image>` where an image
belongs) and an answer. Out, for RL: {"messages", "images", "answer"}. A message's content is a list
of {"type": "image"} and {"type": "text", "text": ...} in the order of the question; `images` are
encoded bytes in that order. Out, for SFT: {"input_ids", "loss_mask", "multi_modal_input"}, the
last with `pixel_values` and `image_grid_thw` as the model's folder says images are cut.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from PIL import Image

from areal.dataset.chat_rows import report_dropped
from areal.dataset.source_files import TableRows, open_rows
from areal.utils.images import decode_image
from areal.utils.tokenizer import chat_prompt_ids, replies_ids

_PLACE = "<image>"


class Processor(Protocol):
    """What SFT rows need to know of a model (areal/models/vision/processor.py)."""

    def cut(self, data: bytes) -> tuple[np.ndarray, Sequence[int]]: ...

    def expand(self, ids: Sequence[int], grids: Sequence[Sequence[int]]) -> list[int]: ...


class TransformersProcessor:
    """A processor of transformers (`AutoProcessor`) for SFT rows. Images are decoded apart, as
    everywhere (utils/images.py); the object itself cuts them."""

    def __init__(self, processor: Any) -> None:
        self._cutter, self._image = processor.image_processor, processor.image_token_id

    def cut(self, data: bytes) -> tuple[np.ndarray, Sequence[int]]:
        made = self._cutter(images=[Image.fromarray(decode_image(data).rgb)], return_tensors="pt")
        return made["pixel_values"].numpy(), made["image_grid_thw"][0].tolist()

    def expand(self, ids: Sequence[int], grids: Sequence[Sequence[int]]) -> list[int]:
        found = sum(one == self._image for one in ids)
        if found != len(grids):
            raise ValueError(
                f"the prompt has {found} image tokens for {len(grids)} images; the chat template "
                "must write one for each, and no text may contain one"
            )
        left = iter(math.prod(grid) // self._cutter.merge_size**2 for grid in grids)
        return [t for one in ids for t in [one] * (next(left) if one == self._image else 1)]


def as_processor(given: Any) -> Processor:
    """`given`, or a processor of transformers as one."""
    if hasattr(given, "cut") and hasattr(given, "expand"):
        return given
    if hasattr(given, "image_processor") and hasattr(given, "image_token_id"):
        if not hasattr(given.image_processor, "merge_size"):  # that of Gemma 3
            raise ValueError(
                f"processor: a {type(given.image_processor).__name__} makes no image_grid_thw; "
                "give load_processor(folder, tokenizer) of areal.models.vision.processor instead"
            )
        return TransformersProcessor(given)
    raise ValueError(
        "processor: expected an ImageProcessor of areal.models.vision.processor or an "
        f"AutoProcessor of transformers, got {type(given).__name__}"
    )


@dataclass(frozen=True, slots=True)
class ImageSource:
    """A table, and the names of its columns."""

    path: str
    table_path: str | None = None  # of the table, if that is not `path`
    images: str = "images"
    question: str = "problem"
    answer: str = "answer"
    # Bytes of one entry of the column of images; None if it has none.
    read_image: Callable[[Any], bytes | None] = lambda entry: entry["bytes"]
    keep: Callable[[str], bool] | None = None  # by the question; None keeps all

    @property
    def columns(self) -> tuple[str, ...]:
        return self.images, self.question, self.answer


def load_image_rows(
    source: ImageSource,
    split: str,
    instruction: str,
    tokenizer: Any,
    max_length: int | None,
    processor: Any,
) -> ImageRows:
    """Rows of `split` whose text has at most `max_length` tokens, by the tokenizer of `processor`
    if there is one; image tokens are not counted."""
    if processor is not None:
        tokenizer = processor.tokenizer
    table = open_rows(source.table_path or source.path, split=split, columns=source.columns)
    if not isinstance(table, TableRows):
        raise ValueError(
            f"dataset.path: {source.path!r} is JSON-lines, which holds no images; expected Parquet "
            "files or another data set of Hugging Face"
        )
    kept = list(range(len(table)))
    if kept and (max_length is not None or source.keep is not None):
        questions = table.column(source.question)
        if source.keep is not None:
            kept = [number for number in kept if source.keep(questions[number])]
        if max_length is not None and kept:
            kept = _short(kept, questions, instruction, tokenizer, max_length)
    return ImageRows(table, kept, instruction, source)


def _short(
    numbers: list[int], questions: list[str], instruction: str, tokenizer: Any, max_length: int
) -> list[int]:
    texts = [questions[number] + instruction for number in numbers]
    tokens = tokenizer(texts, add_special_tokens=False)["input_ids"]
    kept = [n for n, ids in zip(numbers, tokens, strict=True) if len(ids) <= max_length]
    report_dropped(len(numbers), len(kept), max_length)
    return kept


class ImageRows(Sequence):
    """Rows `numbers` of `table`, each with `instruction` after its question."""

    column_names = ("messages", "images", "answer")

    def __init__(
        self, table: TableRows, numbers: list[int], instruction: str, source: ImageSource
    ) -> None:
        self._table, self._numbers = table, numbers
        self._instruction, self._source = instruction, source

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self._numbers[index]
        row, source = self._table[number], self._source
        question = row[source.question]
        images = [source.read_image(entry) for entry in row[source.images] or ()]
        places = question.count(_PLACE)
        if not images or places not in (0, len(images)) or None in images:
            raise ValueError(
                f"data set {source.path!r}: row {number} has {len(images)} images, "
                f"{sum(image is None for image in images)} of them without bytes, for {places} "
                f"{_PLACE} in its {source.question}"
            )
        content = _content(question, len(images), self._instruction)
        messages = [{"role": "user", "content": content}]
        return {"messages": messages, "images": images, "answer": str(row[source.answer])}


def _content(question: str, num_images: int, instruction: str) -> list[dict[str, str]]:
    """Text and images interleaved; images without a placeholder in the question come first."""
    marked = question if _PLACE in question else _PLACE * num_images + question
    parts = re.split(f"({_PLACE})", marked + instruction)
    return [
        {"type": "image"} if part == _PLACE else {"type": "text", "text": part}
        for part in parts
        if part
    ]


class ImageSFTRows(Sequence):
    """The rows of an RL data set with `reply(answer)` as the text to learn. `processor`: see
    `as_processor`."""

    column_names = ("input_ids", "loss_mask", "multi_modal_input")

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        tokenizer: Any,
        processor: Any,
        reply: Callable[[str], str],
    ) -> None:
        if processor is None:
            raise ValueError(
                "train_dataset.type: sft rows with images need the model's image processor, and "
                "the model of this config reads text only; name a vision model in actor.path"
            )
        self._rows, self._tokenizer = rows, tokenizer
        self._processor = as_processor(processor)
        self._reply = reply

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        row = self._rows[index]
        cuts = [self._processor.cut(image) for image in row["images"]]
        grids = [grid for _, grid in cuts]
        prompt = chat_prompt_ids(row["messages"], self._tokenizer)
        prompt = self._processor.expand(prompt, grids)
        (reply,) = replies_ids([self._reply(row["answer"])], self._tokenizer)
        return {
            "input_ids": prompt + reply,
            "loss_mask": [0] * len(prompt) + [1] * len(reply),
            "multi_modal_input": {
                "pixel_values": torch.from_numpy(np.concatenate([pixels for pixels, _ in cuts])),
                "image_grid_thw": torch.tensor(grids),
            },
        }
