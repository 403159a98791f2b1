"""Geometry3K: a geometry problem and its drawing; the answer is a number or an expression.

`path` is the bare name `geometry3k` (the hub's hiyouga/geometry3k), another hub name, a local
folder or a Parquet file. Columns: images, problem, answer. The geometry3k reward reads the answer.
"""

from __future__ import annotations

from typing import Any

from areal.dataset.image_rows import ImageRows, ImageSFTRows, ImageSource, load_image_rows

HUB_NAME = "hiyouga/geometry3k"
INSTRUCTION = "\nEnd with your final answer in square brackets, like [42]."


def get_geometry3k_rl_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None, processor: Any = None
) -> ImageRows:
    """{"messages", "images", "answer"}, as in `image_rows`."""
    source = ImageSource(HUB_NAME if path == "geometry3k" else path)
    return load_image_rows(source, split, INSTRUCTION, tokenizer, max_length, processor)


def get_geometry3k_sft_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None, processor: Any = None
) -> ImageSFTRows:
    """The reply is the answer in square brackets: the data set has no solutions."""
    rows = get_geometry3k_rl_dataset(path, split, tokenizer, max_length)
    return ImageSFTRows(rows, tokenizer, processor, "[{}]".format)
