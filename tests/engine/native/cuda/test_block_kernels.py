"""Norm, rotation, cache write and activation against the model's own layers in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from areal.engine.native.cuda.block_kernels import (
    ACTIVATIONS,
    Norm,
    add_rms_norm,
    gate_mul,
    rms_norm,
    rope_and_cache,
    softcap_,
)
from areal.models.common.args import RopeArgs
from areal.models.common.decoder import softcap
from areal.models.common.moe import ACTIVATIONS as LAYERS
from areal.models.common.rope import RotaryEmbedding, rotate

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 6e-3}


def draw(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape).to(device, dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    error = (out.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[out.dtype], f"relative error {error:.2e}"


def norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.double(), (x.shape[-1],), weight.double(), EPS)


@pytest.mark.parametrize("dim", [1536, 3584, 64, 100])
def test_rms_norm(dim, dtype, device):
    x = draw(5, dim, dtype=dtype, device=device)
    x[1] *= 1000
    weight = draw(dim, dtype=dtype, device=device)
    out = poisoned(5, dim, dtype=dtype, device=device)
    rms_norm(x, Norm(weight, EPS), out)
    assert_near(out, norm64(x, weight))
    rms_norm(x, Norm(weight, EPS), x)
    assert torch.equal(x, out), "the result differs when it is written over the input"


@pytest.mark.parametrize("dim", [1536, 3584, 64, 100])
def test_add_rms_norm(dim, dtype, device):
    x, residual = (draw(5, dim, dtype=dtype, device=device) for _ in range(2))
    weight = draw(dim, dtype=dtype, device=device)
    out = poisoned(5, dim, dtype=dtype, device=device)
    added = residual + x
    add_rms_norm(x, residual, Norm(weight, EPS), out)
    assert torch.equal(residual, added), "the residual is not the rounded sum"
    assert_near(out, norm64(added, weight))


@pytest.mark.parametrize("dim", [1152, 100])
def test_a_norm_whose_weight_is_an_offset_from_1(dim, dtype, device):
    x = draw(5, dim, dtype=dtype, device=device)
    weight = draw(dim, dtype=dtype, device=device)
    out = poisoned(5, dim, dtype=dtype, device=device)
    rms_norm(x, Norm(weight, 1e-5, offset=1.0), out)
    assert_near(out, F.rms_norm(x.double(), (dim,), 1 + weight.double(), 1e-5))


@pytest.mark.parametrize("dim", [1152, 100])
def test_what_is_added_may_be_normed_first(dim, dtype, device):
    x, residual = (draw(5, dim, dtype=dtype, device=device) for _ in range(2))
    x[1] *= 1000
    inner, outer = (draw(dim, dtype=dtype, device=device) for _ in range(2))
    out = poisoned(5, dim, dtype=dtype, device=device)
    added = F.rms_norm(x.double(), (dim,), 1 + inner.double(), EPS) + residual.double()
    norm, x_norm = Norm(outer, EPS, offset=1.0), Norm(inner, EPS, offset=1.0)
    add_rms_norm(x, residual, norm, out, x_norm)
    assert_near(residual, added)
    assert_near(out, F.rms_norm(added, (dim,), 1 + outer.double(), EPS))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [8960, 1024, 36])
def test_gate_mul(width, activation, dtype, device):
    gate_up = draw(3, 2 * width, dtype=dtype, device=device)
    gate_up[0, :2] = torch.tensor([-200.0, 200.0])  # exp of these is not finite
    out = poisoned(3, width, dtype=dtype, device=device)
    gate_mul(gate_up, activation, out)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_near(out, LAYERS[activation](gate) * up)


def test_every_activation_of_a_model_has_a_kernel():
    assert set(ACTIVATIONS) == set(LAYERS)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_softcap(device):
    logits = 40 * torch.randn(3, 5000, device=device)
    logits[1, :3] = torch.tensor([-1e6, 1e6, 0.0])
    wanted = softcap(logits.double(), 30.0)
    softcap_(logits, 30.0)
    torch.testing.assert_close(logits.double(), wanted, atol=1e-5, rtol=0)


def cos_sin(positions: list[int], head_dim: int, dtype: torch.dtype, device: torch.device):
    rope = RotaryEmbedding(RopeArgs(theta=1e6), head_dim).to(device)
    return rope(torch.tensor(positions, device=device), dtype)


# Query heads, key/value heads, head dim: two real models, one with a group of one, odd ones.
HEADS = [(12, 2, 128), (28, 4, 128), (14, 2, 64), (4, 4, 64), (3, 1, 96), (4, 1, 256), (2, 1, 80)]


@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_rope_and_cache(heads, has_norm, dtype, device):
    num_q, num_kv, head_dim = heads
    page_size, num_pages, num_rows = 16, 7, 4
    positions = [0, 5, 63, 4000]
    write = torch.tensor([1 * 16 + 0, 6 * 16 + 15, 3 * 16 + 7, 2 * 16 + 3], device=device).int()
    qkv = draw(num_rows, (num_q + 2 * num_kv) * head_dim, dtype=dtype, device=device)
    weights = [draw(head_dim, dtype=dtype, device=device) for _ in range(2)]
    norms = [Norm(weight, EPS, offset=0.5) if has_norm else None for weight in weights]
    cos, sin = cos_sin(positions, head_dim, dtype, device)
    shape = (num_pages, num_kv, page_size, head_dim)
    keys, values = (poisoned(*shape, dtype=dtype, device=device) for _ in range(2))
    q_out = poisoned(num_rows, num_q, head_dim, dtype=dtype, device=device)
    rope_and_cache(qkv, cos, sin, write, keys, values, q_out, *norms)

    q, k, v = qkv.view(num_rows, -1, head_dim).double().split([num_q, num_kv, num_kv], dim=1)
    if has_norm:
        q, k = norm64(q, weights[0] + 0.5), norm64(k, weights[1] + 0.5)
    assert_near(q_out, rotate(q, cos.double(), sin.double()))
    page, offset = write.long() // page_size, write.long() % page_size
    assert_near(keys[page, :, offset], rotate(k, cos.double(), sin.double()))
    assert torch.equal(values[page, :, offset].double(), v)
    for cache in (keys, values):
        cache[page, :, offset] = torch.nan
        assert cache.isnan().all(), "written outside of the rows' places"


def test_rope_takes_int64_positions(dtype, device):
    qkv = draw(2, 4 * 64, dtype=dtype, device=device)
    cos, sin = cos_sin([1, 2], 64, dtype, device)
    results = []
    for index_type in (torch.int32, torch.int64):
        keys, values = (torch.zeros(3, 1, 8, 64, dtype=dtype, device=device) for _ in range(2))
        q_out = poisoned(2, 2, 64, dtype=dtype, device=device)
        write = torch.tensor([9, 17], dtype=index_type, device=device)
        rope_and_cache(qkv, cos, sin, write, keys, values, q_out, None, None)
        results.append(torch.cat([keys.flatten(), values.flatten(), q_out.flatten()]))
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 300])
def test_rounds_as_the_models_layers_do(num_rows, device):
    """bfloat16 results equal torch's but for a rare last bit (its exp and sums are not ours)."""
    dtype = torch.bfloat16

    def assert_equal_but_few(out: torch.Tensor, expected: torch.Tensor) -> None:
        assert (out != expected).float().mean() < 2e-3

    x, residual = (draw(num_rows, 3584, dtype=dtype, device=device) for _ in range(2))
    weight = draw(3584, dtype=dtype, device=device)
    out = torch.empty_like(x)
    rms_norm(x, Norm(weight, EPS), out)
    assert_equal_but_few(out, F.rms_norm(x, (3584,), weight, EPS))

    gate_up = draw(num_rows, 2 * 8960, dtype=dtype, device=device)
    out = poisoned(num_rows, 8960, dtype=dtype, device=device)
    for activation, layer in LAYERS.items():
        gate_mul(gate_up, activation, out)
        assert_equal_but_few(out, layer(gate_up[:, :8960]) * gate_up[:, 8960:])

    qkv = draw(num_rows, 16 * 128, dtype=dtype, device=device)
    cos, sin = cos_sin(list(range(num_rows)), 128, dtype, device)
    keys, values = (torch.zeros(20, 2, 16, 128, dtype=dtype, device=device) for _ in range(2))
    q_out = poisoned(num_rows, 12, 128, dtype=dtype, device=device)
    write = torch.arange(num_rows, device=device)
    rope_and_cache(qkv, cos, sin, write, keys, values, q_out, None, None)
    # The compiler may fuse the product into the sum: a last bit, of a value up to 8.
    expected = rotate(qkv.view(num_rows, 16, 128)[:, :12], cos, sin)
    torch.testing.assert_close(q_out, expected, atol=2**-5, rtol=2**-7)
