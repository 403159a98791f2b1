"""A file with a prompt and an answer column trains without Python; what is broken is named."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from tiny_tokenizer import byte_tokenizer

from areal.api.cli_args import DatasetConfig
from areal.dataset import get_custom_dataset

ROWS = [
    {"question": "1+1=", "solution": "2", "level": "easy"},
    {"question": 'say "two,\nplease"', "solution": "zwei, bitte", "level": "härter"},
]


def write(path: Path) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            delimiter = "\t" if path.suffix == ".tsv" else ","
            writer = csv.DictWriter(file, list(ROWS[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
    return path


def load(path: Path, row_type: str = "rl", split: str = "train", **options):
    config = DatasetConfig(path=str(path), type=row_type, **options)
    return get_custom_dataset(split, config, byte_tokenizer())


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
@pytest.mark.parametrize("in_folder", [False, True])
def test_every_format_gives_the_same_rows(tmp_path, suffix, in_folder):
    file = write(tmp_path / f"{'test' if in_folder else 'rows'}{suffix}")
    rows = load(tmp_path if in_folder else file, split="test", prompt="question", answer="solution")
    assert rows == [
        {
            "messages": [{"role": "user", "content": row["question"]}],
            "answer": row["solution"],
            "level": row["level"],
        }
        for row in ROWS
    ]


def test_without_an_answer_and_with_a_chat(tmp_path):
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"chat": chat}) + "\n")
    assert load(file, prompt="chat") == [{"messages": chat}]


def test_the_answer_is_what_sft_learns(tmp_path):
    tokenizer = byte_tokenizer()
    (first, _) = load(write(tmp_path / "rows.csv"), "sft", prompt="question", answer="solution")
    learned = [t for t, m in zip(first["input_ids"], first["loss_mask"], strict=True) if m]
    assert tokenizer.decode(learned[:-1]) == "2" and learned[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.jsonl", '{"question": "1", "answer": "2"}\n{"question": ', "line 2: not JSON"),
        ("a.jsonl", '{"question": "\\ud83d", "answer": "2"}', "line 1: not JSON"),
        ("a.jsonl", '{"question": "1", "answer": NaN}', "NaN is not a number"),
        ("a.jsonl", '{"question": "1", "answer": 1e999}', "1e999 is too large"),
        ("a.jsonl", '{"question": "1", "answer": %s}' % ("9" * 5000), "line 1: not JSON"),
        ("a.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("a.jsonl", "[1]", "line 1: expected a JSON object"),
        ("a.jsonl", '{"prompt": "1", "answer": "2"}', "no column question; found prompt, answer"),
        ("a.jsonl", '{"question": "", "answer": "2"}', "row 0, column 'question': expected a text"),
        ("a.jsonl", '{"question": 7, "answer": "2"}', "row 0, column 'question': expected a text"),
        ("a.csv", "question,answer\n1\n", "line 2: 1 values for the 2 columns question, answer"),
        ("a.csv", 'question,answer\n1,"2\n', "not a table"),
        ("a.csv", "", "no row"),
        ("a.parquet", "PAR1 or so", "not a Parquet file"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, text, found):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ValueError, match=found.replace("(", "\\(")) as error:
        load(file, prompt="question", answer="answer")
    assert str(file) in str(error.value)


def test_bytes_that_are_no_text(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b"question,answer\n\xff\xfe,2\n")
    with pytest.raises(ValueError, match=r"a\.csv, line \d: not a table in UTF-8"):
        load(file, prompt="question", answer="answer")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"answer": "a"}, "prompt must name the column"),
        ({"prompt": "q", "dataset_kwargs": {"loader": "gsm8k"}}, "columns need no loader"),
    ],
)
def test_columns_that_contradict_each_other(options, found):
    with pytest.raises(ValueError, match=found):
        DatasetConfig(path="rows.jsonl", **options)


@pytest.mark.parametrize(
    ("row_type", "found"), [("dpo", "rows of type rl and sft"), ("sft", "answer must name")]
)
def test_what_columns_are_not_for(tmp_path, row_type, found):
    with pytest.raises(ValueError, match=found):
        load(write(tmp_path / "rows.csv"), row_type, prompt="question")
