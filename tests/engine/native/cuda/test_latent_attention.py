"""Latent attention against float64: heads, ranks, lengths, splits, chunks, and what is cached."""

from __future__ import annotations

import pytest
import torch
from paged_world import make_paged_world, relative_error

from areal.engine.native.cuda.block_kernels import Norm
from areal.engine.native.cuda.device import HOPPER
from areal.engine.native.cuda.latent_attention import (
    decode_latents,
    head_tiles,
    latent_workspace,
    place_latents,
    prefill_latents,
    tiles_for,
)
from areal.models.common.args import RopeArgs
from areal.models.common.rope import RotaryEmbedding

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SCALE = 0.11
EPS = 1e-6
# Heads, latent dim, rotated dims: tiles that are padded, one tile of heads and several.
SHAPES = [(4, 16, 8), (16, 64, 16), (3, 12, 4), (5, 40, 6), (20, 24, 8), (40, 32, 16), (72, 8, 2)]


def make_world(lengths, latent_dim, rope_dim, page_size, dtype, device):
    """Its keys, of one head, are the latents."""
    return make_paged_world(
        lengths, num_kv_heads=1, head_dim=latent_dim + rope_dim, page_size=page_size, dtype=dtype,
        device=device,
    )  # fmt: skip


def wanted_row(world, q_NX, sequence, length, latent_dim):
    """[N, L] float64: the latent part of the keys is the value."""
    keys, _ = world.dense(sequence, length)
    scores_NT = q_NX.double() @ keys[0].T * SCALE
    return scores_NT.softmax(-1) @ keys[0, :, :latent_dim]


def decode(world, q_RNX, latent_dim, slots, lengths, num_splits):
    device, num_heads = q_RNX.device, q_RNX.shape[1]
    workspace = latent_workspace(len(slots), num_heads, latent_dim, device, num_splits)
    workspace.result.fill_(float("nan"))
    workspace.log_weight.fill_(float("nan"))
    out_RNL = q_RNX.new_full((*q_RNX.shape[:2], latent_dim), float("nan"))
    decode_latents(
        q_RNX, world.keys[:, 0], world.table_SP,
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor([*lengths, 1], dtype=torch.int32, device=device),
        out_RNL, workspace, num_splits, scale=SCALE,
    )  # fmt: skip
    assert not workspace.arrived.any()  # a second launch finds the counters at 0
    return out_RNL


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize(("num_heads", "latent_dim", "rope_dim"), SHAPES)
def test_decode_rows(num_heads, latent_dim, rope_dim, page_size, dtype, device):
    lengths = [1, 15, 16, 33, 100]
    world = make_world(lengths, latent_dim, rope_dim, page_size, dtype, device)
    slots = [3, 0, 4, 5, 2, 1, 5]  # in any order; the scratch slot pads, twice
    q_RNX = torch.randn(len(slots), num_heads, latent_dim + rope_dim).to(device, dtype)
    out_RNL = decode(world, q_RNX, latent_dim, slots, lengths, num_splits=1)
    wanted = torch.stack(
        [
            wanted_row(world, q_NX, slot, [*lengths, 1][slot], latent_dim)
            for q_NX, slot in zip(q_RNX, slots, strict=True)
        ]
    )
    assert relative_error(out_RNL, wanted) < TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # heads of padding
@pytest.mark.parametrize("num_splits", [2, 8, 64])
@pytest.mark.parametrize(("num_heads", "latent_dim"), [(4, 16), (20, 40), (40, 16)])
def test_splits_are_combined_whatever_the_length(num_splits, num_heads, latent_dim, dtype, device):
    lengths = [1, 70, 300]
    world = make_world(lengths, latent_dim, 8, 16, dtype, device)
    slots = [2, 0, 1]
    q_RNX = torch.randn(len(slots), num_heads, latent_dim + 8).to(device, dtype)
    out_RNL = decode(world, q_RNX, latent_dim, slots, lengths, num_splits)
    wanted = torch.stack(
        [
            wanted_row(world, q_NX, slot, lengths[slot], latent_dim)
            for q_NX, slot in zip(q_RNX, slots, strict=True)
        ]
    )
    assert relative_error(out_RNL, wanted) < TOLERANCE[dtype]
    assert torch.equal(out_RNL, decode(world, q_RNX, latent_dim, slots, lengths, num_splits))


