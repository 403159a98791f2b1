"""Experts: parity with transformers, routing by hand, balance, any number of rows."""

from __future__ import annotations

import pytest
import torch
from hf_twins import assert_same_logits, twin_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_config, tiny_model, write_tiny_model

from areal.models import get_model_spec
from areal.models.common.args import MoEArgs
from areal.models.common.moe import Experts, Router, balance_experts
from areal.models.hf_io import build_model, load_hf, save_hf


def args_of(**overrides):
    config = tiny_config("qwen3_moe", **overrides)
    return get_model_spec("qwen3_moe").model_args_class.from_hf_config(config)


def make_router(probs, *, top_k=2, norm_topk_prob=False, expert_bias=True) -> Router:
    """A router that gives token t the probabilities `probs[t]`, for inputs `eye(T)`."""
    logits = torch.tensor(probs).log()
    args = MoEArgs(
        num_experts=logits.shape[1],
        top_k=top_k,
        hidden_dim=1,
        norm_topk_prob=norm_topk_prob,
        layers=frozenset(),
        expert_bias=expert_bias,
    )
    router = Router(len(logits), args)
    with torch.no_grad():
        router.weight.copy_(logits.T)
    return router


def test_grouped_routing_by_hand():
    # The best two experts are of groups 0 and 2; within the best group alone, others are next.
    probs = [[0.3, 0.05, 0.04, 0.11, 0.25, 0.25], [0.1, 0.2, 0.1, 0.1, 0.35, 0.15]]
    args = MoEArgs(
        num_experts=6, top_k=2, hidden_dim=1, norm_topk_prob=False, layers=frozenset(),
        num_groups=3, top_groups=1, weight_scale=2.0,
    )  # fmt: skip
    router = Router(2, args)
    with torch.no_grad():
        router.weight.copy_(torch.tensor(probs).log().T)
    weights, experts = router(torch.eye(2))
    assert experts.tolist() == [[0, 1], [4, 5]]
    assert weights.flatten().tolist() == pytest.approx([0.6, 0.1, 0.7, 0.3])


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_small_configs_equal_transformers(data):
    num_experts = data.draw(st.integers(1, 9))
    num_layers = data.draw(st.integers(1, 4))
    overrides = {
        "num_experts": num_experts,
        "num_experts_per_tok": data.draw(st.integers(1, num_experts)),
        "moe_intermediate_size": data.draw(st.sampled_from([4, 8, 20])),
        "norm_topk_prob": data.draw(st.booleans()),
        "num_hidden_layers": num_layers,
        "decoder_sparse_step": data.draw(st.integers(1, 3)),
        "mlp_only_layers": data.draw(st.lists(st.integers(0, num_layers - 1), max_size=2)),
        "tie_word_embeddings": data.draw(st.booleans()),
    }
    ours, theirs = twin_models("qwen3_moe", **overrides)
    assert_same_logits(
        ours, theirs, data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=3))
    )


@pytest.mark.parametrize(
    ("family", "overrides"), [("qwen3_moe", {"mlp_only_layers": [0]}), ("deepseek_v2", {})]
)
def test_we_load_what_transformers_saves(tmp_path, family, overrides):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**tiny_config(family, **overrides))
    )
    theirs.save_pretrained(tmp_path)
    ours = build_model(tmp_path, device="cpu", dtype=torch.float32)
    load_hf(ours, tmp_path)
    assert_same_logits(ours, theirs.eval(), lengths=[40])


def test_sparse_layers_are_counted_from_one():
    args = args_of(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert args.moe.layers == {1, 5}
    assert not args.moe.expert_bias


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok must be from 1 to num_experts \(4\)"),
        ({"num_experts_per_tok": 0}, "got 0"),
        ({"moe_intermediate_size": None}, "no moe_intermediate_size"),
    ],
)
def test_bad_numbers_of_experts_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        args_of(**overrides)


def test_the_bias_chooses_and_does_not_weigh():
    router = make_router([[0.5, 0.3, 0.2]])
    weights, experts = router(torch.eye(1))
    assert experts.tolist() == [[0, 1]] and weights.tolist()[0] == pytest.approx([0.5, 0.3])
    router.expert_bias.copy_(torch.tensor([-0.35, 0.0, 0.0]))  # 0.15, 0.3, 0.2
    weights, experts = router(torch.eye(1))
    assert experts.tolist() == [[1, 2]] and weights.tolist()[0] == pytest.approx([0.3, 0.2])
    router.norm_topk_prob = True
    assert router(torch.eye(1))[0].tolist()[0] == pytest.approx([0.6, 0.4])


def test_routing_is_in_float32_whatever_the_dtype():
    # 0.2505 and 0.2495 are one number in bfloat16.
    router = make_router([[0.25, 0.2505, 0.25, 0.2495]], top_k=1)
    with torch.no_grad():
        router.weight.copy_(router.weight.bfloat16())
    expected = router(torch.eye(1))
    weights, experts = router.to(torch.bfloat16)(torch.eye(1, dtype=torch.bfloat16))
    assert weights.dtype == torch.float32
    assert torch.equal(experts, expected[1]) and torch.equal(weights, expected[0])


