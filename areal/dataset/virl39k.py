r"""ViRL39K: questions of many subjects about one or several pictures.

The data set of TIGER-Lab is a table, `39Krelease.parquet`, whose rows name files, and an archive of
them. `path` is a local folder with the table and the unpacked archive:

    hf download TIGER-Lab/ViRL39K --repo-type dataset --local-dir data/virl39k
    unzip -q data/virl39k/images.zip -d data/virl39k

Columns: image (names of files below the folder), question, answer (in a `\boxed{}`). The
math_verify reward reads the answer. It has no test split: a tenth of the questions is held out.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from areal.dataset.chat_rows import is_held_out, wants_held_out
from areal.dataset.image_rows import ImageRows, ImageSFTRows, ImageSource, load_image_rows

TABLE = "39Krelease.parquet"
INSTRUCTION = "\nReason step by step and put the final answer in \\boxed{}."


def get_virl39k_rl_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None, processor: Any = None
) -> ImageRows:
    """{"messages", "images", "answer"}, as in `image_rows`."""
    folder = Path(path).expanduser()
    table = folder / TABLE
    if not table.is_file():
        raise FileNotFoundError(
            f"dataset.path: {table} does not exist; expected a folder with {TABLE} of "
            "TIGER-Lab/ViRL39K and its unpacked images.zip"
        )
    held_out = wants_held_out(split)
    source = ImageSource(
        path,
        table_path=str(table),
        images="image",
        question="question",
        read_image=partial(_read_below, folder.resolve()),
        keep=lambda question: is_held_out(question) == held_out,
    )
    return load_image_rows(source, split, INSTRUCTION, tokenizer, max_length, processor)


def get_virl39k_sft_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None, processor: Any = None
) -> ImageSFTRows:
    """The reply is the answer as the data set writes it: it has no solutions."""
    rows = get_virl39k_rl_dataset(path, split, tokenizer, max_length)
    return ImageSFTRows(rows, tokenizer, processor, str)


def _read_below(folder: Path, name: Any) -> bytes:
    """The file `name` of the folder; a table from elsewhere must not name other files."""
    if not isinstance(name, str):
        raise ValueError(f"data set {str(folder)!r}: expected the name of a file, got {name!r:.60}")
    try:
        file = (folder / name).resolve()
        if file.is_relative_to(folder):
            return file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"data set {str(folder)!r}: {name!r:.200}: {reason}; unpack images.zip there"
        ) from None
    raise ValueError(f"data set {str(folder)!r}: {name!r:.200} lies outside of it")
