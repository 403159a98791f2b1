"""Read the rows of one split from a JSON-lines file, a local folder or the Hugging Face hub.

JSON-lines is read with the standard library, so that the `datasets` package is needed only for
other formats and for the hub. Errors name the path, what was looked for and what is there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: str, *, split: str, columns: tuple[str, ...], config: str | None) -> list[Row]:
    """Rows of `split`, each with at least `columns`. `config` is the hub's configuration name."""
    local = Path(path).expanduser()
    if local.is_file():
        rows = _read_jsonl(local)
    elif local.is_dir():
        rows = _read_folder(local, split)
    elif path.startswith((".", "/", "~")):
        raise FileNotFoundError(f"dataset.path: {path} does not exist")
    else:
        rows = _read_hub(path, config, split)
    _check_columns(rows, columns, path)
    return rows


def _read_folder(folder: Path, split: str) -> list[Row]:
    """`{split}.jsonl`, a folder of `save_to_disk`, or whatever `load_dataset` makes of it."""
    jsonl = folder / f"{split}.jsonl"
    if jsonl.is_file():
        return _read_jsonl(jsonl)
    found = sorted(entry.name for entry in folder.iterdir())
    import datasets

    try:
        if (folder / "dataset_dict.json").is_file():
            return list(datasets.load_from_disk(str(folder))[split])
        if (folder / "state.json").is_file():
            return list(datasets.load_from_disk(str(folder)))
        return list(datasets.load_dataset(str(folder), split=split))
    except Exception as error:  # the package raises a dozen kinds for a folder it cannot read
        raise ValueError(
            f"dataset.path: no split {split!r} in {folder} (found: {', '.join(found) or 'nothing'};"
            f" expected {split}.jsonl or a data set of Hugging Face): {_first_line(error)}"
        ) from error


def _read_hub(name: str, config: str | None, split: str) -> list[Row]:
    import datasets

    try:
        return list(datasets.load_dataset(name, config, split=split))
    except (ConnectionError, OSError) as error:
        raise RuntimeError(
            f"dataset.path: {name!r} is not a local file or folder, and the hub did not give it: "
            f"{_first_line(error)}"
        ) from error
    except ValueError as error:
        cause = _first_line(error)
        raise ValueError(f"dataset.path: {name!r}, split {split!r}: {cause}") from error


def _read_jsonl(file: Path) -> list[Row]:
    rows = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{file}, line {number}: expected a JSON object")
            rows.append(row)
    return rows


def _check_columns(rows: list[Row], columns: tuple[str, ...], path: str) -> None:
    for number, row in enumerate(rows):
        missing = [column for column in columns if column not in row]
        if missing:
            raise ValueError(
                f"data set {path!r}: row {number} has no column {', '.join(missing)}; "
                f"found {', '.join(row)}"
            )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
