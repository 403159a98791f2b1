"""Prefix trees of token sequences (shared prefixes are stored once), and packing by tree size.

    tree = PrefixTree.of([[5, 6, 7], [5, 6, 8, 9], [5, 6]])
    tree.source_U    # [7, 8, 2, 5, 6]: input index of each token 5 6 7 8 9 of the tree
    tree.place_T     # [0, 1, 2,  0, 1, 3, 4,  0, 1]: tree index of each input token
    tree.depth_U     # [0, 1, 2, 2, 3]: the position of each in its sequences

Tokens are in depth-first order. A segment is a run of them without a fork, so the tokens below a
segment directly follow it, up to its `subtree_ends`. Sequences without a common first token form
several trees, one after another. A token of the tree stands for one prefix: no two are equal.

Built by sorting: neighbours in lexicographic order share the longest prefixes, so each sequence
adds what it does not share with its predecessor, and no Python loop visits single tokens.

`pack_trees` divides sequences into micro-batches by the tokens of their trees: sequences that share
much stay together, and what they share counts once. No bin's tree exceeds the token budget, unless
one unit alone does. Same tokens, same bins.

    sort units by prefix -> items: neighbours that share much, within the budget -> pack_sequences

A unit is a few rows that must stay together. Units share at least what their first rows share, so
these sizes are upper bounds; for units of one row they are exact.

Shape legend: T tokens of the input, sequence by sequence; U tokens of the tree; P tokens of its
paths, path by path; G segments; R pairs of a token and its successor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from areal.utils.seqpack import Bins, pack_sequences

Ints = np.ndarray  # 1-D integer array


@dataclass(frozen=True, slots=True)
class PrefixTree:
    lengths: Ints  # of the sequences
    source_U: Ints
    place_T: Ints
    depth_U: Ints
    starts_G: Ints
    lengths_G: Ints
    subtree_ends_G: Ints
    levels_G: Ints  # number of segments above each

    @classmethod
    def of(cls, sequences: Sequence[Ints | list[int]]) -> PrefixTree:
        arrays = [np.asarray(sequence) for sequence in sequences]
        lengths = np.array([len(array) for array in arrays])
        if not len(lengths) or not lengths.all():
            raise ValueError(f"every sequence of a tree needs a token, got lengths {lengths}")
        order, shared = sort_by_prefix(arrays)
        firsts = lengths.cumsum() - lengths
        place_T = np.empty(lengths.sum(), dtype=np.int64)
        sources, depths, size, last = [], [], 0, slice(0)
        for row, common in zip(order, shared, strict=True):
            first, length = firsts[row], lengths[row]
            path = place_T[first : first + length]
            path[:common] = place_T[last][:common]
            path[common:] = np.arange(size, size + length - common)
            sources.append(np.arange(first + common, first + length))
            depths.append(np.arange(common, length))
            size, last = size + length - common, slice(first, first + length)
        segments = _segments([int(lengths[row]) for row in order], shared)
        return cls(
            lengths=lengths,
            source_U=np.concatenate(sources),
            place_T=place_T,
            depth_U=np.concatenate(depths),
            starts_G=np.array([segment.start for segment in segments]),
            lengths_G=np.array([segment.length for segment in segments]),
            subtree_ends_G=np.array([segment.subtree_end for segment in segments]),
            levels_G=_levels(segments),
        )

    def __len__(self) -> int:
        return len(self.source_U)

    def padded(self, multiple: int) -> PrefixTree:
        """With tokens that no sequence has, as one more root, up to a multiple of tokens.

        They repeat the tree's first tokens, which leaves the load of experts as it is. `lengths`
        and `place_T` stay; `predictions` is for a tree without padding.
        """
        size, extra = len(self), -len(self) % multiple
        if not extra:
            return self
        more = np.arange(extra)
        return replace(
            self,
            source_U=np.append(self.source_U, self.source_U[more % size]),
            depth_U=np.append(self.depth_U, more),
            starts_G=np.append(self.starts_G, size),
            lengths_G=np.append(self.lengths_G, extra),
            subtree_ends_G=np.append(self.subtree_ends_G, size + extra),
            levels_G=np.append(self.levels_G, 0),
        )

    def num_runs(self) -> int:
        """Segments, and those of them again that others descend from."""
        return len(self.starts_G) + int((self._below_G > 0).sum())

    def num_scores(self) -> int:
        """Squares of the segments' lengths, and pairs of a token and one below its segment."""
        return int((self.lengths_G * (self.lengths_G + self._below_G)).sum())

    @property
    def _below_G(self) -> Ints:
        """Tokens below each segment."""
        return self.subtree_ends_G - self.starts_G - self.lengths_G

    def paths(self) -> Paths:
        """The sequences from a root to each end of the tree, which together have all its tokens."""
        found: list[Ints] = []
        above: list[tuple[int, Ints]] = []  # end of a subtree, and the path to its first fork
        runs = zip(self.starts_G.tolist(), self.lengths_G, self.subtree_ends_G, strict=True)
        for start, length, end in runs:
            while above and above[-1][0] <= start:
                above.pop()
            path = np.arange(start, start + length)
            if above:
                path = np.concatenate([above[-1][1], path])
            if end == start + length:
                found.append(path)
            else:
                above.append((end, path))
        token_P = np.concatenate(found)
        first_U = np.empty(len(self), dtype=np.int64)
        first_U[token_P[::-1]] = np.arange(len(token_P))[::-1]  # of several the last one stays
        return Paths(np.array([len(path) for path in found]), token_P, first_U)

    def predictions(self) -> Predictions:
        """Each pair of a token and its successor, once for all sequences that have it."""
        is_child_U = self.depth_U > 0
        row_U = is_child_U.cumsum() - 1  # the pair that ends in this token
        parents = self.place_T[self.source_U[is_child_U] - 1]
        last_T = self.lengths.cumsum() - 1
        ends, end_of_sequence = np.unique(self.place_T[last_T], return_inverse=True)
        row_T = np.roll(row_U[self.place_T], -1)
        row_T[last_T] = len(parents) + end_of_sequence
        return Predictions(
            place_R=np.concatenate([parents, ends]),
            label_source_R=np.concatenate([self.source_U[is_child_U], np.full(len(ends), -1)]),
            row_T=row_T,
        )


