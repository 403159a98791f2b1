"""Reads the rows of one split from a JSON-lines, CSV or Parquet file, a local folder or the hub.

JSON-lines and CSV are read with the standard library; the `datasets` package is needed only for
other formats and for the hub. Errors name the path, what was expected and what is there. Images
stay encoded: a row holds {"bytes", "path"} for each, whatever the source.

`load_rl` and `load_sft` build training rows from named columns, without user code:

    train_dataset: {path: rows.jsonl, prompt: question, answer: answer}

`path` is a JSON-lines, CSV, TSV or Parquet file, a folder with `{split}.jsonl` (or .csv, ...), or a
hub name. `prompt` is a text, or a chat as a list of {"role", "content"}. The other columns are
passed to the reward function under their own names.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from areal.dataset.chat_rows import drop_long_prompts, sft_rows, user_says
from areal.utils.hub import cache_folder, cached_commit, downloading
from areal.utils.tokenizer import Messages

if TYPE_CHECKING:
    import datasets


Row = dict[str, Any]


def read_rows(
    path: str, *, split: str, columns: tuple[str, ...], config: str | None = None
) -> list[Row]:
    """Rows of `split`, each with at least `columns`. `config` is the hub's configuration name."""
    return list(open_rows(path, split=split, columns=columns, config=config))


def open_rows(
    path: str, *, split: str, columns: tuple[str, ...], config: str | None = None
) -> Sequence[Row]:
    """`read_rows`, decoded on access: for data sets with large rows."""
    local = Path(path).expanduser()
    if local.is_file():
        rows = _read_file(local)
    elif local.is_dir():
        rows = _read_folder(local, split)
    elif path.startswith((".", "/", "~")):
        raise FileNotFoundError(f"dataset.path: {path} does not exist")
    else:
        rows = _read_hub(path, config, split)
    _check_columns(rows, columns, path)
    return rows


def first_row(path: Path, split: str) -> Row | None:
    """The first row of a JSON-lines or CSV file (or of the split's in a folder), without reading
    the others; None if there is no such file."""
    files = [path / f"{split}{suffix}" for suffix in _TEXT_FORMATS] if path.is_dir() else [path]
    for file in files:
        rows = _TEXT_FORMATS.get(file.suffix.lower())
        if rows is not None and file.is_file():
            return next(rows(file), None)
    return None


def _read_file(file: Path) -> Sequence[Row]:
    if file.suffix.lower() == ".parquet":
        return _read_parquet(file)
    return list(_TEXT_FORMATS.get(file.suffix.lower(), _jsonl_rows)(file))


def _read_folder(folder: Path, split: str) -> Sequence[Row]:
    """`{split}` with a known suffix, a `save_to_disk`, or whatever `load_dataset` reads."""
    for suffix in (*_TEXT_FORMATS, ".parquet"):
        file = folder / f"{split}{suffix}"
        if file.is_file():
            return _read_file(file)
    found = sorted(entry.name for entry in folder.iterdir())
    import datasets

    try:
        if (folder / "dataset_dict.json").is_file():
            return TableRows(
                cast("datasets.DatasetDict", datasets.load_from_disk(str(folder)))[split]
            )
        if (folder / "state.json").is_file():
            return TableRows(cast("datasets.Dataset", datasets.load_from_disk(str(folder))))
        return TableRows(datasets.load_dataset(str(folder), split=split))
    except Exception as error:  # the package raises many types for an unreadable folder
        raise ValueError(
            f"dataset.path: no split {split!r} in {folder} (found: {', '.join(found) or 'nothing'};"
            f" expected {split}.jsonl or a data set of Hugging Face): {_first_line(error)}"
        ) from error


