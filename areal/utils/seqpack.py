"""Divide sequences into bins (micro-batches) by their number of tokens.

`pack_sequences` puts every index into exactly one bin. No bin exceeds the token budget, unless one
item alone does. Deterministic: same arguments, same bins.

`ffd` (first-fit decreasing) yields few bins; `kk` (Karmarkar-Karp differencing) equal ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

Bins = list[list[int]]


def pack_sequences(
    lengths: Sequence[int],
    *,
    max_tokens: int | None = None,
    min_bins: int = 1,
    algorithm: str = "ffd",
) -> Bins:
    """Bins of indices into `lengths`, each bin ascending, bins ordered by their first index.

    With fewer sequences than `min_bins` each gets its own bin.
    """
    if not lengths:
        raise ValueError("there are no sequences to pack; give at least one")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"packing_algorithm must be one of {list(ALGORITHMS)}, got {algorithm!r}")
    bins = ALGORITHMS[algorithm](lengths, max_tokens, min(min_bins, len(lengths)))
    return sorted(sorted(bin_) for bin_ in bins)


def _ffd(sizes: Sequence[int], max_tokens: int | None, min_bins: int) -> Bins:
    if max_tokens is None:
        return _least_loaded(sizes, range(len(sizes)), min_bins)
    bins: Bins = []
    loads: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[item]
        place = next((b for b, load in enumerate(loads) if load + size <= max_tokens), None)
        if place is None:
            bins.append([item])
            loads.append(size)
        else:
            bins[place].append(item)
            loads[place] += size
    # Halving a bin keeps both halves within the budget; repacking might not.
    while len(bins) < min_bins:
        widest = max((b for b in bins if len(b) > 1), key=lambda b: sum(sizes[i] for i in b))
        bins.remove(widest)
        bins += _least_loaded(sizes, widest, 2)
    return bins


def _least_loaded(sizes: Sequence[int], items: Sequence[int], num_bins: int) -> Bins:
    """Longest first, each into the bin with the least load: balanced to within one item."""
    bins: Bins = [[] for _ in range(num_bins)]
    # The count breaks ties, so that items of size 0 spread as well and no bin stays empty.
    heap = [(0, 0, b) for b in range(num_bins)]
    for item in sorted(items, key=lambda i: -sizes[i]):
        load, count, b = heap[0]
        bins[b].append(item)
        heapq.heapreplace(heap, (load + sizes[item], count + 1, b))
    return bins


def _kk(sizes: Sequence[int], max_tokens: int | None, min_bins: int) -> Bins:
    num_bins = min_bins
    if max_tokens is not None:
        num_bins = max(min_bins, -(-sum(sizes) // max_tokens))
    while num_bins < len(sizes):
        bins = [b for b in _largest_differencing(sizes, num_bins) if b]
        fits = max_tokens is None or all(
            len(b) == 1 or sum(sizes[i] for i in b) <= max_tokens for b in bins
        )
        if fits and len(bins) >= min_bins:
            return bins
        num_bins += 1
    return [[i] for i in range(len(sizes))]


def _largest_differencing(sizes: Sequence[int], num_bins: int) -> Bins:
    """Karmarkar-Karp: merge the two most uneven partial partitions, heaviest bin to lightest."""
    # A partition is (spread, tie-break, bins), bins as (load, items) from heaviest to lightest.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for item, size in enumerate(sizes):
        division = [(size, [item])] + [(0, [])] * (num_bins - 1)
        spread = size if num_bins > 1 else 0
        heap.append((-spread, item, division))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, tie, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        joined = [
            (a_load + b_load, a + b)
            for (a_load, a), (b_load, b) in zip(left, reversed(right), strict=True)
        ]
        joined.sort(key=lambda bin_: -bin_[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], tie, joined))
    return [items for _, items in heap[0][2]]


ALGORITHMS: dict[str, Callable[[Sequence[int], int | None, int], Bins]] = {"ffd": _ffd, "kk": _kk}
