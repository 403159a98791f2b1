"""Padded and packed layouts: concatenation, splitting and the round trip between them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.utils.data import (
    concat_batch,
    concat_padded_tensors,
    pack,
    select_rows,
    sequence_ids,
    sequence_lengths,
    split_batch,
    unpack,
)


def padded(lengths: list[int], width: int | None = None) -> dict:
    width = width or max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.arange(1, len(lengths) * width + 1, dtype=torch.int32).view(len(lengths), width)
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "rewards": torch.arange(float(len(lengths))),
    }


def test_concat_pads_to_the_widest_and_keeps_dtypes():
    out = concat_padded_tensors([padded([2]), padded([4, 3])], pad_value=7)
    assert out["input_ids"].tolist() == [[1, 2, 7, 7], [1, 2, 3, 4], [5, 6, 7, 0]]
    assert out["attention_mask"].tolist()[0] == [True, True, False, False]
    assert out["attention_mask"].dtype == torch.bool and out["input_ids"].dtype == torch.int32
    assert out["rewards"].tolist() == [0.0, 0.0, 1.0]


def test_concat_pads_every_dimension_behind_the_first():
    out = concat_padded_tensors([{"x": torch.ones(1, 2, 3)}, {"x": torch.ones(2, 4, 1)}])
    assert out["x"].shape == (3, 4, 3)
    assert out["x"].sum() == 6 + 8


def test_concat_joins_lists_and_takes_other_values_from_the_first():
    out = concat_padded_tensors([{"names": ["a"], "tag": 1}, {"names": ["b", "c"], "tag": 2}])
    assert out == {"names": ["a", "b", "c"], "tag": 1}


def test_concat_of_none_and_of_one():
    assert concat_padded_tensors([]) == {}
    one = padded([3])
    out = concat_padded_tensors([one])
    assert out == one and out is not one


def test_concat_refuses_different_keys_and_ranks():
    with pytest.raises(ValueError, match="versions"):
        concat_padded_tensors([padded([1]), padded([1]) | {"versions": torch.zeros(1, 1)}])
    with pytest.raises(ValueError, match="rank"):
        concat_padded_tensors([{"x": torch.zeros(1)}, {"x": torch.zeros(1, 2)}])


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=5))
@settings(max_examples=40)
def test_split_undoes_concat(groups: list[list[int]]):
    trajs = [padded(lengths) | {"names": [str(n) for n in lengths]} for lengths in groups]
    batch, meta = concat_batch(trajs)
    assert len(meta.traj_group_sizes) == len(groups) and sum(meta.traj_group_sizes) == len(
        batch["rewards"]
    )
    for traj, back in zip(trajs, split_batch(batch, meta), strict=True):
        assert back["names"] == traj["names"]
        for key in ("input_ids", "attention_mask", "rewards"):
            assert torch.equal(back[key], traj[key])


def test_concat_batch_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        concat_batch([])


def test_split_refuses_sizes_that_do_not_add_up():
    batch, meta = concat_batch([padded([2, 2]), padded([1])])
    with pytest.raises(ValueError, match="3 rows, the batch has 2"):
        split_batch(select_rows(batch, [0, 1]), meta)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
@settings(max_examples=40)
def test_unpack_undoes_pack_of_any_rows(lengths: list[int], data: st.DataObject):
    batch = padded(lengths, width=max(lengths) + 2)
    rows = data.draw(st.permutations(range(len(lengths))))
    packed = pack(batch, rows)
    total = sum(lengths)
    assert packed["input_ids"].shape == (total,) and "attention_mask" not in packed
    assert packed["max_seqlen"] == max(lengths)
    assert packed["rewards"].tolist() == [float(r) for r in rows]
    assert packed["cu_seqlens"].diff().tolist() == [lengths[r] for r in rows]
    ids = sequence_ids(packed["cu_seqlens"])
    assert ids.tolist() == [i for i, r in enumerate(rows) for _ in range(lengths[r])]
    width = batch["input_ids"].shape[1]
    back = unpack(packed["input_ids"], packed["cu_seqlens"], width)
    assert torch.equal(back, batch["input_ids"][list(rows)])


def test_lengths_refuse_left_padding_and_empty_rows():
    with pytest.raises(ValueError, match="right padding"):
        sequence_lengths(torch.tensor([[False, True]]))
    with pytest.raises(ValueError, match="row 1"):
        sequence_lengths(torch.tensor([[True, False], [False, False]]))


def test_images_may_be_missing_where_others_have_some():
    plain = {"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 3, dtype=torch.bool)}
    pictured = plain | {"multi_modal_input": [{"pixel_values": torch.ones(4)}, {}]}
    joined = concat_padded_tensors([plain, pictured])
    assert [sorted(row) for row in joined["multi_modal_input"]] == [[], [], ["pixel_values"], []]
    assert "multi_modal_input" not in plain