def _read_hub(path: str, config: str | None, split: str) -> Sequence[Row]:
    """A data set of the hub, by `org/name` or `org/name@revision`."""
    import datasets
    import datasets.config

    name, _, revision = path.partition("@")
    prepared = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
    try:
        with downloading(cache_folder(name, "dataset"), prepared):
            builder = datasets.load_dataset_builder(name, config, revision=revision or None)
            _check_commit(builder.hash, cached_commit(name, revision or None, "dataset"))
            builder.download_and_prepare()
            table = cast("datasets.Dataset", builder.as_dataset(split=split))
    except ValueError as error:
        cause = _first_line(error)
        raise ValueError(f"dataset.path: {path!r}, split {split!r}: {cause}") from error
    except Exception as error:  # of the hub's client, its HTTP client or the file system
        raise RuntimeError(
            f"dataset.path: {path!r} is not a local file or folder, and the hub did not give it: "
            f"{_first_line(error)}"
        ) from error
    return TableRows(table)


def _check_commit(prepared: str | None, expected: str | None) -> None:
    """Offline, `datasets` uses whichever revision this machine prepared last."""
    if None not in (prepared, expected) and prepared != expected:
        raise ValueError(
            f"its hub cannot be asked, and this machine has prepared commit {prepared}, not "
            f"{expected}: load it once where the hub can be reached"
        )


def _read_parquet(file: Path) -> Sequence[Row]:
    import datasets
    import datasets.table
    import pyarrow
    import pyarrow.parquet

    try:
        # Mapped, not copied: rows are decoded on access.
        table = pyarrow.parquet.read_table(file, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not a Parquet file ({_first_line(error)})") from error
    return TableRows(datasets.Dataset(datasets.table.InMemoryTable(table)))


class TableRows(Sequence):
    """The rows of a table, extracted on access.

    Images stay encoded: decoded, those of a large data set would fill memory.
    """

    def __init__(self, table: datasets.Dataset) -> None:
        # `datasets` has no type for this format, whose rows are pyarrow tables.
        self._table: Any = table.with_format("arrow")

    @property
    def column_names(self) -> list[str]:
        return self._table.column_names

    def column(self, name: str) -> list[Any]:
        return self._table.select_columns([name])[:][name].to_pylist()

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Row:
        return self._table[index].to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        for part in self._table.iter(1000):
            yield from part.to_pylist()


def _jsonl_rows(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, parse_constant=_refuse_constant, parse_float=_finite)
                if b"\\u" in line:
                    json.dumps(row, ensure_ascii=False).encode()  # rejects lone surrogates
            except (ValueError, RecursionError) as error:  # bad JSON or bad UTF-8
                raise ValueError(f"{file}, line {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{file}, line {number}: expected a JSON object")
            yield row


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large")
    return value


def _csv_rows(file: Path, delimiter: str = ",") -> Iterator[Row]:
    """The first line names the columns; every value is text."""
    csv.field_size_limit(sys.maxsize)  # answers may be long
    with file.open(encoding="utf-8-sig", newline="") as text:  # -sig: Excel writes a BOM
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            names = next(reader, [])
            for values in reader:
                if values:  # else an empty line
                    yield _csv_row(file, reader.line_num, names, values)
        except (csv.Error, UnicodeDecodeError) as error:
            where = f"{file}, line {reader.line_num}"
            raise ValueError(f"{where}: not a table in UTF-8 ({error})") from error


def _csv_row(file: Path, line: int, names: list[str], values: list[str]) -> Row:
    if len(values) != len(names):
        raise ValueError(
            f"{file}, line {line}: {len(values)} values for the {len(names)} columns "
            f"{', '.join(names)}"
        )
    return dict(zip(names, values, strict=True))


# Suffix -> row reader. Other suffixes are read as JSON-lines.
_TEXT_FORMATS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _jsonl_rows,
    ".csv": _csv_rows,
    ".tsv": partial(_csv_rows, delimiter="\t"),
}


def _check_columns(rows: Sequence[Row], columns: tuple[str, ...], path: str) -> None:
    # A table has the same columns in every row; JSON rows may differ.
    if isinstance(rows, TableRows):
        rows = [dict.fromkeys(rows.column_names)]
    for number, row in enumerate(rows):
        missing = [column for column in columns if column not in row]
        if missing:
            raise ValueError(
                f"data set {path!r}: row {number} has no column {', '.join(missing)}; "
                f"found {', '.join(row)}"
            )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


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
    """The answer column is the supervised target."""
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