def test_balance_moves_the_bias_against_the_load():
    router = make_router([[0.6, 0.3, 0.1], [0.6, 0.1, 0.3], [0.5, 0.4, 0.1]])
    router(torch.eye(3))
    with torch.no_grad():
        router(torch.eye(3))  # a forward that trains nothing does not count
    assert router.load_E.tolist() == [3, 2, 1]
    balance_experts(router, rate=0.01)
    assert router.expert_bias.tolist() == pytest.approx([-0.01, 0.0, 0.01])
    assert router.load_E.tolist() == [0, 0, 0]
    router.eval()(torch.eye(3))
    assert router.load_E.tolist() == [0, 0, 0]


def test_balancing_evens_out_the_experts():
    model = tiny_model("qwen3_moe", num_hidden_layers=1, use_expert_bias=True).train()
    moe = model.layers["0"].feed_forward
    x = torch.randn(400, 32, generator=torch.Generator().manual_seed(0)) + 0.7
    loads = []
    for _ in range(200):
        moe(x)
        loads.append(moe.router.load_E.tolist())
        balance_experts(model, rate=0.01)
    mean = 400 * 2 / 4
    assert max(loads[0]) > 1.6 * mean
    assert max(loads[-1]) < 1.15 * mean
    assert moe.router.weight.grad is None and not moe.router.expert_bias.requires_grad


def test_the_bias_stays_exact_when_the_model_is_cast():
    model = tiny_model("qwen3_moe", use_expert_bias=True)
    router = model.layers["0"].feed_forward.router
    router.expert_bias.fill_(1.001)
    model.to(torch.bfloat16)
    assert router.expert_bias.dtype == torch.float32 and router.weight.dtype == torch.bfloat16
    assert router.expert_bias.tolist() == pytest.approx([1.001] * 4)


def test_a_bias_is_saved_and_may_begin_at_zero(tmp_path):
    folder = write_tiny_model(tmp_path / "stock", "qwen3_moe")
    config = tiny_config("qwen3_moe", use_expert_bias=True)
    model = build_model(config, device="cpu", dtype=torch.bfloat16)
    load_hf(model, folder)  # has no bias
    bias = model.layers["1"].feed_forward.router.expert_bias
    assert bias.tolist() == [0.0] * 4
    bias.copy_(torch.tensor([0.001, -0.002, 0.0, 1.003]))
    save_hf(model.named_hf_tensors(), config, tmp_path / "balanced")
    again = build_model(tmp_path / "balanced", device="cpu", dtype=torch.bfloat16)
    load_hf(again, tmp_path / "balanced")
    assert torch.equal(again.layers["1"].feed_forward.router.expert_bias, bias)
    with pytest.raises(ValueError, match="unexpected model.layers.0.mlp.expert_bias"):
        load_hf(tiny_model("qwen3_moe"), tmp_path / "balanced")


def test_a_wrong_expert_is_named(tmp_path):
    model = tiny_model("qwen3_moe")
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    with pytest.raises(ValueError, match=rf"{name} has shape \[16, 3\], expected \[16, 32\]"):
        model.load_hf_tensor(name, torch.zeros(16, 3))
    model.load_hf_tensor(name, torch.full((16, 32), 2.0))
    stack = model.layers["0"].feed_forward.experts.w3
    assert bool((stack[3] == 2.0).all()) and not bool((stack[2] == 2.0).any())


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [0, 5, 0, 0], [1, 0, 16, 17]])
def test_experts_take_any_number_of_rows(counts):
    experts = tiny_model("qwen3_moe").layers["0"].feed_forward.experts
    x = torch.randn(sum(counts), 32, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    out = experts(x, torch.tensor(counts))
    expected = [
        torch.nn.functional.silu(part @ experts.w1[e].T)
        * (part @ experts.w3[e].T)
        @ experts.w2[e].T
        for e, part in enumerate(x.split(counts))
    ]
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)
    out.sum().backward()  # also without rows: ranks that got none must take part in the backward
    assert x.grad.shape == x.shape and experts.w1.grad.shape == experts.w1.shape


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [0, 5, 0, 0], [1, 0, 160, 17]])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)],
)
def test_the_grouped_product_equals_expert_after_expert(counts, device, dtype):
    args = args_of(hidden_size=64, moe_intermediate_size=48)
    experts = Experts(args).to(device, dtype)
    torch.manual_seed(0)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    x = torch.randn(sum(counts), 64, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    inputs = [x, *experts.parameters()]
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    grouped, looped = experts._grouped(x, ends), experts._one_by_one(x, counts)
    all_got = [grouped, *torch.autograd.grad(grouped, inputs, grad)]
    all_expected = [looped, *torch.autograd.grad(looped, inputs, grad)]
    # Both round to bfloat16 at the same places, after sums in other orders.
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    for got, expected in zip(all_got, all_expected, strict=True):
        error = (got - expected).double().norm()
        assert error <= rounding * expected.double().norm()
