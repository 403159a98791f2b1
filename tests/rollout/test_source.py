"""The prompt stream is a function of the task id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.rollout.source import PromptSource


def rows_of(source, task_ids):
    return [source.prompt(task_id).row for task_id in task_ids]


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 5), st.booleans())
def test_an_epoch_never_repeats_a_row(rows, batch_size, seed, drop_last):
    if rows < batch_size:
        return
    data = [{"i": i} for i in range(rows)]
    source = PromptSource(data, batch_size=batch_size, seed=seed, drop_last=drop_last)
    assert source.epoch_length == (rows // batch_size * batch_size if drop_last else rows)
    for epoch in range(3):
        start = epoch * source.epoch_length
        prompts = [source.prompt(start + i) for i in range(source.epoch_length)]
        assert len({prompt.row for prompt in prompts}) == source.epoch_length
        assert {prompt.epoch for prompt in prompts} == {epoch}
        assert all(prompt.data == {"i": prompt.row} for prompt in prompts)


def test_any_order_gives_the_same_prompts():
    data = [{"i": i} for i in range(10)]
    there = rows_of(PromptSource(data, batch_size=5, seed=1), range(30))
    back = rows_of(PromptSource(data, batch_size=5, seed=1), reversed(range(30)))
    assert there == back[::-1]
    assert there != rows_of(PromptSource(data, batch_size=5, seed=2), range(30))
    assert there[:10] != there[10:20], "each epoch has its own order"


def test_order_is_fixed_for_all_time():
    source = PromptSource([{"i": i} for i in range(10)], batch_size=4, seed=1)
    assert rows_of(source, range(8)) == [3, 5, 2, 4, 1, 9, 0, 6]


def test_without_shuffle_rows_come_in_order():
    source = PromptSource([{}] * 5, batch_size=2, shuffle=False)
    assert rows_of(source, range(8)) == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(("rows", "batch_size"), [(3, 4), (0, 1), (3, 0)])
def test_data_set_smaller_than_a_batch(rows, batch_size):
    with pytest.raises(ValueError, match=r"train_dataset\.batch_size"):
        PromptSource([{}] * rows, batch_size=batch_size)
