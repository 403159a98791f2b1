"""Model folders: transformers reads ours, we read theirs, shards, and what does not fit."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_model, write_tiny_model

from areal.models import _FAMILIES, get_model_spec, known_model_types
from areal.models.hf_io import build_model, check_hf_shapes, load_hf, read_hf_config, save_hf

FAMILIES = ["qwen2", "qwen3", "llama", "mistral", "gemma3_text", "qwen3_5_text"]
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
FAMILY = pytest.mark.parametrize("family", FAMILIES)


def load(folder):
    model = build_model(folder, device="cpu", dtype=torch.float32)
    load_hf(model, folder)
    return model


def assert_same_weights(left, right) -> None:
    left, right = dict(left.named_hf_tensors()), dict(right.named_hf_tensors())
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_model_is_built_without_what_only_compilers_need():
    """Sympy is a second of a server's start."""
    code = "import sys, torch; from areal.models.hf_io import build_model\n"
    code += "before = set(sys.modules)\n"
    code += f"build_model({tiny_config()!r}, device='cpu', dtype=torch.float32)\n"
    code += "sys.exit('sympy' in set(sys.modules) - before)\n"
    assert subprocess.run([sys.executable, "-c", code], timeout=900).returncode == 0


@FAMILY
@TIED
def test_transformers_loads_what_we_save(family, tied, tmp_path):
    from transformers import AutoModelForCausalLM

    write_tiny_model(tmp_path, family, tie_word_embeddings=tied)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ours = dict(tiny_model(family, tie_word_embeddings=tied).named_hf_tensors())
    state = theirs.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in ours.items())
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"]) == tied


@FAMILY
@TIED
def test_we_load_what_transformers_saves(family, tied, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**tiny_config(family, tie_word_embeddings=tied))
    theirs = AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert "rope_parameters" in read_hf_config(tmp_path)  # the transformers 5 spelling
    state = theirs.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in ours.named_hf_tensors())


def test_shards_hold_every_weight_once(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_model("llama", tie_word_embeddings=False)
    config = tiny_config("llama", tie_word_embeddings=False)
    save_hf(model.named_hf_tensors(), config, tmp_path, max_shard_bytes=10_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in tmp_path.glob("*.safetensors*") if p.suffix != ".json")
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    names = [name for file in files for name in load_file(tmp_path / file)]
    assert sorted(names) == sorted(dict(model.named_hf_tensors()))
    assert index["metadata"]["total_size"] == sum(t.nbytes for _, t in model.named_hf_tensors())
    assert all(
        sum(t.nbytes for t in shard.values()) <= 10_000 or len(shard) == 1
        for shard in (load_file(tmp_path / file) for file in files)
    )
    assert_same_weights(load(tmp_path), model)
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_saved_dtype_is_written_in_the_config(tmp_path):
    model = tiny_model().to(torch.bfloat16)
    save_hf(model.named_hf_tensors(), tiny_config(dtype="float32"), tmp_path)
    assert read_hf_config(tmp_path)["dtype"] == "bfloat16"
    assert all(
        t.dtype == torch.bfloat16 for t in load_file(tmp_path / "model.safetensors").values()
    )
    old_style = {k: v for k, v in tiny_config().items() if k != "dtype"} | {
        "torch_dtype": "float32"
    }
    save_hf(model.named_hf_tensors(), old_style, tmp_path)
    assert read_hf_config(tmp_path)["torch_dtype"] == "bfloat16"


def test_redundant_tensors_of_old_checkpoints_are_tolerated(tmp_path):
    write_tiny_model(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(state, file)
    assert_same_weights(load(tmp_path), tiny_model())


def test_a_wrong_checkpoint_is_refused_before_anything_is_copied(tmp_path):
    write_tiny_model(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["model.norm.bias"] = torch.zeros(32)
    del state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(3, 32)
    save_file(state, file)
    model = tiny_model(seed=5)
    with pytest.raises(ValueError) as error:
        load_hf(model, tmp_path)
    message = str(error.value)
    assert str(tmp_path) in message
    assert "missing model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected model.norm.bias" in message
    assert "model.layers.0.self_attn.k_proj.weight is [3, 32], expected [16, 32]" in message
    assert_same_weights(model, tiny_model(seed=5))


def test_a_long_list_of_faults_is_cut_short():
    with pytest.raises(ValueError, match=r"missing .*and 16 more"):
        check_hf_shapes(tiny_model(), {}, source="nothing")


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json not found"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is damaged: it is not valid JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no 'model_type'"):
        read_hf_config(tmp_path)
    model = tiny_model()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        load_hf(model, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "gone.safetensors"}}'
    )
    with pytest.raises(FileNotFoundError, match="gone.safetensors"):
        load_hf(model, tmp_path)
    write_tiny_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_hf(model, tmp_path)


@pytest.fixture
def small_disk():
    """No file may grow past 16 KiB: writing fails as it does on a full disk."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_cannot_hold_the_weights_is_an_os_error(small_disk, tmp_path):
    with pytest.raises(OSError, match="cannot write .*model-00001"):
        write_tiny_model(tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_saving_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no weights to save"):
        save_hf(iter(()), tiny_config(), tmp_path)


def test_unknown_model_type_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="'gpt2' is not supported.*llama, mistral, qwen2, qwen2_5_vl, qwen3"
    ):
        build_model({"model_type": "gpt2"}, device="cpu", dtype=torch.float32)


def test_registry_rows_agree_with_their_specs():
    for model_type in known_model_types():
        spec = get_model_spec(model_type)
        assert model_type in spec.supported_model_types <= set(known_model_types())
        assert spec.model_class.adapter_class is spec.state_dict_adapter_class
        assert spec.model_args_class is _FAMILIES[model_type][0]
