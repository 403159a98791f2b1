"""Ownership of the pages of the key/value cache.

A page is `page_size` consecutive positions of one sequence, in all layers. `PagePool` allocates
pages and counts references. A `Prefix` is one prompt being computed or cached: the samples of a
group share its full pages and copy its last, partial page, since each writes its own output there.
`PrefixTable` finds the prefix of a prompt, and keeps computed ones, and the full pages of sequences
that have ended, until their pages are needed.

    prefix = table.find(prompt)
    if prefix is None:                                     # pages allocated, those of a computed
        prefix = table.create(prompt, table.borrow(prompt))    # prompt that begins alike shared
    table.wait(prefix)                                     # one sequence needs it: not evictable
    shared = prefix.pages[: len(prompt) // page_size]; pool.retain(shared)
    ...                                                    # the engine computes it, `complete`
    table.attach(prefix)                                   # that sequence copied the partial page
    table.keep(tokens, pages)                              # it has ended, after these tokens

Invariants: a page is free exactly when its reference count is 0. Page 0 is scratch: padding rows
write there, and unused entries of a page table point to it; it is never allocated. Equal full pages
that were computed are one page: the next turn of a dialogue finds those of the turn before, prompt
and reply. So such a page stands for all tokens up to its end: they are a tree, in which whatever
holds a page holds all pages before it, and what ends a dialogue costs the pages it has added. All
pages that a prompt can find were computed with the weights and the adapter it has itself. In the
tokens of a prompt with images, an image token is the image's hash (prompt_images.py): all here is
as for text.

Models with recurrent layers have states besides (state_cache.py), whose numbers are pages of a pool
of their own. A prompt shares pages up to the last one with a mark, the state at its end. It makes
marks itself: at its last full page, and where it left the pages of others for want of a mark, so
that the next prompt with this beginning finds one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from areal.models.vision.prompt_images import PromptImages

SCRATCH_PAGE = 0
EMPTY_STATE = 0  # of a sequence without tokens
# A prompt has its own state and up to two marks, and may hold the mark it starts from.
STATES_OF_PREFIX, STATES_OF_SEQUENCE = 3, 2
MIN_STATES = 1 + STATES_OF_PREFIX + STATES_OF_SEQUENCE + 1  # with the empty one
Key = tuple[int, tuple[int, ...]] | int  # adapter and tokens of a prompt, or a page
Place = tuple[int, tuple[int, ...]]  # the page before, and the tokens of a page


class StateSpan(NamedTuple):
    """The states of a few consecutive tokens of one sequence."""

    read: int = EMPTY_STATE  # before the first of them
    write: int = EMPTY_STATE  # after the last
    marks: tuple[tuple[int, int], ...] = ()  # after so many of them, this one too


class PagePool:
    """Reference-counted pages; the last release frees a page."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is scratch), got {num_pages}")
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._num_holders = [0] * num_pages
        # A stack: the page freed last is the one most likely still in the processor's cache.
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each. The caller has checked `num_free`."""
        assert 0 <= count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        if not count:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        for page in pages:
            self._num_holders[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        holders = self._num_holders
        for page in pages:
            count = holders[page]
            assert count > 0, f"page {page} is free and cannot be shared"
            holders[page] = count + 1

    def release(self, pages: Sequence[int]) -> None:
        holders = self._num_holders
        for page in pages:
            count = holders[page] - 1
            assert count >= 0, f"page {page} is released twice"
            holders[page] = count
            if not count:
                self._free.append(page)


@dataclass(slots=True, eq=False)
class Prefix:
    """The cache pages of one prompt, held besides by the sequences that share them.

    Or the last full page of a sequence that has ended, with which the tree keeps all pages before
    it (`is_kept`).
    """

    tokens: tuple[int, ...]
    pages: list[int]
    adapter: int = 0  # its number (adapters.py)
    images: PromptImages | None = None  # whose `key` are the tokens
    is_kept: bool = False
    num_borrowed: int = 0  # leading tokens in pages that other prompts had computed
    num_cached: int = 0  # leading tokens whose keys and values are computed
    last_hidden: torch.Tensor | None = None  # [D] of the last token: every sample starts from it
    num_waiting: int = 0  # running sequences that have not attached yet
    # Of models with recurrent layers; None and empty of others.
    state: int | None = None  # after the cached tokens
    start_state: int | None = None  # the mark after the borrowed tokens, until it was read
    marks: dict[int, int] = field(default_factory=dict)  # number of tokens -> state to keep there

    @property
    def is_ready(self) -> bool:
        return self.last_hidden is not None

    @property
    def is_computed(self) -> bool:
        return self.is_ready or self.is_kept

    @property
    def key(self) -> Key:
        """Of a kept one its page, which stands for all its tokens."""
        return self.pages[-1] if self.is_kept else (self.adapter, self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def token_slice(self, start: int, end: int) -> tuple[int, ...]:
        return (self.tokens if self.images is None else self.images.tokens)[start:end]

    def state_span(self, start: int, end: int) -> StateSpan:
        """The states of its tokens `start` to `end`."""
        if self.state is None:
            return StateSpan()
        read = self.state if start else EMPTY_STATE
        if self.start_state is not None:
            assert start == self.num_borrowed, "the first of its own tokens follow the mark"
            read = self.start_state
        marks = [(n - start, state) for n, state in self.marks.items() if start < n <= end]
        return StateSpan(read, self.state, tuple(marks))


class PrefixTable:
    """Prompts by their tokens, and kept pages, least recently used first."""

    def __init__(self, pool: PagePool, states: PagePool | None = None) -> None:
        """`states`: numbers of states, of a model with recurrent layers."""
        self._pool = pool
        self._states = states
        self._mark_of: dict[int, int] = {}  # full page of computed entries -> state at its end
        # An OrderedDict finds its oldest entry in O(1), however many older ones were deleted.
        self._entries: OrderedDict[Key, Prefix] = OrderedDict()
        self._pending: dict[Prefix, None] = {}  # ordered set: not ready yet
        # The tree of full pages that were computed, each by its place: the page before, and its own
        # tokens. Before the first page comes the adapter's number, negative. The table has one
        # reference to each.
        self._page_after: dict[Place, int] = {}
        self._place_of: dict[int, Place] = {}
        # Of each, the pages after it, the computed entries that end with it, and those being
        # computed that begin with it.
        self._num_uses: dict[int, int] = {}
        self.num_updates = 0  # of the weights: pages of an earlier count are not kept

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_pages(self) -> int:
        """Full pages that a prompt can find."""
        return len(self._num_uses)

    @property
    def pending(self) -> list[Prefix]:
        """Prefixes still to compute, oldest first."""
        return list(self._pending)

    def find(self, tokens: tuple[int, ...], adapter: int = 0) -> Prefix | None:
        prefix = self._entries.get((adapter, tokens))
        if prefix is not None:
            self._entries.move_to_end(prefix.key)
        return prefix

    def borrow(self, tokens: tuple[int, ...], adapter: int = 0) -> list[int]:
        """Pages with the first of these tokens, held for `create`, or until `give_back`. The last
        token is never among them: its hidden state has to be computed."""
        pages = self._known_pages(tokens, adapter)
        while self._states is not None and pages and pages[-1] not in self._mark_of:
            pages.pop()
        if pages:
            self._num_uses[pages[-1]] += 1
            if pages[-1] in self._entries:
                self._entries.move_to_end(pages[-1])
        return pages

    def give_back(self, borrowed: Sequence[int]) -> None:
        if borrowed:
            self._let_go(borrowed[-1])

    def can_follow(self, borrowed: Sequence[int]) -> bool:
        """Whether `create` can still use them: not if the mark at their end was evicted since."""
        return self._states is None or not borrowed or borrowed[-1] in self._mark_of

    def _known_pages(self, tokens: tuple[int, ...], adapter: int) -> list[int]:
        size, pages, before, page_after = self._pool.page_size, [], -adapter, self._page_after
        for start in range(0, (len(tokens) - 1) // size * size, size):
            page = page_after.get((before, tokens[start : start + size]))
            if page is None:
                break
            pages.append(page)
            before = page
        return pages

    def create(
        self,
        tokens: tuple[int, ...],
        borrowed: Sequence[int] = (),
        adapter: int = 0,
        images: PromptImages | None = None,
    ) -> Prefix:
        own = self._pool.allocate(self._pool.pages_for(len(tokens)) - len(borrowed))
        num_borrowed = len(borrowed) * self._pool.page_size
        pages = [*borrowed, *own]
        prefix = Prefix(
            tokens, pages, adapter, images, num_borrowed=num_borrowed, num_cached=num_borrowed
        )
        self._entries[prefix.key] = prefix
        self._pending[prefix] = None
        if self._states is not None:
            self._give_states(prefix, self._states, len(borrowed))
        return prefix

    def _give_states(self, prefix: Prefix, states: PagePool, num_borrowed: int) -> None:
        if num_borrowed:
            prefix.start_state = self._mark_of[prefix.pages[num_borrowed - 1]]
            states.retain([prefix.start_state])
        num_known = len(self._known_pages(prefix.tokens, prefix.adapter))
        num_full = prefix.num_tokens // self._pool.page_size
        marked = sorted({n for n in (num_known, num_full) if n > num_borrowed})
        prefix.state, *marks = states.allocate(1 + len(marked))
        counts = (n * self._pool.page_size for n in marked)
        prefix.marks = dict(zip(counts, marks, strict=True))

    def has_read_start(self, prefix: Prefix) -> None:
        """Its first chunk follows the mark it started from, which it no longer needs."""
        if self._states is not None and prefix.start_state is not None:
            self._states.release([prefix.start_state])
            prefix.start_state = None

    def complete(self, prefix: Prefix, last_hidden: torch.Tensor) -> None:
        prefix.last_hidden = last_hidden
        del self._pending[prefix]
        size = self._pool.page_size
        num_borrowed, num_full = prefix.num_borrowed // size, prefix.num_tokens // size
        own = prefix.pages[num_borrowed:num_full]
        before = prefix.pages[num_borrowed - 1] if num_borrowed else -prefix.adapter
        tokens = prefix.tokens[num_borrowed * size : num_full * size]
        prefix.pages[num_borrowed:num_full] = self._add(before, tokens, own)
        self._pool.release(own)  # the tree has its own references
        if num_full:
            self._num_uses[prefix.pages[num_full - 1]] += 1
        self.give_back(prefix.pages[:num_borrowed])
        for count, state in prefix.marks.items():
            self._mark(prefix.pages[count // size - 1], state)

    def _add(self, before: int, tokens: tuple[int, ...], pages: Sequence[int]) -> list[int]:
        """`pages` with these tokens can be found from now on, after the page `before` or, if that
        is an adapter's number, at the beginning. Of those computed twice, returns the first one."""
        size, found = self._pool.page_size, []
        for number, page in enumerate(pages):
            place = (before, tokens[number * size : (number + 1) * size])
            known = self._page_after.get(place)
            if known is None:
                known = self._page_after[place] = page
                self._place_of[page] = place
                self._num_uses[page] = 0
                self._pool.retain((page,))
                if before > 0:
                    self._num_uses[before] += 1
            found.append(known)
            before = known
        return found

    def _let_go(self, page: int) -> None:
        """One use less; pages that have none leave the tree."""
        while page > 0:
            self._num_uses[page] -= 1
            if self._num_uses[page]:
                return
            if self._states is not None and page in self._mark_of:
                self._states.release((self._mark_of.pop(page),))
            place = self._place_of.pop(page)
            del self._num_uses[page], self._page_after[place]
            self._pool.release((page,))
            page = place[0]

    def _mark(self, page: int, state: int) -> None:
        """`state` is at the end of a page that the table has."""
        assert self._states is not None, "only models with recurrent layers have states"
        if page not in self._mark_of:
            self._states.retain([state])
            self._mark_of[page] = state

    def keep(
        self,
        tokens: tuple[int, ...],
        pages: list[int],
        adapter: int = 0,
        mark: int | None = None,
        *,
        num_known: int = 0,
    ) -> None:
        """The full pages among `pages`, which hold keys and values of `tokens`; `mark` is the
        state at the end of the last of them. The first `num_known` were those of its prompt: if
        they still are in the tree, only those after them are added."""
        size = self._pool.page_size
        num_full = len(tokens) // size
        if not num_full:
            return
        if num_known and pages[num_known - 1] not in self._place_of:
            num_known = 0
        before = pages[num_known - 1] if num_known else -adapter
        own = tokens[num_known * size : num_full * size]
        last = [before, *self._add(before, own, pages[num_known:num_full])][-1]
        kept = Prefix((), [last], adapter, is_kept=True)
        if kept.key in self._entries:  # two sequences of the same tokens
            self._entries.move_to_end(kept.key)
        else:
            self._entries[kept.key] = kept
            self._num_uses[last] += 1
        if mark is not None:
            self._mark(last, mark)

    def wait(self, prefix: Prefix) -> None:
        prefix.num_waiting += 1

    def attach(self, prefix: Prefix) -> None:
        """A waiting sequence has copied the partial page and no longer needs the prefix."""
        prefix.num_waiting -= 1

    def leave(self, prefix: Prefix) -> None:
        """A waiting sequence leaves. A prefix without waiters is not computed further."""
        prefix.num_waiting -= 1
        if not prefix.num_waiting and not prefix.is_ready:
            self._drop(prefix)

    def make_room(self, count: int, keep: Prefix | None = None, *, num_states: int = 0) -> bool:
        """Evict idle entries other than `keep`, oldest first, until `count` pages are free, and
        `num_states` states of a model that has such."""
        while self._pool.num_free < count or (
            self._states is not None and self._states.num_free < num_states
        ):
            idle = (p for p in self._entries.values() if not p.num_waiting and p is not keep)
            oldest = next(idle, None)
            if oldest is None:
                return False
            self._drop(oldest)
        return True

    def forget(self) -> None:
        """The weights changed: drop what is computed, restart the others."""
        self.num_updates += 1
        for prefix in list(self._entries.values()):
            if prefix.is_computed:
                assert not prefix.num_waiting, "sequences attach in the step that made it ready"
                self._drop(prefix)
            else:
                assert not prefix.num_borrowed, "others may read these pages as they are"
                prefix.num_cached = 0

    def _drop(self, prefix: Prefix) -> None:
        del self._entries[prefix.key]
        self._pending.pop(prefix, None)
        self._release(prefix)

    def _release(self, prefix: Prefix) -> None:
        size = self._pool.page_size
        num_in_tree = (prefix.num_tokens if prefix.is_ready else prefix.num_borrowed) // size
        if prefix.is_kept:
            num_in_tree = 1
        self._pool.release(prefix.pages[num_in_tree:])
        self.give_back(prefix.pages[:num_in_tree])
        if self._states is not None:
            own = (prefix.state, prefix.start_state, *prefix.marks.values())
            self._states.release([state for state in own if state is not None])
