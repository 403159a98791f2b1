"""Layers that train in FP8: a case by hand, exact factors in float64, a model, what is left out."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import tiny_model
from torch import nn

from areal.models.common.attention import PackedAttention
from areal.models.common.fp8_products import quantize, quantize_weights, transpose
from areal.models.common.fp8_training import (
    BlockwiseFeedForward,
    BlockwiseLinear,
    train_in_fp8,
)


def blockwise(weight: list[list[float]] | torch.Tensor) -> BlockwiseLinear:
    weight = torch.as_tensor(weight)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data.copy_(weight)
    return BlockwiseLinear(linear)


def test_a_layer_by_hand():
    layer = blockwise([[1.0, 1.0]])
    x = torch.tensor([[448.0, 0.001], [0.0, 0.001]], requires_grad=True)
    out = layer(x)
    # Beside 448 the smallest number is 2**-9, and 0.001 is nearer to it than to 0. By itself it
    # goes to 1.0 / 1024: 1.024 lies between 1 and 1.125.
    assert out.tolist() == [[448 + 2**-9], [2**-10]]
    out.backward(torch.tensor([[3.0], [17.0]]))
    assert x.grad.tolist() == [[3.0, 3.0], [16.0, 16.0]]  # 17 lies between 16 and 18
    # With the scale of 448, the second 0.001 is half of the smallest number, and goes to 0.
    assert layer.weight.grad.tolist() == [[3 * 448.0, 3 * 2**-9]]


def exact(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return q.double() * scale.double().repeat_interleave(128, 1)[:, : q.shape[1]]


@pytest.mark.parametrize(
    ("tokens", "dim", "out"), [(200, 300, 136), (1, 128, 256), (130, 8, 600)], ids=str
)
def test_products_are_those_of_the_rounded_factors(tokens, dim, out):
    torch.manual_seed(0)
    x, grad = torch.randn(tokens, dim) * 10 ** torch.randn(tokens, 1), torch.randn(tokens, out)
    layer, x = blockwise(torch.randn(out, dim)), x.requires_grad_()
    found = layer(x)
    found.backward(grad)
    q, scale = quantize_weights([layer.weight.detach()], transposed=False)
    weight = exact(q, scale.repeat_interleave(128, 0)[:out])
    of_x, of_grad = quantize(x.detach()), quantize(grad)
    rows, grad_rows = exact(of_x[0], of_x[1].t()), exact(of_grad[0], of_grad[1].t())
    columns, grad_columns = (q.double() * top for q, top in map(transposed, (of_x, of_grad)))
    assert_near(found, (rows @ weight.t())[:tokens])
    assert_near(x.grad, (grad_rows @ weight)[:tokens])
    assert_near(layer.weight.grad, grad_columns @ columns.t())
    with torch.no_grad():
        assert torch.equal(layer(x), found)
    # The factors are near: three bits of mantissa are left of each number.
    assert (rows[:tokens] - x.detach()).norm() < 0.05 * x.norm()
    assert (columns[:, :tokens] - x.detach().t()).norm() < 0.05 * x.norm()


def transposed(rows: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return transpose(*rows)


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    error = (found.double() - expected).norm() / expected.norm()
    assert error < tolerance, f"relative error {error:.2e}"


def test_no_tokens_give_no_rows_and_no_gradient():
    layer, x = blockwise(torch.ones(3, 5)), torch.zeros(0, 5, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert out.shape == (0, 3) and x.grad.shape == (0, 5)
    assert layer.weight.grad.tolist() == torch.zeros(3, 5).tolist()


def test_what_is_not_finite_stays_so():
    """The optimizer finds it in the gradient, and skips the step."""
    layer, x = blockwise(torch.ones(2, 2)), torch.ones(3, 2, requires_grad=True)
    layer(x).backward(torch.tensor([[1.0, 1.0], [torch.inf, 1.0], [1.0, 1.0]]))
    assert layer.weight.grad[0].isnan().all() and layer.weight.grad[1].isfinite().all()
    assert x.grad.isnan().any(1).tolist() == [False, True, False]


def logits(model, tokens):
    count = len(tokens)
    attend = PackedAttention(torch.tensor([0, count], dtype=torch.int32), count)
    return model.logits(model(tokens, torch.arange(count), attend))


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gemma3_text"])
def test_a_model_is_near_and_keeps_its_names(family):
    plain, model = (tiny_model(family, intermediate_size=128).train() for _ in range(2))
    names = list(model.state_dict())
    train_in_fp8(model, [])
    assert list(model.state_dict()) == names and list(dict(model.named_parameters())) == list(
        dict(plain.named_parameters())
    )
    tokens, grads = torch.arange(40) % 64, []
    outputs = [logits(one, tokens) for one in (plain, model)]
    for one, out in zip((plain, model), outputs, strict=True):
        out.log_softmax(-1)[:, 3].sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in one.parameters()]))
    error = (outputs[0] - outputs[1]).norm() / outputs[0].norm()
    # Routers choose other experts for a few tokens.
    assert 0 < error < (0.6 if family == "qwen3_moe" else 0.3)
    assert torch.cosine_similarity(*grads, dim=0) > 0.8


def test_experts_and_heads_keep_their_precision():
    model = tiny_model("qwen3_moe", tie_word_embeddings=False)
    train_in_fp8(model, ["output", "router", "score"])
    found = {name for name, one in model.named_modules() if isinstance(one, BlockwiseLinear)}
    named = ("wq", "wk", "wv", "wo")
    assert found == {f"layers.{i}.attention.{name}" for i in (0, 1) for name in named}


def test_excluded_layers_keep_their_precision():
    model = tiny_model("qwen3")
    train_in_fp8(model, ["layers.0.", "w2"])
    found = {name for name, one in model.named_modules() if isinstance(one, BlockwiseLinear)}
    named = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
    assert found == {f"layers.1.{name}" for name in (*named, "feed_forward.w1", "feed_forward.w3")}
    assert not any(isinstance(one, BlockwiseFeedForward) for one in model.modules())
    with pytest.raises(ValueError, match=r"exclude_modules: no linear layer has 'q_proj'"):
        train_in_fp8(tiny_model("qwen3"), ["q_proj"])


def test_a_fused_feed_forward_is_that_of_its_layers():
    dense = copy.deepcopy(tiny_model("qwen3", intermediate_size=256).layers["0"].feed_forward)
    for name in ("w1", "w2", "w3"):
        setattr(dense, name, BlockwiseLinear(getattr(dense, name)))
    fused, grad = BlockwiseFeedForward(copy.deepcopy(dense)), torch.randn(150, 32)
    x = [torch.randn(150, 32, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    outs = [layer(one.requires_grad_()) for layer, one in zip((dense, fused), x, strict=True)]
    for out in outs:
        out.backward(grad)
    # In float32 they differ in the last bits of silu, of which few round to another value.
    assert_near(outs[1], outs[0].double(), 1e-3)
    assert_near(x[1].grad, x[0].grad.double(), 1e-3)
    for name in ("w1", "w2", "w3"):
        found, expected = (getattr(layer, name).weight.grad for layer in (fused, dense))
        assert_near(found, expected.double(), 1e-3)
    with torch.no_grad():
        assert torch.equal(fused(x[1]), outs[1])
