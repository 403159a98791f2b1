"""Which sequences run, with which pages: admission, growth, preemption.

    waiting --admit--> filling --promote--> decoding --retire--> (finished)
       ^                  |                    |
       +-----preempt------+--------------------+

*filling*: its prefix is being computed, or (after a preemption) its own output is computed again.
*decoding*: everything but its last token is in the cache; each step adds one token.

Admission takes the head of the queue while a slot and pages are free. When a decoding sequence
needs a page and none is free, idle prefixes are evicted first, then the youngest running sequence
is preempted: it frees its pages and waits at the head of the queue, keeping its tokens. The oldest
sequence always advances, so every request ends. Only host state is changed here, no tensors.

Invariant: a sequence has a slot exactly while it is in `filling` or `decoding`, and `slots.pages`
mirrors its `pages`.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from areal.engine.native.kv_cache import (
    SCRATCH_PAGE,
    STATES_OF_PREFIX,
    STATES_OF_SEQUENCE,
    PagePool,
    Prefix,
    PrefixTable,
    StateSpan,
)
from areal.engine.native.sampler import SamplingOptions, has_rare_options
from areal.engine.native.sequence import Sequence

_MAX_INT64 = 2**63 - 1
# Values beyond these give the same distribution but overflow float32.
_COLDEST, _HOTTEST = 1e-20, 1e20


class Span(NamedTuple):
    """Tokens `start` to `end` of a prompt, or of an output that is computed again."""

    item: Prefix | Sequence
    start: int
    end: int
    states: StateSpan


class SlotTable:
    """Decode state of each running sequence as arrays: one row per slot.

    A step reads them with one vector index instead of visiting 512 objects. Counts include tokens
    that are still being drawn on the device, whose values are not read yet.
    """

    def __init__(self, num_slots: int, max_pages: int) -> None:
        self.pages = np.full((num_slots, max_pages), SCRATCH_PAGE, np.int64)
        self.num_pages = np.zeros(num_slots, np.int64)
        self.num_shared = np.zeros(num_slots, np.int64)  # leading pages shared with its prefix
        self.num_tokens = np.zeros(num_slots, np.int64)  # prompt and output
        self.num_output = np.zeros(num_slots, np.int64)
        self.max_cached = np.zeros(num_slots, np.int64)  # tokens ever cached: all but the last
        self.last_token = np.zeros(num_slots, np.int64)  # only set by runners that draw on the host
        self.min_output = np.zeros(num_slots, np.int64)
        self.temperature = np.ones(num_slots, np.float64)
        self.top_k = np.ones(num_slots, np.int64)
        self.top_p = np.ones(num_slots, np.float64)
        self.frequency_penalty = np.zeros(num_slots, np.float64)
        self.adjusted = np.zeros(num_slots, bool)  # by rare options: see sampler.py
        self.greedy = np.zeros(num_slots, bool)
        self.seed = np.zeros(num_slots, np.uint64)
        self.adapter = np.zeros(num_slots, np.int64)  # its number: see adapters.py
        self.state = np.zeros(num_slots, np.int64)  # of a model with recurrent layers
        self.mark = np.zeros(num_slots, np.int64)  # its state at the last border of a page
        self.rotary_delta = np.zeros(num_slots, np.int64)  # rotary position minus index in output
        self.constrained = np.zeros(num_slots, bool)  # by a grammar
        self.allowed: dict[int, np.ndarray] = {}  # constrained slot -> mask of its next token
        self.sequences: list[Sequence | None] = [None] * num_slots
        # Counts the sequences of a slot, so that a runner detects a new one.
        self.generation = np.zeros(num_slots, np.int64)

    def fill(self, slot: int, sequence: Sequence) -> None:
        options = sequence.gconfig
        self.generation[slot] += 1
        self.sequences[slot] = sequence
        self.num_tokens[slot] = sequence.num_tokens
        self.num_output[slot] = len(sequence.output_tokens)
        self.max_cached[slot] = len(sequence.prompt) + sequence.max_output - 1
        self.min_output[slot] = options.min_new_tokens
        self.temperature[slot] = min(max(options.temperature, _COLDEST), _HOTTEST)
        self.top_k[slot] = min(options.top_k, _MAX_INT64)
        self.top_p[slot] = options.top_p
        self.frequency_penalty[slot] = options.frequency_penalty
        self.adjusted[slot] = has_rare_options(options)
        self.greedy[slot] = options.greedy
        self.seed[slot] = sequence.seed
        self.adapter[slot] = sequence.adapter
        self.rotary_delta[slot] = 0 if sequence.images is None else sequence.images.delta
        self.constrained[slot] = sequence.grammar is not None
        self.state[slot], self.mark[slot] = sequence.state or 0, sequence.mark or 0

    def set_pages(self, slot: int, pages: list[int]) -> None:
        self.pages[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)

    def clear(self, slot: int) -> None:
        # Entries past a row's position are read (and masked), so they must be valid pages.
        self.pages[slot, : self.num_pages[slot]] = SCRATCH_PAGE
        self.num_pages[slot] = 0
        self.sequences[slot] = None
        self.constrained[slot] = False
        self.allowed.pop(slot, None)

    def advance(self, slots: np.ndarray, count: int | np.ndarray) -> None:
        """Each of `slots` draws `count` tokens."""
        self.num_tokens[slots] += count
        self.num_output[slots] += count

    def sampling_options(self, slots: np.ndarray, offset: np.ndarray) -> SamplingOptions:
        """For runners that draw on the host, with all earlier tokens read. Of the draw `offset`
        after the next one: only slots without penalties have such (drafts.py)."""
        index, penalty = self.num_output[slots] + offset, self.frequency_penalty[slots]
        rows = np.flatnonzero(self.adjusted[slots]).tolist()
        rare = {row: self.sequences[slots[row]] for row in rows}
        presence = {row: s.gconfig.presence_penalty for row, s in rare.items()}
        presence = {row: value for row, value in presence.items() if value}
        return SamplingOptions(
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            greedy=self.greedy[slots],
            seed=self.seed[slots],
            index=index,
            banned={
                row: sorted(self.sequences[slots[row]].stop_ids)
                for row in np.flatnonzero(index < self.min_output[slots]).tolist()
            },
            frequency_penalty=penalty,
            history={
                row: self.sequences[slots[row]].output_tokens
                for row in {*np.flatnonzero(penalty).tolist(), *presence}
            },
            presence_penalty=presence,
            repetition={
                row: (s.gconfig.repetition_penalty, [*s.prompt, *s.output_tokens])
                for row, s in rare.items()
                if s.gconfig.repetition_penalty != 1
            },
            bias={
                row: {int(token): bias for token, bias in s.gconfig.logit_bias.items()}
                for row, s in rare.items()
                if s.gconfig.logit_bias
            },
            min_p={row: s.gconfig.min_p for row, s in rare.items() if s.gconfig.min_p},
            allowed={
                row: self.allowed[slots[row]]
                for row in np.flatnonzero(self.constrained[slots]).tolist()
            },
        )


class Scheduler:
    def __init__(
        self,
        pool: PagePool,
        *,
        max_running: int,
        max_pages: int,
        states: PagePool | None = None,
    ) -> None:
        """`max_pages`: most pages of one sequence. `states`: numbers of states (kv_cache.py)."""
        if max_running < 1:
            raise ValueError(f"max_running must be at least 1, got {max_running}")
        self.pool = pool
        self.states = states
        self.prefixes = PrefixTable(pool, states)
        self.slots = SlotTable(max_running, max_pages)
        self.waiting: deque[Sequence] = deque()
        # Ordered sets, oldest admission first; removal of any member is O(1).
        self.filling: dict[Sequence, None] = {}
        self.decoding: dict[Sequence, None] = {}
        self.num_preemptions = 0
        self._free_slots = list(range(max_running - 1, -1, -1))

    @property
    def num_running(self) -> int:
        return len(self.filling) + len(self.decoding)

    @property
    def num_states_in_use(self) -> int:
        """0 without recurrent layers."""
        return 0 if self.states is None else self.states.num_usable - self.states.num_free

    def admit(self) -> None:
        """Move sequences from the queue to `filling` while slots and pages last."""
        while self.waiting and self._free_slots and self._place(self.waiting[0]):
            self.filling[self.waiting.popleft()] = None

    def num_lacking(self, num_steps: int) -> np.ndarray:
        """Pages each decoding sequence lacks to cache its next `num_steps` tokens."""
        slots, table = self.decoding_slots(), self.slots
        cached = np.minimum(table.num_tokens[slots] - 1 + num_steps, table.max_cached[slots])
        return np.maximum(-(-cached // self.pool.page_size) - table.num_pages[slots], 0)

    def grow(self, num_steps: int = 1) -> None:
        """Give each decoding sequence the pages of its next steps, by preemption if need be."""
        lacking = self.num_lacking(num_steps)
        if not lacking.any():
            return
        decoding = list(self.decoding)
        for row in np.flatnonzero(lacking).tolist():
            for _ in range(lacking[row]):
                # An older sequence of this loop may have preempted this one.
                if decoding[row].slot is None or not self._claim_page(decoding[row]):
                    break
                self._extend(decoding[row])

    def decoding_slots(self) -> np.ndarray:
        """Slots of `decoding`, in its order."""
        return np.fromiter((s.slot for s in self.decoding), np.int64, len(self.decoding))

    def next_to_prefill(self, budget: int) -> list[Span]:
        """What to compute now of prompts and preempted outputs: at most `budget` tokens in all,
        which count as cached from here on."""
        refilling = (s for s in self.filling if s.prefix is None)
        spans = []
        for item in (*self.prefixes.pending, *refilling):
            start, end = item.num_cached, min(item.num_tokens, item.num_cached + budget)
            if isinstance(item, Prefix) and item.images is not None:
                end = item.images.whole_end(end)
            if start >= end:
                break
            if isinstance(item, Prefix):
                states = item.state_span(start, end)
                self.prefixes.has_read_start(item)
            else:
                states = item.state_span(start, end, self.pool.page_size)
            spans.append(Span(item, start, end, states))
            item.num_cached = end
            budget -= end - start
        return spans

    def promote(self, sequence: Sequence) -> None:
        """All but its newest token are cached: it decodes from now on."""
        del self.filling[sequence]
        self.decoding[sequence] = None

    def release(self, sequence: Sequence) -> None:
        """Remove a running sequence and free its pages. It keeps its tokens."""
        self.filling.pop(sequence, None)
        self.decoding.pop(sequence, None)
        if sequence.prefix is not None:
            self.prefixes.leave(sequence.prefix)
        self.pool.release(sequence.pages)
        if self.states is not None:
            assert sequence.state is not None and sequence.mark is not None
            self.states.release([sequence.state, sequence.mark])
            sequence.state, sequence.mark = None, None
        assert sequence.slot is not None, "a sequence that waits holds nothing"
        self.slots.clear(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot, sequence.prefix = None, None
        sequence.pages, sequence.num_cached = [], 0

    def retire(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended. What it cached is kept for prompts that begin alike."""
        if sequence in self.decoding and sequence.cache_age == self.prefixes.num_updates:
            cached = (*sequence.prompt_key, *sequence.output_tokens[:-1])
            border = len(cached) // self.pool.page_size * self.pool.page_size
            # A border within the prompt is the prefix's, and marked by it. A runner that is ahead
            # may have marked the next border, after tokens that are none of the sequence's.
            computed = int(self.slots.num_tokens[sequence.slot]) - 1
            has_mark = border > len(sequence.prompt_key) and computed - border < self.pool.page_size
            mark = sequence.mark if has_mark else None
            num_known = len(sequence.prompt_key) // self.pool.page_size
            self.prefixes.keep(cached, sequence.pages, sequence.adapter, mark, num_known=num_known)
        self.release(sequence)

    def send_back(self, sequence: Sequence) -> None:
        """Return a running sequence to the head of the queue."""
        self.release(sequence)
        self.waiting.appendleft(sequence)

    def send_all_back(self) -> None:
        """Return every running sequence to the queue, in order: their caches are invalid."""
        for sequence in [*reversed(self.filling), *reversed(self.decoding)]:
            self.send_back(sequence)

    def forget_prefixes(self) -> None:
        """The weights changed. A sequence whose prompt is being computed after pages of another
        waits again: running sequences may keep these pages as they are."""
        for sequence in reversed(list(self.filling)):
            if sequence.prefix is not None and sequence.prefix.num_borrowed:
                self.send_back(sequence)
        self.prefixes.forget()

    def _place(self, sequence: Sequence) -> bool:
        """Find a slot, the prefix and pages for `sequence`; False when pages are short."""
        pool, prompt, adapter = self.pool, sequence.prompt_key, sequence.adapter
        num_shared = len(prompt) // pool.page_size
        # One position more than it has, so that it can draw a token without preempting others.
        num_own = pool.pages_for(sequence.num_tokens + 1) - num_shared
        prefix = self.prefixes.find(prompt, adapter)
        borrowed = self.prefixes.borrow(prompt, adapter) if prefix is None else []
        num_new = pool.pages_for(len(prompt)) - len(borrowed) if prefix is None else 0
        num_states = STATES_OF_SEQUENCE + (STATES_OF_PREFIX if prefix is None else 0)
        has_room = self.prefixes.make_room(num_own + num_new, prefix, num_states=num_states)
        if not has_room or not self.prefixes.can_follow(borrowed):
            self.prefixes.give_back(borrowed)
            # Making room evicted the mark after the borrowed pages: there are fewer to borrow now.
            return has_room and self._place(sequence)
        prefix = prefix or self.prefixes.create(prompt, borrowed, adapter, sequence.images)
        self.prefixes.wait(prefix)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = prefix.num_cached
        shared = prefix.pages[:num_shared]
        pool.retain(shared)
        sequence.prefix = prefix
        sequence.pages = shared + pool.allocate(num_own)
        if self.states is not None:
            sequence.state, sequence.mark = self.states.allocate(STATES_OF_SEQUENCE)
        sequence.slot = self._free_slots.pop()
        self.slots.fill(sequence.slot, sequence)
        self.slots.set_pages(sequence.slot, sequence.pages)
        self.slots.num_shared[sequence.slot] = num_shared
        return True

    def _claim_page(self, sequence: Sequence) -> bool:
        """Free a page by preempting younger sequences; False if `sequence` itself was preempted."""
        while not self.prefixes.make_room(1):
            youngest = next(reversed(self.filling or self.decoding))
            self.send_back(youngest)
            self.num_preemptions += 1
            if youngest is sequence:
                return False
        return True

    def _extend(self, sequence: Sequence) -> None:
        assert sequence.slot is not None, "a sequence that waits does not grow"
        sequence.pages += self.pool.allocate(1)
        self.slots.set_pages(sequence.slot, sequence.pages)
