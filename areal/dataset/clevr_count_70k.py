"""CLEVR count: the number of objects in a rendered picture; the answer is an integer.

`path` is the bare name `clevr_count_70k` (the hub's BUAADreamer/clevr_count_70k), another hub name,
a local folder or a Parquet file. Columns: images, problem, answer. The clevr_count_70k reward
reads the answer.
"""

from __future__ import annotations

from typing import Any

from areal.dataset.image_rows import ImageRows, ImageSFTRows, ImageSource, load_image_rows

HUB_NAME = "BUAADreamer/clevr_count_70k"
INSTRUCTION = "\nCount them, then give the number alone in square brackets, like [3]."


def get_clevr_count_70k_rl_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None, processor: Any = None
) -> ImageRows:
    """{"messages", "images", "answer"}, as in `image_rows`."""
    source = ImageSource(HUB_NAME if path == "clevr_count_70k" else path)
    return load_image_rows(source, split, INSTRUCTION, tokenizer, max_length, processor)


def get_clevr_count_70k_sft_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None, processor: Any = None
) -> ImageSFTRows:
    """The reply is the number in square brackets."""
    rows = get_clevr_count_70k_rl_dataset(path, split, tokenizer, max_length)
    return ImageSFTRows(rows, tokenizer, processor, "[{}]".format)
