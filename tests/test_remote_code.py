"""A model folder that brings Python files: they are not run, and the user is told."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import tiny_config

from areal.engine.train.fsdp.model import build_model
from areal.utils.tokenizer import load_hf_tokenizer


@pytest.fixture
def folder(tmp_path):
    """Every way in that transformers knows, each of which would leave a mark."""
    mark = tmp_path / "mark"
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\nclass Mine: pass\n"
    config = {**tiny_config("qwen3"), "model_type": "mine", "architectures": ["Mine"]}
    config["auto_map"] = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}
    model = tmp_path / "model"
    model.mkdir()
    (model / "mine.py").write_text(code)
    (model / "config.json").write_text(json.dumps(config))
    tokenizer = {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine"}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    yield model
    assert not mark.exists(), "code of the model was run"


def test_a_model(folder):
    with pytest.raises(ValueError, match="brings code of its own, which areal does not run"):
        build_model(folder, dtype=torch.float32, is_critic=False)


def test_a_tokenizer(folder):
    with pytest.raises(ValueError, match="brings code of its own, which areal does not run"):
        load_hf_tokenizer(str(folder))
