"""Backend megatron, as far as a CPU goes: the model, its numbers, weights in and out, refusals."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from fsdp_world import FT_SPEC, make_batch
from gloo_ranks import run_ranks
from tiny import tiny_config, tiny_model, write_tiny_model

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.train_engine import OptimizerConfig, TrainEngineConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine import train_engine_class
from areal.engine.train.packing import token_outputs
from areal.models.hf_io import save_hf

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe"]


def needs_megatron() -> None:
    """Called by tests, not at import: ranks import this module too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core", reason="needs the extra megatron")


def open_model(folder, backend: str = "megatron:d1", **changes):
    """An engine that does not train."""
    engine = train_engine_class(backend)(
        TrainEngineConfig(path=str(folder), backend="megatron:d1", **changes)
    )
    engine.create_process_group(ModelAllocation.from_str(backend).parallel)
    engine.initialize()
    return engine


def write_model(folder, family: str, **overrides) -> dict[str, torch.Tensor]:
    """Weights whose norms and biases are not 1 and 0, by name."""
    model = tiny_model(family, **overrides)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.3)
    save_hf(model.named_hf_tensors(), tiny_config(family, **overrides), folder)
    return dict(model.named_hf_tensors())


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_comes_out_as_it_went_in(tmp_path, family):
    needs_megatron()
    written = write_model(tmp_path / "in", family, tie_word_embeddings=family != "qwen3")
    engine = open_model(tmp_path / "in")
    assert_same_bits(dict(engine.hf_weights()), written)
    engine.save(SaveLoadMeta(path=str(tmp_path / "out"), weight_format="hf"))
    other = open_model(tmp_path / "in", init_from_scratch=True)
    assert not torch.equal(*(dict(e.hf_weights())["model.norm.weight"] for e in (engine, other)))
    other.load(SaveLoadMeta(path=str(tmp_path / "out"), weight_format="hf"))
    assert_same_bits(dict(other.hf_weights()), written)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "logprobs_chunk_size": 3}])
def test_numbers_and_gradients_are_archons(tmp_path, family, options):
    needs_megatron()
    from areal.engine.train.megatron.weights import stream

    write_model(tmp_path, family, tie_word_embeddings=family != "qwen3")
    (stage,) = open_model(tmp_path, **options).stages
    archon = train_engine_class("archon:d1")(TrainEngineConfig(path=str(tmp_path), **options))
    archon.initialize()
    mb = {
        "input_ids": torch.randint(0, 64, (11,), dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 4, 11], dtype=torch.int32),
        "max_seqlen": 7,
    }
    expected = token_outputs(archon.model, mb, archon.config, None)
    weight_T = torch.randn(11)
    found = stage(mb)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    for logprobs_T in (found[0], expected[0]):
        (logprobs_T * weight_T).sum().backward()
    gradients = dict(stream([stage], lambda weight: weight.grad))
    for name, weight in archon.model.named_parameters():
        for hf_name, gradient in archon.model.adapter.convert_single_to_hf(name, weight.grad):
            torch.testing.assert_close(gradients[hf_name], gradient, atol=1e-4, rtol=1e-4)


def test_a_new_critic_says_nothing_and_a_drawn_one_what_archons_says(tmp_path):
    needs_megatron()
    write_tiny_model(tmp_path)
    mb = {
        "input_ids": torch.arange(5, dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 5], dtype=torch.int32),
        "max_seqlen": 5,
    }
    critic = open_model(tmp_path, is_critic=True)
    assert torch.equal(*critic.stages[0](mb), torch.zeros(5))
    assert "score.weight" in dict(critic.hf_weights())
    options = {"path": str(tmp_path), "is_critic": True, "init_from_scratch": True}
    archon = train_engine_class("archon:d1")(TrainEngineConfig(**options))
    archon.initialize()
    drawn = open_model(tmp_path, is_critic=True, init_from_scratch=True)
    (values_T,) = token_outputs(archon.model, mb, archon.config, None)
    torch.testing.assert_close(*drawn.stages[0](mb), values_T, atol=2e-6, rtol=0)


def test_weights_without_an_optimizer_are_saved_and_resumed(tmp_path):
    needs_megatron()
    written = write_model(tmp_path / "model", "qwen2")
    engine = open_model(tmp_path / "model")
    engine.set_version(3)
    place = SaveLoadMeta(path=str(tmp_path / "state"), weight_format="dcp")
    engine.save(place)
    other = open_model(tmp_path / "model", init_from_scratch=True)
    other.load(place)
    assert other.get_version() == 3
    assert_same_bits(dict(other.hf_weights()), written)


def rank_round_trip(folder: str, layouts: dict[str, list[str]]) -> list[str]:
    """On each rank: what differs after a way through every layout."""
    from megatron.core import parallel_state

    wrong = []
    for layout, names in layouts.items():
        for family in names:
            engine = open_model(f"{folder}/{family}", layout)
            found = dict(engine.hf_weights())
            if torch.distributed.get_rank() == 0:
                written = torch.load(f"{folder}/{family}.pt")
                same = found.keys() == written.keys() and all(
                    torch.equal(found[name], written[name]) for name in written
                )
                wrong += [] if same else [f"{family} in {layout}"]
            else:
                wrong += [f"{name} on another rank" for name in found]
        parallel_state.destroy_model_parallel()
    return wrong


def test_a_checkpoint_goes_through_tensor_pipeline_and_expert_ranks(tmp_path):
    needs_megatron()
    sizes = {"qwen2": {"vocab_size": 63}, "qwen3": {"tie_word_embeddings": False}, "qwen3_moe": {}}
    for family, overrides in sizes.items():
        written = write_model(tmp_path / family, family, **overrides)
        torch.save(written, tmp_path / f"{family}.pt")
    layouts = {
        "megatron:d1t2": ["qwen2", "qwen3"],
        "megatron:d1t2e2": ["qwen3_moe"],
        "megatron:(attn:d1t2|ffn:d1t2)": ["qwen3_moe"],
        "megatron:d1p2": list(sizes),
        "megatron:d2": ["qwen3_moe"],
        "megatron:d2e2": ["qwen3_moe"],
        "megatron:d1c2": ["qwen3"],
    }
    target = "engine.train.test_megatron_model:rank_round_trip"
    assert run_ranks(2, target, str(tmp_path), layouts, timeout_s=900) == [[], []]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_a_cpu_is_refused_in_words(tmp_path):
    needs_megatron()
    write_tiny_model(tmp_path)
    engine = open_model(tmp_path)
    with pytest.raises(RuntimeError, match="use backend archon or fsdp on a CPU"):
        engine.forward_batch(make_batch())
    trained = TrainEngineConfig(
        path=str(tmp_path), backend="megatron:d1", optimizer=OptimizerConfig()
    )
    with pytest.raises(RuntimeError, match="computes on CUDA devices alone"):
        train_engine_class("megatron:d1")(trained).initialize(FT_SPEC)


def test_another_layout_in_the_same_process_is_refused(tmp_path):
    needs_megatron()
    write_tiny_model(tmp_path)
    open_model(tmp_path)
    from areal.engine.train.megatron.layout import enter_layout

    with pytest.raises(ValueError, match="needs 2 ranks, but 1 processes were started"):
        enter_layout(ModelAllocation.from_str("megatron:d2").parallel, torch.device("cpu"))


def test_without_the_extra_the_error_names_it():
    code = """
import sys
sys.modules["megatron"] = None  # as if it were not installed
from areal.engine import train_engine_class
train_engine_class("megatron:d1")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.returncode == 1
    assert "pip install areal[megatron]" in done.stderr.splitlines()[-1]
