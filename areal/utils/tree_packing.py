"""Divide sequences into micro-batches by the tokens their prefix trees have.

`pack_trees` keeps sequences together that share much, and counts what they share once. No bin's
tree exceeds the token budget, unless one unit alone does. Same tokens, same bins.

    sort units by prefix -> items: neighbours that share much, within the budget -> pack_sequences

A unit is a few rows that must stay together. Units share at least what their first rows share, so
the sizes found here are upper bounds; for units of one row they are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal.utils.prefix_tree import PrefixTree, sort_by_prefix
from areal.utils.seqpack import Bins, pack_sequences

# A prefix that is less of its sequences than this is worth computing anew, should they be parted:
# better bins come of small items. A chat template shared by all prompts is such a prefix.
_WORTH_SHARING = 0.1


def pack_trees(
    sequences: Sequence[np.ndarray],
    *,
    rows_per_unit: int = 1,
    max_tokens: int | None = None,
    min_bins: int = 1,
    algorithm: str = "ffd",
) -> Bins:
    """Bins of units, each bin ascending, bins ordered by their first unit."""
    units = [
        sequences[first : first + rows_per_unit]
        for first in range(0, len(sequences), rows_per_unit)
    ]
    order, shared = sort_by_prefix([unit[0] for unit in units])
    sizes = [len(PrefixTree.of(unit)) if len(unit) > 1 else len(unit[0]) for unit in units]
    neighbours = _Neighbours([sizes[unit] for unit in order], shared)
    items = neighbours.halved_to(min_bins, neighbours.items(max_tokens))
    bins = pack_sequences(
        [neighbours.size(*item) for item in items],
        max_tokens=max_tokens,
        min_bins=min_bins,
        algorithm=algorithm,
    )
    return sorted(sorted(order[i] for item in bin_ for i in range(*items[item])) for bin_ in bins)


Item = tuple[int, int]  # first and one past the last of some neighbours


class _Neighbours:
    """Units in lexicographic order: their sizes and what each shares with the one before."""

    def __init__(self, sizes: Sequence[int], shared: Sequence[int]) -> None:
        self._sizes, self._shared = sizes, shared
        added = [size - common for size, common in zip(sizes, shared, strict=True)]
        self._added_before = [0, *np.cumsum(added).tolist()]

    def size(self, first: int, end: int) -> int:
        """Tokens of the tree of these units."""
        return self._added_before[end] - self._added_before[first] + self._shared[first]

    def items(self, max_tokens: int | None) -> list[Item]:
        """Neighbours that share much with each other, in pieces within the budget."""
        items, first = [], 0
        for end in range(1, len(self._sizes) + 1):
            if end == len(self._sizes) or not self._is_worth_sharing(end):
                items += [(first, end)] if max_tokens is None else self._cut(first, end, max_tokens)
                first = end
        return items

    def _is_worth_sharing(self, unit: int) -> bool:
        """What this unit shares with the one before."""
        smaller = min(self._sizes[unit - 1], self._sizes[unit])
        return self._shared[unit] >= _WORTH_SHARING * smaller

    def _cut(self, first: int, end: int, max_tokens: int) -> list[Item]:
        """Pieces, parted where the least is shared of the places that make room for the next."""
        pieces = []
        for unit in range(first + 1, end):
            if self.size(first, unit + 1) <= max_tokens:
                continue
            places = [
                place
                for place in range(first + 1, unit + 1)
                if place == unit or self.size(place, unit + 1) <= max_tokens
            ]
            cut = min(places, key=lambda place: (self._shared[place], -place))
            pieces.append((first, cut))
            first = cut
        return [*pieces, (first, end)]

    def halved_to(self, count: int, items: list[Item]) -> list[Item]:
        """At least `count` items, where there are as many units."""
        while len(items) < count:
            several = [item for item in items if item[1] - item[0] > 1]
            if not several:
                break
            widest = max(several, key=lambda item: self.size(*item))
            middle = sum(widest) // 2
            items = [item for item in items if item != widest]
            items += [(widest[0], middle), (middle, widest[1])]
        return items
