"""GSM8K from its shipped sample, from other local forms, and the errors of a wrong path."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from areal.api.config.run import DatasetConfig
from areal.dataset import get_custom_dataset
from areal.dataset.arithmetic import build_char_tokenizer

SAMPLE = Path(__file__).parents[1] / "data" / "gsm8k_sample"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_char_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def load(path, tokenizer, *, type="rl", split="train", max_length=None):
    config = DatasetConfig(
        path=str(path), type=type, dataset_kwargs={"loader": "gsm8k"}, max_length=max_length
    )
    return get_custom_dataset(split, config, tokenizer)


@pytest.mark.parametrize("split", ["train", "test"])
def test_rl_rows_of_the_sample(tokenizer, split):
    rows = load(SAMPLE, tokenizer, split=split)
    assert len(rows) == 20
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user"]
        assert "\\boxed{}" in row["messages"][0]["content"]
        assert "####" in row["answer"]


def test_sft_rows_of_the_sample(tokenizer):
    raw = [json.loads(line) for line in (SAMPLE / "train.jsonl").read_text().splitlines()]
    rows = load(SAMPLE, tokenizer, type="sft")
    for row, source in zip(rows, raw, strict=True):
        assert len(row["input_ids"]) == len(row["loss_mask"])
        assert sum(row["loss_mask"]) == len(source["answer"]) + 1  # a token per character, and eos
        assert row["input_ids"][-1] == tokenizer.eos_token_id


def test_the_loader_is_known_by_the_last_part_of_the_path(tokenizer, tmp_path):
    shutil.copytree(SAMPLE, tmp_path / "gsm8k")
    config = DatasetConfig(path=str(tmp_path / "gsm8k"), type="rl", split="test")
    assert len(get_custom_dataset(None, config, tokenizer)) == 20


def test_one_file_and_max_length(tokenizer):
    everything = load(SAMPLE / "test.jsonl", tokenizer)
    short = load(SAMPLE / "test.jsonl", tokenizer, max_length=200)
    assert 0 < len(short) < len(everything) == 20


@pytest.mark.parametrize("form", ["dict on disk", "one split on disk", "parquet"])
def test_folders_of_the_datasets_package(tokenizer, tmp_path, form, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"question": "1+1?", "answer": "#### 2"}] * 3)
    folder = tmp_path / "data"
    if form == "dict on disk":
        datasets.DatasetDict(train=rows).save_to_disk(str(folder))
    elif form == "one split on disk":
        rows.save_to_disk(str(folder))
    else:
        folder.mkdir()
        rows.to_parquet(str(folder / "train-00000.parquet"))
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    loaded = load(folder, tokenizer)
    assert [row["answer"] for row in loaded] == ["#### 2"] * 3


def test_wrong_paths_and_files_are_explained(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match="dataset.path: /no/such/folder does not exist"):
        load("/no/such/folder", tokenizer)
    with pytest.raises(ValueError, match=r"no split 'valid' in .*found: LICENSE, README.md, test"):
        load(SAMPLE, tokenizer, split="valid")

    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "q", "answer": "a"}\n{"question": \n')
    with pytest.raises(ValueError, match=r"broken.jsonl, line 2: not JSON"):
        load(broken, tokenizer)
    broken.write_text('{"query": "q", "answer": "a"}\n')
    with pytest.raises(ValueError, match="row 0 has no column question; found query, answer"):
        load(broken, tokenizer)
    broken.write_text("")
    with pytest.raises(ValueError, match="has no row in split 'train'"):
        load(broken, tokenizer)


def test_a_hub_that_cannot_be_reached_is_a_fault_of_the_world(tokenizer):
    config = DatasetConfig(path="nobody-here/gsm8k", type="rl")
    with pytest.raises(RuntimeError, match="'nobody-here/gsm8k' is not a local file or folder"):
        get_custom_dataset("train", config, tokenizer)
