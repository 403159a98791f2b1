"""What the benchmarks of GPUs compute without one: least work, kinds of kernels, differences."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tiny import tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import GenRequest
from areal.models.hf_io import build_model

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmark"


@pytest.fixture
def profile(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import generation_profile

    return generation_profile


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_check

    return gpu_check


@pytest.mark.parametrize("shape", ["1.5b", "7b", "30b_a3b", "gemma3_1b"])
def test_many_rows_read_every_matrix(profile, shape):
    from generation import SHAPES, body_weights

    model = build_model(SHAPES[shape], device="meta", dtype=torch.bfloat16)
    matrices = [p.numel() for p in model.layers.parameters() if p.ndim >= 2]
    assert body_weights(model.args, 10_000)[0] == pytest.approx(sum(matrices))


def test_few_rows_read_the_experts_they_choose(profile):
    from generation import body_weights

    args = tiny_model("qwen3_moe", num_hidden_layers=1).args  # 2 of 4 experts
    attention, router, expert = 32 * 8 * 12, 4 * 32, 3 * 32 * 16
    used = attention + router + 2 * expert
    assert body_weights(args, 1) == (used, used)
    # Two rows: of each expert, both fail to choose it with probability 1/4.
    assert body_weights(args, 2) == (attention + router + 3 * expert, used)


def test_the_least_time_of_a_step_by_hand(profile):
    from generation import Ceilings

    work = profile.Work(
        matrix_bytes=8e9,
        matrix_flop=3e12,
        cache_bytes=2e9,
        attention_flop=1e12,
        state_bytes=2e9,
        logit_bytes=4e9,
    )
    least = work.least_seconds(Ceilings(bytes_per_s=4e9, flop_per_s=1e12))
    # 8e9 bytes take 2 s, 3e12 operations 3 s: the longer one counts.
    expected = {"matrix": 3.0, "attention": 1.0, "states": 0.5, "sampling": 1.0, "rest": 0.0}
    assert least == expected


@pytest.mark.parametrize(("window", "cached"), [(None, [4, 5, 6]), (3, [3, 3, 3]), (5, [4, 5, 5])])
def test_the_least_time_of_a_model_reads_what_its_windows_see(profile, window, cached):
    """Prompts of 4 tokens and 3 of output: at each step the tokens before it, or the window's."""
    import generation

    layers = {
        "num_hidden_layers": 1,
        "sliding_window": window or 10**6,
        "sliding_window_pattern": 2,
    }
    model = tiny_model("gemma3_text", **layers)
    load = generation.Load("gemma3_1b", prompts=7, num_in=4, num_out=3)
    bytes_only = generation.Ceilings(bytes_per_s=1.0, flop_per_s=float("inf"))
    matrices = [p.numel() for p in model.layers.parameters() if p.ndim >= 2]
    weights = sum(matrices) + model.output_weight.numel()
    token_bytes = 4 * model.args.n_kv_heads * model.args.head_dim
    expected = 3 * 2 * weights + sum(cached) * 7 * token_bytes
    assert generation.least_seconds(model, load, bytes_only) == expected


def test_the_work_of_attention_stops_at_the_window(profile):
    from generation import Load

    layers = {"num_hidden_layers": 2, "sliding_window": 3, "sliding_window_pattern": 2}
    args = tiny_model("gemma3_text", **layers).args
    load = Load("gemma3_1b", prompts=1, num_in=5, num_out=4)
    per_pair = 4 * args.n_heads * args.head_dim
    # Rows of the layer with a window see 1, 2, 3, 3, 3 keys, of the other 1 to 5.
    assert profile.prefill_work(args, load, 2).attention_flop == (12 + 15) * per_pair
    assert profile.decode_work(args, load, 2).attention_flop == (3 + 7) * per_pair


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix"),
        ("_skinny_kernel", "matrix"),
        ("_few_rows_kernel", "matrix"),
        ("_expert_kernel", "matrix"),
        ("_decode_kernel", "attention"),
        ("_prompt_kernel", "attention"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>", "attention"),
        ("race_kernel", "sampling"),
        ("_finish_kernel", "rest"),  # of a step, not of a draw
        ("_rms_norm_kernel", "rest"),
    ],
)
def test_kernels_have_a_kind(profile, kernel, kind):
    assert profile.kind_of(kernel) == kind


def test_another_order_of_sums_changes_little_in_float32_and_nothing_for_good(gpu_check):
    model = tiny_model("qwen3", seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gap = gpu_check.sum_order_gap(model, random.Random(0))
    assert 0 < gap < 1e-5
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_adapters_of_the_benchmark_change_every_projection(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import adapters

    engine = NativeEngine(tiny_model("qwen2", num_hidden_layers=2), page_size=4, num_pages=50)
    for seed in range(2):
        adapters.add_adapter(engine, seed, rank=3)
    prompt, names = [5, 7, 9], ["", *engine.adapters.names]
    options = [GenerationHyperparameters(max_new_tokens=4, seed=1, lora_name=n) for n in names]
    for name, option in zip(names, options, strict=True):
        engine.add(GenRequest(name or "plain", prompt, option))
    logprobs = set()
    while engine.has_work:
        logprobs |= {tuple(done.output_logprobs) for done in engine.step()}
    assert len(logprobs) == 3
    (adapter, _) = engine.adapters.by_number.values()
    assert len(adapter.matrices) == 2 * len(adapters.TARGETS)


def test_the_tokens_that_a_group_lets_guess_by_hand(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from drafts import guessable_share

    prompt = [1, 2, 3, 4]
    # Of the first answer the prompt tells the 4 after 1 2 3. In the second, written at the same
    # pace, 9 follows 7 8 6 as in the first one two places before; 5 follows 1 2 3 as nowhere else.
    first, second = [1, 2, 3, 4, 7, 8, 6, 9], [1, 2, 3, 5, 0, 0, 7, 8, 6, 9]
    assert guessable_share([(prompt, [first])]) == 1 / 8
    assert guessable_share([(prompt, [first, second])]) == 2 / 18
    assert guessable_share([(prompt, [[5, 6], [5]])]) == 0
