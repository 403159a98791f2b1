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


def compute(table: PrefixTable, tokens: tuple[int, ...]):
    prefix = table.create(tokens, table.borrow(tokens))
    table.complete(prefix, HIDDEN)
    return prefix


def test_a_prompt_that_begins_alike_shares_full_pages():
    pool, table = make_table()
    first = compute(table, (1, 2, 3, 4, 5, 6, 7, 8, 9))
    longer = compute(table, (1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
    assert longer.num_borrowed == 8 and longer.pages[:2] == first.pages[:2]
    branch = compute(table, (1, 2, 3, 4, 0, 6, 7, 8, 9))
    assert branch.num_borrowed == 4 and branch.pages[0] == first.pages[0]
    assert table.borrow((5, 6, 7, 8, 9)) == [], "the same tokens at another place are others"
    assert pool.num_usable - pool.num_free == 3 + 1 + 2


def test_the_last_token_is_always_computed():
    _, table = make_table()
    compute(table, (1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert len(table.borrow((1, 2, 3, 4, 5, 6, 7, 8))) == 1


def test_pages_outlive_the_prompt_that_computed_them():
    pool, table = make_table(num_pages=7)
    first = compute(table, (1, 2, 3, 4, 5, 6, 7, 8, 9))
    shared = first.pages[:2]
    compute(table, (1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
    assert pool.num_free == 2
    assert table.make_room(3), "the partial page of the first"
    assert table.find(first.tokens) is None
    again = table.borrow((1, 2, 3, 4, 5, 6, 7, 8, 0))
    assert again == shared
    table.give_back(again)
    table.forget()
    assert pool.num_free == pool.num_usable
    assert table.borrow((1, 2, 3, 4, 5)) == []


def test_pages_computed_twice_become_one():
    pool, table = make_table()
    one, two = table.create((1, 2, 3, 4, 5)), table.create((1, 2, 3, 4, 6, 7, 8, 9, 10))
    assert one.pages[0] != two.pages[0]
    table.complete(one, HIDDEN)
    table.complete(two, HIDDEN)
    assert one.pages[0] == two.pages[0]
    assert pool.num_usable - pool.num_free == 2 + 2
    found = table.borrow((1, 2, 3, 4, 6, 7, 8, 9, 11))
    assert found == two.pages[:2]


def test_full_pages_of_what_has_ended_are_found_until_their_room_is_needed():
    pool, table = make_table(num_pages=7)
    tokens = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    pages = pool.allocate(3)
    table.keep(tokens, pages)
    pool.release(pages)
    assert pool.num_free == 4 and table.num_pages == 2, "the partial page is free"
    found = table.borrow((*tokens, 10))
    assert found == pages[:2]
    table.give_back(found)
    assert table.find(tokens) is None, "it has no hidden state to draw from"
    table.keep((1, 2, 3), pool.allocate(1))  # no full page
    assert table.make_room(5) and table.borrow(tokens) == [] and table.num_pages == 0


def test_equal_replies_are_kept_once():
    pool, table = make_table()
    for _ in range(2):
        pages = pool.allocate(2)
        table.keep((1, 2, 3, 4, 5, 6, 7, 8), pages)
        pool.release(pages)
    assert len(table) == 1 and table.num_pages == 2 and pool.num_usable - pool.num_free == 2
    table.forget()
    assert pool.num_free == pool.num_usable and len(table) == 0
    assert table.num_updates == 1


def test_what_was_borrowed_lately_is_evicted_last():
    pool, table = make_table(num_pages=5)
    for first in (1, 2):
        pages = pool.allocate(1)
        table.keep((first, 2, 3, 4), pages)
        pool.release(pages)
    table.give_back(table.borrow((1, 2, 3, 4, 5)))
    assert table.make_room(3)
    assert table.borrow((2, 2, 3, 4, 5)) == [] and len(table.borrow((1, 2, 3, 4, 5))) == 1
