"""Pages have exact holders; prefixes are found, kept, evicted and dropped as kv_cache.py says."""

from __future__ import annotations

import pytest
import torch

from areal.engine.native.kv_cache import SCRATCH_PAGE, PagePool, PrefixTable

HIDDEN = torch.zeros(4)


def make_table(num_pages: int = 9, page_size: int = 4) -> tuple[PagePool, PrefixTable]:
    pool = PagePool(num_pages, page_size)
    return pool, PrefixTable(pool)


def test_scratch_page_is_never_handed_out():
    pool = PagePool(5, 4)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0 and SCRATCH_PAGE not in (1, 2, 3, 4)


def test_shared_page_is_free_after_its_last_holder():
    pool = PagePool(3, 4)
    pages = pool.allocate(1)
    pool.retain(pages)
    pool.release(pages)
    assert pool.num_free == 1
    pool.release(pages)
    assert pool.num_free == 2


def test_misuse_is_caught():
    pool = PagePool(3, 4)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.retain(pages)
    with pytest.raises(AssertionError, match="3 pages wanted, 2 free"):
        pool.allocate(3)


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="num_pages must be at least 2"):
        PagePool(1, 16)
    with pytest.raises(ValueError, match="page_size must be at least 1"):
        PagePool(8, 0)


def test_prefix_is_found_by_its_tokens_and_holds_its_pages():
    pool, table = make_table()
    prefix = table.create((1, 2, 3, 4, 5))
    assert len(prefix.pages) == 2 and pool.num_free == 6
    assert table.find((1, 2, 3, 4, 5)) is prefix
    assert table.find((1, 2, 3, 4)) is None
    assert table.pending == [prefix]
    table.complete(prefix, HIDDEN)
    assert prefix.is_ready and table.pending == []


def test_only_idle_prefixes_are_evicted_least_recently_used_first():
    pool, table = make_table(num_pages=4)
    waited, old, recent = (table.create((token,)) for token in (1, 2, 3))
    table.wait(waited)
    table.find(old.tokens)
    table.find(recent.tokens)
    assert table.make_room(1)
    assert table.find((2,)) is None and table.find((3,)) is recent
    assert not table.make_room(3)
    assert table.find((1,)) is waited and table.find((3,)) is None


def test_make_room_spares_the_prefix_it_is_made_for():
    _, table = make_table(num_pages=3)
    kept, other = table.create((1,)), table.create((2,))
    assert table.make_room(1, keep=kept)
    assert table.find(kept.tokens) is kept and table.find(other.tokens) is None


def test_a_prefix_nobody_waits_for_is_not_computed_further():
    pool, table = make_table()
    prefix = table.create((1, 2))
    table.wait(prefix)
    table.wait(prefix)
    table.leave(prefix)
    assert table.pending == [prefix]
    table.leave(prefix)
    assert table.pending == [] and len(table) == 0 and pool.num_free == pool.num_usable


def test_new_weights_drop_ready_prefixes_and_restart_the_others():
    pool, table = make_table()
    ready, begun = table.create((1,)), table.create((2, 3))
    table.complete(ready, HIDDEN)
    table.wait(begun)
    begun.num_cached = 1
    table.forget()
    assert table.find((1,)) is None
    assert table.find((2, 3)) is begun and begun.num_cached == 0
    assert pool.num_free == pool.num_usable - 1
