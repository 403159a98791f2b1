"""Patches: any tensor becomes any other of its kind, bit for bit, and damage never goes unseen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal.weight_sync.bucket import DTYPE_NAMES, device_checksum
from areal.weight_sync.delta import apply_patch, make_patch

SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=3)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = (a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*flat)


@st.composite
def tensors(draw, dtype, shape):
    """Any bits that `dtype` can have: numbers, infinities, every NaN."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    content = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    raw = torch.tensor(list(content), dtype=torch.uint8)
    return (raw & 1 if dtype is torch.bool else raw).view(dtype).view(shape)


@st.composite
def pairs(draw):
    """Two tensors of a kind: equal, partly equal, or with nothing in common."""
    dtype, shape = draw(st.sampled_from(sorted(DTYPE_NAMES, key=str))), draw(SHAPES)
    old, other = draw(tensors(dtype, shape)), draw(tensors(dtype, shape))
    kept = torch.tensor(draw(st.lists(st.booleans(), min_size=old.numel(), max_size=old.numel())))
    new = other.reshape(-1).clone()
    new[kept.bool()] = old.reshape(-1)[kept.bool()]
    return old, new.view(shape)


@given(pairs())
def test_round_trip(pair):
    old, new = pair
    before = old.clone()
    assert same_bits(apply_patch(make_patch(old, new), old), new)
    assert same_bits(apply_patch(make_patch(old, old), old), old)
    assert same_bits(old, before)


@given(pairs(), st.data())
def test_damage_never_yields_other_values(pair, data):
    old, new = pair
    patch = make_patch(old, new)
    place = data.draw(st.integers(0, len(patch) - 1))
    patch[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        # What zlib itself does not look at, like a hint of its header, may change.
        assert same_bits(apply_patch(patch, old), new)
    except ValueError as err:
        assert "patch" in str(err)


def test_other_values_and_cut_patches_are_refused():
    old, new = torch.arange(9.0), torch.arange(9.0) + 1
    patch = make_patch(old, new)
    with pytest.raises(ValueError, match="made for other values"):
        apply_patch(patch, new)
    with pytest.raises(ValueError, match="damaged"):
        apply_patch(patch[:-3], old)
    with pytest.raises(ValueError, match="at least 16 bytes, this one has 4"):
        apply_patch(patch[:4], old)


def test_small_where_little_changed():
    old = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    new = old.clone()
    new.view(torch.int16)[::100] += 1
    assert len(make_patch(old, old)) < old.nbytes / 1000
    assert len(make_patch(old, new)) < old.nbytes / 50


@given(st.data())
def test_device_checksum_sees_every_change_of_one_byte(data):
    content = data.draw(st.binary(min_size=1, max_size=40))
    raw = torch.tensor(list(content), dtype=torch.uint8)
    changed = raw.clone()
    changed[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    assert device_checksum(raw) != device_checksum(changed)


def test_device_checksum_by_hand():
    words = torch.tensor([5, -7, 2**62], dtype=torch.int64)
    total = (5 * 1 - 7 * 3 + 2**62 * 5 + 2**63) % 2**64 - 2**63
    assert device_checksum(words) == total
    both = torch.cat([words[:1], words])
    assert device_checksum(both[1:]) == total  # another place in memory
    assert device_checksum(words[[1, 0, 2]]) != total
    assert device_checksum(torch.tensor([5, 1], dtype=torch.uint8)) == 5 + 256
    assert device_checksum(torch.empty(0)) == 0
    assert device_checksum(torch.zeros(3, 7)[:, 1]) == 0
