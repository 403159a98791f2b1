"""Loaders as AReaL's guide writes and tests them: ours, and one of a user."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from areal.api.cli_args import TrainDatasetConfig
from areal.dataset import get_custom_dataset
from areal.dataset.arithmetic import build_char_tokenizer
from areal.dataset.gsm8k import get_gsm8k_rl_dataset, get_gsm8k_sft_dataset

SAMPLE = str(Path(__file__).parents[1] / "data" / "gsm8k_sample")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_char_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_sft_dataset_loads(tokenizer):
    dataset = get_gsm8k_sft_dataset(SAMPLE, split="train", tokenizer=tokenizer)
    assert len(dataset) > 0
    assert "input_ids" in dataset.column_names
    assert "loss_mask" in dataset.column_names


def test_rl_dataset_loads(tokenizer):
    dataset = get_gsm8k_rl_dataset(SAMPLE, split="train", tokenizer=tokenizer)
    assert len(dataset) > 0
    assert "messages" in dataset.column_names
    assert "answer" in dataset.column_names


@pytest.mark.parametrize(
    ("kind", "columns"), [("sft", {"input_ids", "loss_mask"}), ("rl", {"messages", "answer"})]
)
def test_a_loader_of_the_guide_by_its_import_path(tokenizer, tmp_path, monkeypatch, kind, columns):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    loader = f"documented.get_mine_{kind}_dataset"
    config = TrainDatasetConfig(path=SAMPLE, type=kind, dataset_kwargs={"loader": loader})
    rows = get_custom_dataset(split="train", dataset_config=config, tokenizer=tokenizer)
    assert len(rows) == 20 and set(rows[0]) == columns
