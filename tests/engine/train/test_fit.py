"""What an engine cannot compute is told from config.json, and the engine says the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config, write_tiny_model
from tiny_run import grpo_config
from transformers import AutoConfig, AutoModelForCausalLM

from areal.api.config.inference import InferenceEngineConfig
from areal.api.config.inference_servers import NativeServerConfig
from areal.api.config.train_engine import ArchonEngineConfig, TrainEngineConfig
from areal.engine import train_engine_class
from areal.engine.train.fit import check_generation, check_models, check_training

EXPERTS = "qwen3_moe"


def refusal(hf_config: dict[str, Any], backend: str, **options: Any) -> str:
    with pytest.raises(ValueError) as error:
        check_training(TrainEngineConfig(path="model", backend=backend, **options), hf_config)
    return str(error.value)


@pytest.mark.parametrize(
    ("backend", "family", "overrides", "says"),
    [
        ("archon:d1", "olmo2", {}, "'olmo2' is not supported: known types are deepseek_v2"),
        ("archon:d1", "qwen3", {"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ("archon:d1", "qwen2", {"use_sliding_window": True}, "sliding window"),
        ("archon:d1", "qwen3", {"quantization_config": {"bits": 4}}, "quantized weights"),
        ("archon:d1", "llama", {"rope_scaling": {"rope_type": "odd"}}, "rope type 'odd'"),
        ("archon:t4", "qwen3", {}, "t4 cannot cut this model: num_key_value_heads"),
        ("archon:t2", "qwen3", {"vocab_size": 63}, "vocab_size of its config.json"),
        ("archon:t2", "deepseek_v2", {}, "t2: archon does not cut multi-head latent attention"),
        ("archon:t2", "qwen3_5_text", {}, "t2: archon does not cut layers with a recurrent"),
        ("archon:c2", "qwen3_5_text", {}, "c2: archon does not cut layers with a recurrent"),
        ("megatron:d1", "qwen3_5_text", {}, "got 'qwen3_5_text': use backend archon or fsdp"),
        ("fsdp:d1", "qwen3_5_text", {}, "Qwen3_5ForCausalLM has attention of its own"),
        ("archon:c8", "qwen3", {}, "c8 cannot cut this model"),
        ("archon:p2", "qwen3", {}, "cuts this model of 2 layers into 4 stages"),
        ("archon:d2e2", "qwen3", {}, "spreads experts, but this model has none"),
        ("archon:d8e8", EXPERTS, {}, "num_experts of its config.json must be a multiple of 8"),
        ("fsdp:d1", "t5", {}, "'t5' is no causal language model that transformers has"),
        ("fsdp:d1", "phi9", {"auto_map": {"AutoConfig": "x.Y"}}, "brings code of its own"),
        ("fsdp:d1", "falcon", {}, "FalconForCausalLM has attention of its own"),
        ("fsdp:d1", "gpt_oss", {}, "needs s_aux (attention sinks)"),
        ("fsdp:d1", "gemma2", {"attn_logit_softcapping": 50.0}, "needs softcap"),
        ("fsdp:d1", "lfm2", {"layer_types": ["conv"]}, "has layers of conv, which mix tokens"),
        ("fsdp:d1", "minimax", {"layer_types": ["linear_attention"]}, "linear_attention"),
        ("fsdp:d4t4", "qwen3", {}, "t4 cannot cut this model: num_key_value_heads"),
        ("fsdp:c8", "mistral", {}, "c8 cannot cut this model"),
        ("megatron:d1", "gemma3_text", {}, "got 'gemma3_text': use backend archon or fsdp"),
        ("megatron:d1", "deepseek_v2", {}, "got 'deepseek_v2': use backend archon or fsdp"),
        ("megatron:d1", "qwen3", {"attention_bias": True}, "has no attention_bias with a bias"),
        ("megatron:d1t8", "qwen3", {}, "t8 cannot cut this model: num_attention_heads"),
        ("megatron:d1p4", "qwen3", {}, "num_hidden_layers of its config.json must be a multiple"),
        ("megatron:d2e2", "qwen3", {}, "this model has none: remove e"),
        ("megatron:d1t2", EXPERTS, {}, "spread them with e2"),
    ],
)
def test_a_model_that_does_not_fit(
    backend: str, family: str, overrides: dict[str, Any], says: str
) -> None:
    known = ("qwen2", "qwen3", "llama", "gemma3_text", "deepseek_v2", "qwen3_5_text", EXPERTS)
    config = tiny_config(family if family in known else "qwen3", **overrides) | {
        "model_type": family
    }
    assert says in refusal(config, backend)


def test_stock_servers_get_no_adapters_of_experts(tmp_path):
    config = grpo_config(
        tmp_path,
        "rollout.backend=vllm:d1",
        "rollout.use_lora=true",
        "actor.use_lora=true",
        "actor.target_modules=[q_proj, up_proj]",
    )
    check_models(config, {"actor": tiny_config("qwen3")})
    with pytest.raises(ValueError, match=r"rollout.use_lora must be false .* \(up_proj\)"):
        check_models(config, {"actor": tiny_config(EXPERTS)})


@pytest.mark.parametrize(
    ("backend", "family", "options", "says"),
    [
        (
            "archon:d1",
            "qwen3_5_text",
            {"batch_invariant": True},
            "no such kernel for layers with a recurrent state",
        ),
        (
            "archon:d1",
            "qwen3_5_text",
            {"enable_tree_training": True},
            "this qwen3_5_text has layers with a recurrent state: set it to false",
        ),
        (
            "archon:d1",
            "qwen3_5_text",
            {"archon": ArchonEngineConfig(fp8_forward=True)},
            "this one has layers with a recurrent state: set it to false",
        ),
    ],
)
def test_options_that_do_not_fit(
    backend: str, family: str, options: dict[str, Any], says: str
) -> None:
    assert says in refusal(tiny_config(family), backend, **options)


def test_what_a_frozen_model_has_of_the_actor_is_refused_under_its_own_name(tmp_path: Path) -> None:
    config = grpo_config(
        tmp_path,
        "actor.archon.fp8_config.mode=blockwise",
        "actor.kl_ctl=0.1",
        "ref={backend: 'archon:d1t2'}",
    )
    with pytest.raises(
        ValueError, match=r"^ref\.backend: 'archon:d1t2' .*fp8_config\.mode must be"
    ):
        check_models(config, dict.fromkeys(("actor", "ref"), tiny_config("qwen3")))


def test_batch_invariant_takes_windows_and_scales() -> None:
    gemma = tiny_config("gemma3_text")
    config = TrainEngineConfig(path="model", backend="archon:d1", batch_invariant=True)
    check_training(config, gemma)
    server = NativeServerConfig(batch_invariant=True)
    check_generation(InferenceEngineConfig(backend="native:d1"), server, gemma)


@pytest.mark.parametrize("backend", ["archon:d1", "archon:d2t2", "fsdp:d2t2", "megatron:d1t2"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_what_fits_is_let_through(backend: str, family: str) -> None:
    check_training(TrainEngineConfig(path="model", backend=backend), tiny_config(family))


def test_what_the_native_server_cannot_generate_with() -> None:
    def refuse(backend: str, config: dict[str, Any], says: str, **native: Any) -> None:
        with pytest.raises(ValueError, match=says):
            check_generation(
                InferenceEngineConfig(backend=backend), NativeServerConfig(**native), config
            )

    olmo2 = tiny_config("qwen3") | {"model_type": "olmo2"}
    refuse("native:d1", olmo2, "model_type 'olmo2' is not supported")
    refuse("native:d1t4", tiny_config(), "num_key_value_heads of the model's config.json")
    for backend in ("vllm:d1", "sglang:d1"):
        check_generation(InferenceEngineConfig(backend=backend), NativeServerConfig(), olmo2)


@pytest.mark.parametrize(
    ("backend", "family", "overrides", "options"),
    [
        ("archon:d1", "qwen3", {"hidden_act": "gelu"}, {}),
        ("archon:d1", "qwen3_5_text", {}, {"batch_invariant": True}),
        ("fsdp:d1", "qwen3", {"model_type": "falcon"}, {}),
    ],
)
def test_the_engine_says_the_same(
    tmp_path: Path, backend: str, family: str, overrides: dict[str, Any], options: dict[str, Any]
) -> None:
    write_tiny_model(tmp_path, family)
    config = {**tiny_config(family), **overrides}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = refusal(config, backend, **options)
    engine_config = TrainEngineConfig(path=str(tmp_path), backend=backend, **options)
    with pytest.raises(ValueError) as error:
        train_engine_class(backend)(engine_config).initialize()
    assert str(error.value) == expected


@pytest.mark.parametrize("family", ["mistral", "mixtral", "phi3", "olmo2", "gpt_neox", "opt"])
def test_families_that_are_let_through_do_train(tmp_path: Path, family: str) -> None:
    """The source of transformers tells what the built model then confirms."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    if family == "opt":
        sizes |= {"word_embed_proj_dim": 32, "ffn_dim": 48}
    config = AutoConfig.for_model(family, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    engine = train_engine_class("fsdp:d1")(TrainEngineConfig(path=str(tmp_path), backend="fsdp:d1"))
    engine.initialize()
    engine.destroy()


def test_it_needs_no_torch() -> None:
    program = (
        "import sys, areal.engine.train.fit; print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
