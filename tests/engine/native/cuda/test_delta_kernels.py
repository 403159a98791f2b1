"""The gated delta rule by kernels against plain torch: outputs and gradients, packed sequences."""

from __future__ import annotations

import pytest
import torch

from areal.models.common.args import DeltaArgs
from areal.models.common.attention import PackedAttention
from areal.models.common.delta_kernels import Chunks, recur_by_kernels
from areal.models.common.delta_rule import DeltaInputs, recur_packed

# The interpreter takes seconds for what a GPU computes at once.
_ON_GPU = torch.cuda.is_available()
_WIDE = [(4, 8, 128, 128, [700, 0, 64, 1, 3, 129]), (2, 2, 64, 128, [1, 2, 300])] * _ON_GPU
# Gradients are computed by programs of 61 rows: here sequences begin just before one and in one.
SHAPES = [(1, 2, 16, 32, [60, 0, 2, 70, 1]), *_WIDE]


def sizes_of(num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int) -> DeltaArgs:
    return DeltaArgs(
        layers=frozenset({0}),
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_size=4,
    )


def random_inputs(sizes: DeltaArgs, num_tokens: int, device, dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads, width = sizes.num_value_heads, sum(sizes.widths)
    qkv = torch.randn(num_tokens, width, generator=generator)
    # From heads that keep nearly everything to heads that forget within a token.
    rate = torch.linspace(0, 3, heads)
    decay = -rate * torch.rand(num_tokens, heads, generator=generator)
    beta = torch.rand(num_tokens, heads, generator=generator)
    kernel = torch.randn(width, 4, generator=generator)
    inputs = [qkv.to(dtype), decay, beta.to(dtype), kernel.to(dtype)]
    return [x.to(device) for x in inputs]


def packed(lengths: list[int], device) -> PackedAttention:
    return PackedAttention(torch.tensor([0, *lengths], device=device).cumsum(0), max(lengths))


def by_plain_torch(inputs, sizes, lengths, d_out=None):
    inputs = [x.float().requires_grad_() for x in inputs]
    attend = packed(lengths, inputs[0].device)
    out = recur_packed(DeltaInputs(*inputs), sizes, attend.positions_T, attend._chunk_layout)
    return out.detach(), None if d_out is None else torch.autograd.grad(out, inputs, d_out.float())


def by_kernels(inputs, sizes, lengths, d_out):
    inputs = [x.clone().requires_grad_() for x in inputs]
    device = inputs[0].device
    chunks = Chunks.of(torch.tensor(lengths), device)
    positions = packed(lengths, device).positions_T
    out = recur_by_kernels(DeltaInputs(*inputs), sizes, positions, chunks)
    return out.detach(), torch.autograd.grad(out, inputs, d_out)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_equal_those_of_plain_torch(shape, device, dtype):
    *dims, lengths = shape
    sizes = sizes_of(*dims)
    inputs = random_inputs(sizes, sum(lengths), device, dtype)
    d_out = torch.randn(sum(lengths), dims[1], dims[3]).to(device, dtype)
    wanted, wanted_grads = by_plain_torch(inputs, sizes, lengths, d_out)
    found, found_grads = by_kernels(inputs, sizes, lengths, d_out)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    names = ("out", "qkv", "decay", "beta", "kernel")
    pairs = zip(names, (found, *found_grads), (wanted, *wanted_grads), strict=True)
    for name, one, other in pairs:
        assert one.isfinite().all(), name
        gap = (one.float() - other).norm() / other.norm()
        assert gap < tolerance, (name, float(gap))


def test_equal_keys_that_nothing_forgets_do_not_grow(device, dtype):
    """The system of a chunk is then all ones below its diagonal: powers of it would overflow."""
    sizes, lengths = sizes_of(1, 1, 16, 16), [64]
    inputs = random_inputs(sizes, 64, device, dtype)
    inputs[0][:, :32] = inputs[0][:1, :32]
    inputs[1].zero_()
    inputs[2].fill_(1.0)
    wanted, _ = by_plain_torch(inputs, sizes, lengths)
    attend = packed(lengths, device)
    chunks = Chunks.of(torch.tensor(lengths), device)
    found = recur_by_kernels(DeltaInputs(*inputs), sizes, attend.positions_T, chunks)
    gap = (found.float() - wanted).norm() / wanted.norm()
    assert gap < (1e-4 if dtype == torch.float32 else 3e-2)


@pytest.mark.gpu
def test_a_gpu_computes_the_family_by_kernels():
    sizes, lengths = sizes_of(2, 4, 32, 32), [100, 5]
    inputs = random_inputs(sizes, 105, "cuda", torch.float32)
    out = packed(lengths, "cuda").recur(0, DeltaInputs(*inputs), sizes)
    wanted, _ = by_plain_torch(inputs, sizes, lengths)
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)
    # Of a head that is no power of two plain torch does.
    sizes = sizes_of(2, 4, 6, 5)
    inputs = random_inputs(sizes, 105, "cuda", torch.float32)
    out = packed(lengths, "cuda").recur(0, DeltaInputs(*inputs), sizes)
    wanted, _ = by_plain_torch(inputs, sizes, lengths)
    torch.testing.assert_close(out, wanted)
