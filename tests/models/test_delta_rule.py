"""The gated delta rule: chunks and single steps against its definition, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.models.common.args import DeltaArgs
from areal.models.common.attention import PackedAttention
from areal.models.common.delta_rule import (
    DeltaHeads,
    DeltaInputs,
    convolve,
    split_heads,
    step,
)

SIZES = DeltaArgs(
    layers=frozenset({0}),
    num_key_heads=2,
    num_value_heads=4,
    key_dim=6,
    value_dim=5,
    conv_size=4,
)


def random_inputs(num_tokens: int, seed: int = 0) -> DeltaInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    decay = -4 * torch.rand(num_tokens, SIZES.num_value_heads, generator=generator)
    beta = torch.sigmoid(normal(num_tokens, SIZES.num_value_heads))
    return DeltaInputs(
        normal(num_tokens, sum(SIZES.widths)), decay, beta, normal(sum(SIZES.widths), 4)
    )


def by_definition(inputs: DeltaInputs) -> torch.Tensor:
    """One sequence in float64: [T, N, V]."""
    x, kernel = inputs.qkv_TX.double(), inputs.kernel_XW.double()
    padded = torch.cat([x.new_zeros(3, x.shape[1]), x])
    mixed = torch.stack([(padded[t : t + 4] * kernel.T).sum(0) for t in range(len(x))])
    mixed = mixed / (1 + (-mixed).exp())
    q, k, v = mixed.split(list(SIZES.widths), dim=1)
    outputs = []
    for head in range(4):
        columns = slice(head // 2 * 6, head // 2 * 6 + 6)
        state = x.new_zeros(6, 5)
        of_head = []
        for t in range(len(x)):
            query = q[t, columns] / (q[t, columns] @ q[t, columns] + 1e-6).sqrt() / 6**0.5
            key = k[t, columns] / (k[t, columns] @ k[t, columns] + 1e-6).sqrt()
            value = v[t, head * 5 : head * 5 + 5]
            state = state * inputs.decay_TN[t, head].double().exp()
            error = value - key @ state
            state = state + inputs.beta_TN[t, head].double() * torch.outer(key, error)
            of_head.append(query @ state)
        outputs.append(torch.stack(of_head))
    return torch.stack(outputs, dim=1)


def part(inputs: DeltaInputs, start: int, end: int) -> DeltaInputs:
    qkv, decay, beta = (x[start:end] for x in (inputs.qkv_TX, inputs.decay_TN, inputs.beta_TN))
    return DeltaInputs(qkv, decay, beta, inputs.kernel_XW)


def packed(inputs: DeltaInputs, lengths: list[int]) -> torch.Tensor:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return PackedAttention(bounds, max(lengths)).recur(0, inputs, SIZES)


@settings(max_examples=8, deadline=None)
@given(lengths=st.lists(st.sampled_from([0, 1, 2, 3, 5, 63, 64, 65, 130]), min_size=1, max_size=5))
def test_packed_sequences_equal_the_definition_one_by_one(lengths):
    if not sum(lengths):
        return
    inputs = random_inputs(sum(lengths), seed=len(lengths))
    out, start = packed(inputs, lengths), 0
    for length in lengths:
        expected = (
            by_definition(part(inputs, start, start + length)) if length else out[:0].double()
        )
        found = out[start : start + length].double()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        start += length


def test_a_sequence_has_no_gradient_from_another():
    inputs = random_inputs(150)
    inputs.qkv_TX.requires_grad_()
    packed(inputs, [70, 80])[70:].sum().backward()
    grad = inputs.qkv_TX.grad
    assert grad[:70].abs().max() == 0
    assert grad[70:].abs().max() > 0


def test_gradients_are_those_of_the_definition():
    inputs, again = random_inputs(70), random_inputs(70)
    leaves = [
        (x.requires_grad_(), y.requires_grad_())
        for x, y in zip(
            (inputs.qkv_TX, inputs.decay_TN, inputs.beta_TN, inputs.kernel_XW),
            (again.qkv_TX, again.decay_TN, again.beta_TN, again.kernel_XW),
            strict=True,
        )
    ]
    weight = torch.cos(torch.arange(5.0))
    (packed(inputs, [70]) * weight).sum().backward()
    (by_definition(again) * weight).sum().backward()
    for found, expected in leaves:
        torch.testing.assert_close(found.grad, expected.grad, atol=2e-5, rtol=1e-4)


def test_a_strong_decay_neither_overflows_nor_leaves_nan():
    inputs = random_inputs(100)
    inputs.decay_TN.fill_(-500.0)
    inputs.decay_TN.requires_grad_()
    out = packed(inputs, [100])
    out.sum().backward()
    assert out.isfinite().all() and inputs.decay_TN.grad.isfinite().all()


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_a_step_has_the_same_bits_beside_any_other_sequences(rows):
    inputs = random_inputs(20)
    heads = split_heads(convolve(inputs.qkv_TX, torch.arange(3, 20), inputs.kernel_XW), SIZES)
    kept = inputs.decay_TN[3:].exp()
    state = torch.randn(17, 4, 6, 5, generator=torch.Generator().manual_seed(1))
    chosen = torch.randperm(17, generator=torch.Generator().manual_seed(rows))[:rows]

    def stepped(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = DeltaHeads(heads.q_TNK[index], heads.k_TNK[index], heads.v_TNV[index])
        return step(state[index], own, kept[index], inputs.beta_TN[3:][index])

    everyone = stepped(torch.arange(17))
    for whole, some in zip(everyone, stepped(chosen), strict=True):
        assert torch.equal(whole[chosen], some)
