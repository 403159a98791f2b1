"""`areal merge` against peft's own merge, and its refusals."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from fsdp_world import loss_fn, loss_tokens, make_batch, open_engine
from hf_twins import merged_by_peft
from safetensors.torch import load_file
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM

from areal.api.io_struct import SaveLoadMeta
from areal.cli.main import main

LORA = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8.0}


def trained(folder, out, backend="archon:d1", **changes):
    engine = open_engine(folder, backend, **{**LORA, **changes})
    for number in range(2):
        engine.train_batch(make_batch(number), loss_fn, loss_tokens)
    engine.save(SaveLoadMeta(path=str(out), weight_format="hf"))
    return engine


@pytest.mark.parametrize("backend", ["archon:d1", "fsdp:d1"])
def test_a_merged_folder_is_what_peft_makes_of_it(backend, tmp_path, capsys):
    folder = write_tiny_model(tmp_path / "base")
    (folder / "tokenizer_config.json").write_text('{"kept": true}')
    engine = trained(folder, tmp_path / "run" / "model", backend)  # where a run leaves it
    assert main(["merge", str(tmp_path / "run"), "--out", str(tmp_path / "whole")]) == 0
    assert "merged" in capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = merged_by_peft(base, tmp_path / "run" / "model")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    expected = dict(adapted.named_parameters())
    for name, weight in whole.named_parameters():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)
    assert json.loads((tmp_path / "whole" / "tokenizer_config.json").read_text()) == {"kept": True}
    batch = make_batch(5)
    found = open_engine(tmp_path / "whole", "archon:d1").forward_batch(batch)
    torch.testing.assert_close(found, engine.forward_batch(batch))


def test_adapters_of_experts_are_merged(tmp_path):
    folder = write_tiny_model(tmp_path / "base", "qwen3_moe")
    targets = ["gate_proj", "down_proj", "q_proj"]
    engine = trained(folder, tmp_path / "adapter", target_modules=targets)
    assert main(["merge", str(tmp_path / "adapter"), "--out", str(tmp_path / "whole")]) == 0
    found = load_file(tmp_path / "whole" / "model.safetensors")
    for name, tensor in engine.hf_weights():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


def test_what_cannot_be_merged_is_refused(tmp_path, capsys):
    folder = write_tiny_model(tmp_path / "base")
    trained(folder, tmp_path / "adapter")
    adapter, out = str(tmp_path / "adapter"), str(tmp_path / "out")

    def refused(*argv: str) -> str:
        assert main(["merge", *argv]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "has no adapter_config.json" in refused(str(tmp_path), "--out", out)
    assert "is there already" in refused(adapter, "--out", adapter)
    assert "expected a Hugging Face folder" in refused(adapter, "--out", out, "--base", adapter)
    other = write_tiny_model(tmp_path / "experts", "qwen3_moe")
    assert "was not trained for" in refused(adapter, "--out", out, "--base", str(other))
    config = tmp_path / "adapter" / "adapter_config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "base_model_name_or_path": None}))
    assert "names no base model" in refused(adapter, "--out", out)
    shutil.rmtree(tmp_path / "adapter")
    assert "has no adapter_config.json" in refused(adapter, "--out", out)
