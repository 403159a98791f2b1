"""The engine on CUDA against a fresh forward: windows, softcaps, norms, activations, head sizes."""

from __future__ import annotations

import random

import pytest
import torch
from tiny import tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.engine.invariant_attention import InvariantPackedAttention
from areal.engine.native.cuda import shared_prompts
from areal.engine.native.cuda.runner import CudaRunner
from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import GenRequest
from areal.models.common.attention import PackedAttention
from areal.models.common.decoder import Decoder, softcap
from areal.models.common.invariant import invariant_logits, row_logprobs

pytestmark = pytest.mark.gpu

VOCAB = 3000
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1100,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "initializer_range": 0.06,
}
_DEEPSEEK = _COMMON | {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 320,
}
_GEMMA = _COMMON | {"sliding_window_pattern": 2, "query_pre_attn_scalar": 200}
MODELS = {
    "gemma_short_window": ("gemma3_text", _GEMMA | {"head_dim": 256, "sliding_window": 50}),
    "gemma_long_window": ("gemma3_text", _GEMMA | {"head_dim": 256, "sliding_window": 2000}),
    "gemma_softcap": (
        "gemma3_text",
        _GEMMA | {"head_dim": 112, "sliding_window": 100, "final_logit_softcapping": 4.0},
    ),
    "heads_of_80": ("llama", _COMMON | {"head_dim": 80, "mlp_bias": True}),
    "heads_of_96": ("qwen3", _COMMON | {"head_dim": 96}),
    "heads_of_192": ("qwen2", _COMMON | {"head_dim": 192}),
    "hybrid": (
        "qwen3_5_text",
        _COMMON
        | {"head_dim": 256, "full_attention_interval": 4, "partial_rotary_factor": 0.25}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    ),
    # Heads of DeepSeek-V2-Lite; then more heads than a program has, experts in groups, and a
    # latent vector that is padded.
    "latent": (
        "deepseek_v2",
        _DEEPSEEK
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    ),
    "latent_groups": (
        "deepseek_v2",
        _DEEPSEEK
        | {"num_attention_heads": 40, "num_key_value_heads": 40, "kv_lora_rank": 96}
        | {"qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 32, "q_lora_rank": 160}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
}


def make_model(name: str, seed: int, dtype: torch.dtype) -> Decoder:
    family, config = MODELS[name]
    model = tiny_model(family, seed=seed, **config)
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or parameter_name.endswith("bias"):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.to(torch.bfloat16).to("cuda", dtype)


def requests_of(count: int, seed: int) -> list[GenRequest]:
    """Prompts of all lengths; every second request samples the same long one."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(200)]
    return [
        GenRequest(
            f"{seed}-{i}",
            shared if i % 2 else [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 300))],
            GenerationHyperparameters(
                seed=i, max_new_tokens=rng.randrange(1, 100), ignore_eos=True
            ),
        )
        for i in range(count)
    ]


def run(engine: NativeEngine, requests: list[GenRequest]) -> tuple[list[list[int]], torch.Tensor]:
    """Whole sequences, and the engine's log-probabilities of all outputs."""
    for request in requests:
        engine.add(request)
    done = {}
    while engine.has_work:
        done |= {finished.rid: finished for finished in engine.step()}
    outputs = [done[request.rid] for request in requests]
    sequences = [r.input_ids + out.output_tokens for r, out in zip(requests, outputs, strict=True)]
    return sequences, torch.tensor([x for out in outputs for x in out.output_logprobs])


@torch.no_grad()
def module_logprobs(
    model: Decoder, requests: list[GenRequest], sequences: list[list[int]]
) -> torch.Tensor:
    found = []
    for request, tokens in zip(requests, sequences, strict=True):
        tokens_T = torch.tensor(tokens, device="cuda")
        attend = PackedAttention(tokens_T.new_tensor([0, len(tokens)]), len(tokens))
        first = len(request.input_ids)
        hidden_TD = model(tokens_T, attend.positions_T, attend)[first - 1 : -1]
        logprobs_TV = model.logits(hidden_TD).double().log_softmax(-1)
        found.append(logprobs_TV.gather(1, tokens_T[first:, None]).squeeze(1).cpu())
    return torch.cat(found)


def mean_gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).abs().mean().item()


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_before_and_after_new_weights(name, monkeypatch):
    """bfloat16 differs from float32 no more than the module itself in bfloat16 does."""
    monkeypatch.setattr(shared_prompts, "MIN_SAVED_BYTES", 1)
    engine = NativeEngine(make_model(name, 0, torch.bfloat16), num_pages=6000, max_running=128)
    assert isinstance(engine._runner, CudaRunner)
    for seed in range(2):
        rounded, exact = (make_model(name, seed, t) for t in (torch.bfloat16, torch.float32))
        if seed:
            engine.load_weights(rounded.named_hf_tensors(), seed, recompute_kv=True)
        for count in (1, 6, 40, 120):  # each with kernels of its own
            requests = requests_of(count, seed=10 * seed + count)
            sequences, found = run(engine, requests)
            wanted = module_logprobs(exact, requests, sequences)
            rounding = mean_gap(module_logprobs(rounded, requests, sequences), wanted)
            assert mean_gap(found, wanted) < 1.5 * rounding + 1e-3, (count, rounding)


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_in_float32(name, monkeypatch):
    monkeypatch.setattr(shared_prompts, "MIN_SAVED_BYTES", 1)
    model = make_model(name, 0, torch.float32)
    engine = NativeEngine(model, num_pages=6000, max_running=64)
    assert isinstance(engine._runner, CudaRunner)
    for count in (3, 30):
        requests = requests_of(count, seed=count)
        sequences, found = run(engine, requests)
        wanted = module_logprobs(make_model(name, 0, torch.float32), requests, sequences)
        torch.testing.assert_close(found.double(), wanted, atol=2e-3, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma_short_window", "gemma_softcap", "heads_of_96"])
def test_batch_invariant_logprobs_are_the_trainers_bits(name):
    model = make_model(name, 0, torch.bfloat16)
    engine = NativeEngine(model, num_pages=6000, max_running=64, batch_invariant=True)
    requests = requests_of(20, seed=0)
    sequences, found = run(engine, requests)
    bounds = torch.tensor([0, *map(len, sequences)], device="cuda").cumsum(0)
    attend = InvariantPackedAttention(bounds, max(map(len, sequences)))
    tokens_T = torch.tensor([token for tokens in sequences for token in tokens], device="cuda")
    hidden_TD = model(tokens_T, attend.positions_T, attend)
    logits_TV = invariant_logits(hidden_TD[:-1], model.output_weight)
    logits_TV = softcap(logits_TV, model.args.logit_softcap)
    logprobs_T = row_logprobs(logits_TV, tokens_T[1:]).cpu()
    wanted = [
        logprobs_T[start + len(request.input_ids) - 1 : start + len(tokens) - 1]
        for start, request, tokens in zip(bounds.tolist(), requests, sequences, strict=False)
    ]
    assert torch.equal(found, torch.cat(wanted))