@pytest.mark.parametrize(("num_heads", "latent_dim", "rope_dim"), SHAPES)
def test_chunks_from_any_position(num_heads, latent_dim, rope_dim, dtype, device):
    """Of one row and of many, from the start, within a page and at its end."""
    starts, rows = [0, 7, 16, 40], [20, 1, 9, 35]
    lengths = [start + count for start, count in zip(starts, rows, strict=True)]
    world = make_world(lengths, latent_dim, rope_dim, 8, dtype, device)
    q_TNX = torch.randn(sum(rows), num_heads, latent_dim + rope_dim).to(device, dtype)
    out_TNL = q_TNX.new_full((*q_TNX.shape[:2], latent_dim), float("nan"))
    prefill_latents(
        q_TNX, world.keys[:, 0], world.table_SP[:-1],
        torch.tensor([0, *rows], device=device).cumsum(0).int(),
        torch.tensor(starts, dtype=torch.int32, device=device),
        out_TNL, max(rows), scale=SCALE,
    )  # fmt: skip
    places = [(c, starts[c] + row + 1) for c in range(len(rows)) for row in range(rows[c])]
    wanted = torch.stack(
        [
            wanted_row(world, q_NX, chunk, length, latent_dim)
            for q_NX, (chunk, length) in zip(q_TNX, places, strict=True)
        ]
    )
    assert relative_error(out_TNL, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("num_heads", "plain_dim", "latent_dim", "num_pairs"),
    [(4, 10, 12, 2), (11, 16, 64, 8), (1, 4, 40, 3)],
)
def test_what_is_cached_and_how_queries_turn(
    num_heads, plain_dim, latent_dim, num_pairs, dtype, device
):
    """Pairs of neighbours are turned as complex numbers; rows read from a wider product."""
    torch.manual_seed(0)
    num_rows, rope_dim, page_size = 5, 2 * num_pairs, 4
    both = torch.randn(num_rows, num_heads * (plain_dim + rope_dim) + latent_dim + rope_dim)
    both = both.to(device, dtype)
    q_TY, kv_TX = both.split([both.shape[1] - latent_dim - rope_dim, latent_dim + rope_dim], 1)
    q_TNH = q_TY.unflatten(1, (num_heads, -1))
    weight = torch.rand(latent_dim).add(0.5).to(device, dtype)
    positions_T = torch.tensor([0, 3, 1, 100, 7], device=device)
    cos_sin = RotaryEmbedding(RopeArgs(), rope_dim).to(device)(positions_T, dtype)
    latents = torch.full((6, page_size, latent_dim + rope_dim), float("nan")).to(device, dtype)
    q_TNX = torch.full((num_rows, num_heads, latent_dim + rope_dim), 7.0).to(device, dtype)
    write_T = torch.tensor([4, 23, 9, 0, 2], dtype=torch.int32, device=device)
    place_latents(q_TNH, kv_TX, Norm(weight, EPS), *cos_sin, write_T, latents, q_TNX)

    turn_TR = torch.complex(*(x.double() for x in cos_sin))

    def turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) * turn
        return torch.cat((pairs.real, pairs.imag), -1)

    assert (q_TNX[..., :latent_dim] == 7).all()  # which a product writes
    wanted = turned(q_TNH[..., plain_dim:], turn_TR[:, None])
    assert relative_error(q_TNX[..., latent_dim:], wanted) < TOLERANCE[dtype]
    flat = latents.flatten(0, 1)
    latent_TL = kv_TX[:, :latent_dim].double()
    normed_TL = latent_TL * (latent_TL.square().mean(1, keepdim=True) + EPS).rsqrt()
    rows = flat[write_T.long()]
    assert relative_error(rows[:, :latent_dim], normed_TL * weight.double()) < TOLERANCE[dtype]
    wanted = turned(kv_TX[:, latent_dim:], turn_TR)
    assert relative_error(rows[:, latent_dim:], wanted) < TOLERANCE[dtype]
    assert flat.isnan().any(1).sum() == len(flat) - num_rows


def test_a_program_has_up_to_32_heads_and_fits_into_a_multiprocessor():
    assert [head_tiles(n) for n in (1, 3, 16, 20, 32, 40, 128)] == [
        (1, 1), (1, 4), (1, 16), (1, 32), (1, 32), (2, 32), (4, 32),
    ]  # fmt: skip
    for dtype in (torch.bfloat16, torch.float32):
        for pairs in (16, 32, 64) if dtype == torch.bfloat16 else (16, 32):
            tiles = tiles_for(pairs, 512, 576, dtype, HOPPER)
            buffers = tiles.num_stages - (pairs <= 32)
            shared_bytes = (pairs + buffers * tiles.keys) * 576 * dtype.itemsize
            assert tiles.keys >= 16 and shared_bytes <= HOPPER.program_bytes, (dtype, tiles)