@dataclass(frozen=True, slots=True)
class Paths:
    lengths: Ints
    token_P: Ints  # tree index of each token, path by path
    first_U: Ints  # where each token of the tree first stands in `token_P`


@dataclass(frozen=True, slots=True)
class Predictions:
    place_R: Ints  # tree index of the predicting token
    label_source_R: Ints  # input index of the predicted token; -1 at the end of a sequence
    row_T: Ints  # index of each input token's pair


def sort_by_prefix(sequences: Sequence[Ints]) -> tuple[list[int], list[int]]:
    """The lexicographic order, and the length of the prefix each shares with its predecessor."""
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]  # bytes compare as numbers
    order = sorted(range(len(keys)), key=keys.__getitem__)
    neighbours = zip(order, order[1:], strict=False)
    return order, [0] + [_common(sequences[a], sequences[b]) for a, b in neighbours]


def _common(a: Ints, b: Ints) -> int:
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    first = int(differs.argmax())  # 0 also where none differs; sequences have a token at least
    return first if differs[first] else size


@dataclass(slots=True)
class _Segment:
    start: int
    depth: int
    length: int
    subtree_end: int = 0


def _segments(lengths: Sequence[int], shared: Sequence[int]) -> list[_Segment]:
    """For sequences in lexicographic order, each appended after its shared prefix."""
    segments: list[_Segment] = []
    path: list[_Segment] = []  # from a root to the last appended token
    size = 0
    for length, common in zip(lengths, shared, strict=True):
        if length == common:  # equal to its predecessor
            continue
        while path and path[-1].depth >= common:
            path.pop().subtree_end = size
        if path:
            top = path[-1]
            upper = common - top.depth
            if top.length > upper:  # a fork within it
                lower = _Segment(top.start + upper, common, top.length - upper, size)
                segments.append(lower)
                top.length = upper
            elif top.start + top.length == size:  # extends its predecessor
                top.length += length - common
                size += length - common
                continue
        path.append(_Segment(size, common, length - common))
        segments.append(path[-1])
        size += length - common
    for segment in path:
        segment.subtree_end = size
    return sorted(segments, key=lambda segment: segment.start)


def _levels(segments: Sequence[_Segment]) -> Ints:
    levels, open_ends = [], []
    for segment in segments:
        while open_ends and open_ends[-1] <= segment.start:
            open_ends.pop()
        levels.append(len(open_ends))
        open_ends.append(segment.subtree_end)
    return np.array(levels)


# A shared prefix that is a smaller part of its sequences than this may be computed twice, since
# small items pack better. A chat template common to all prompts is such a prefix.
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


Item = tuple[int, int]  # range of neighbours: first, end (exclusive)


class _Neighbours:
    """Units in lexicographic order: their sizes and the prefix each shares with its predecessor."""

    def __init__(self, sizes: Sequence[int], shared: Sequence[int]) -> None:
        self._sizes, self._shared = sizes, shared
        added = [size - common for size, common in zip(sizes, shared, strict=True)]
        self._added_before = [0, *np.cumsum(added).tolist()]

    def size(self, first: int, end: int) -> int:
        """Number of tokens in the tree of these units."""
        return self._added_before[end] - self._added_before[first] + self._shared[first]

    def items(self, max_tokens: int | None) -> list[Item]:
        """Runs of neighbours that share much, in pieces within the budget."""
        items, first = [], 0
        for end in range(1, len(self._sizes) + 1):
            if end == len(self._sizes) or not self._is_worth_sharing(end):
                items += [(first, end)] if max_tokens is None else self._cut(first, end, max_tokens)
                first = end
        return items

    def _is_worth_sharing(self, unit: int) -> bool:
        """Whether the prefix this unit shares with its predecessor is long enough."""
        smaller = min(self._sizes[unit - 1], self._sizes[unit])
        return self._shared[unit] >= _WORTH_SHARING * smaller

    def _cut(self, first: int, end: int, max_tokens: int) -> list[Item]:
        """Pieces within the budget, cut where the shared prefix is shortest."""
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
        """At least `count` items, if there are as many units."""
        while len(items) < count:
            several = [item for item in items if item[1] - item[0] > 1]
            if not several:
                break
            widest = max(several, key=lambda item: self.size(*item))
            middle = sum(widest) // 2
            items = [item for item in items if item != widest]
            items += [(widest[0], middle), (middle, widest[1])]
        return items
