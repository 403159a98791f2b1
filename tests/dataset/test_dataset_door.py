"""Which loader a config section means."""

from __future__ import annotations

import pytest

from areal.api.config.run import DatasetConfig
from areal.dataset import LOADERS, get_custom_dataset
from areal.utils import import_path


def test_every_row_of_the_table_imports():
    for where in LOADERS.values():
        assert callable(import_path.load(where, key="dataset.path"))


@pytest.mark.parametrize("as_path", [True, False])
def test_a_loader_by_its_import_path(as_path, tmp_path, monkeypatch):
    (tmp_path / "my_loaders.py").write_text(
        "def load(path, *, split, tokenizer, max_length, greeting='hi', processor=None):\n"
        "    return [{'messages': greeting, 'split': split, 'processor': processor}]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = (
        DatasetConfig(path="my_loaders.load", type="rl")
        if as_path
        else DatasetConfig(
            path="some/where", dataset_kwargs={"loader": "my_loaders.load", "greeting": "yo"}
        )
    )
    (row,) = get_custom_dataset("train", config, tokenizer=None, processor="p")
    assert row == {"messages": "hi" if as_path else "yo", "split": "train", "processor": "p"}


@pytest.mark.parametrize(
    "path, type, message",
    [
        ("gsm9k", "rl", "no loader is known for 'gsm9k'; name one in dataset_kwargs.loader"),
        ("org/unknown", "rl", "no loader is known for 'org/unknown'"),
        ("no_such_module.load", "rl", "cannot import 'no_such_module.load'"),
        ("gsm8k", "rw", "dataset.type: gsm8k has types rl, sft, got 'rw'"),
        ("gsm8k", None, "dataset.type: gsm8k has types rl, sft, got None"),
    ],
)
def test_unknown_names(path, type, message):
    config = DatasetConfig(path=path)
    config.type = type
    with pytest.raises(ValueError, match=message):
        get_custom_dataset("train", config, tokenizer=None)


def test_options_the_loader_does_not_know():
    config = DatasetConfig(path="gsm8k", type="rl", dataset_kwargs={"colour": "red"})
    with pytest.raises(ValueError, match="do not fit get_gsm8k_rl_dataset: .*'colour'"):
        get_custom_dataset("train", config, tokenizer=None)


def test_an_unknown_named_loader_lists_the_known_ones():
    config = DatasetConfig(path="some/where", type="rl", dataset_kwargs={"loader": "gsm8"})
    with pytest.raises(ValueError, match="did you mean 'gsm8k'"):
        get_custom_dataset("train", config, tokenizer=None)
