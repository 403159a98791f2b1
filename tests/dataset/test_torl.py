"""ToRL from a small sample in the schema of its Parquet files."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.api.config.run import DatasetConfig
from areal.dataset import get_custom_dataset
from areal.dataset.arithmetic import build_char_tokenizer
from areal.reward.math_verify import math_verify_reward_fn

SAMPLE = Path(__file__).parents[1] / "data" / "torl_sample"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_char_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def load(path, tokenizer, *, split="train", max_length=None):
    config = DatasetConfig(
        path=str(path), type="rl", dataset_kwargs={"loader": "torl_data"}, max_length=max_length
    )
    return get_custom_dataset(split, config, tokenizer)


@pytest.mark.parametrize("path", [SAMPLE, SAMPLE / "train.parquet"])
def test_rows_of_the_sample(path, tokenizer):
    rows = load(path, tokenizer)
    assert [row["answer"] for row in rows] == ["400", "\\sqrt{2}", "25", "\\frac{5}{6}"]
    for row in rows:
        assert set(row) == {"messages", "answer"}
        assert [message["role"] for message in row["messages"]] == ["system", "user"]
        reply = f"so \\boxed{{{row['answer']}}}"
        assert math_verify_reward_fn("", reply, [], [], **row) == 1.0


def test_wrong_files_are_explained(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match="dataset.path: ./torl_data does not exist"):
        load("./torl_data", tokenizer)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": [{"role": "user", "content": "q"}]}\n')
    with pytest.raises(ValueError, match="row 0 has no column reward_model; found prompt"):
        load(file, tokenizer)
    file.write_text('{"prompt": [{"role": "user", "content": "q"}], "reward_model": {"a": 1}}\n')
    with pytest.raises(ValueError, match=r"row 0 has no reward_model.ground_truth; found \{'a'"):
        load(file, tokenizer)
    file.write_text("")
    with pytest.raises(ValueError, match="has no row in split 'train'"):
        load(file, tokenizer)
    with pytest.raises(ValueError, match="no row in split 'train' with at most 10 tokens"):
        load(SAMPLE, tokenizer, max_length=10)
