"""Prefix trees of token sequences: by hand, and against a trie of Python dicts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.utils.prefix_tree import PrefixTree, pack_trees

# Few tokens: random sequences then share prefixes, repeat, and lie within each other.
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


def flat(sequences: list[list[int]]) -> np.ndarray:
    return np.concatenate([np.array(sequence) for sequence in sequences])


def prefixes(sequences: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}


def test_a_tree_by_hand():
    sequences = [[5, 6, 7], [5, 6, 8, 9], [5, 6], [3]]
    tree = PrefixTree.of(sequences)
    assert flat(sequences)[tree.source_U].tolist() == [3, 5, 6, 7, 8, 9]
    assert tree.place_T.tolist() == [1, 2, 3, 1, 2, 4, 5, 1, 2, 0]
    assert tree.depth_U.tolist() == [0, 0, 1, 2, 2, 3]
    assert tree.starts_G.tolist() == [0, 1, 3, 4]
    assert tree.lengths_G.tolist() == [1, 2, 1, 2]
    assert tree.subtree_ends_G.tolist() == [1, 6, 4, 6]
    assert tree.levels_G.tolist() == [0, 0, 1, 1]
    # 6 predicts 7, 8, and ends a sequence; 5 predicts 6 in three of them.
    predictions = tree.predictions()
    assert predictions.place_R.tolist() == [1, 2, 2, 4, 0, 2, 3, 5]
    assert predictions.row_T.tolist() == [0, 1, 6, 0, 2, 3, 7, 0, 5, 4]


@pytest.mark.parametrize(
    ("sequences", "num_tokens", "num_segments"),
    [
        ([[1, 2, 3]] * 4, 3, 1),  # equal ones
        ([[1], [1, 2], [1, 2, 3, 4]], 4, 1),  # turns of an agent, each the last one and more
        ([[1, 2], [2, 2], [3, 2]], 6, 3),  # nothing shared
        ([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6]], 6, 5),  # a fork above a fork
    ],
)
def test_segments_end_where_sequences_part(sequences, num_tokens, num_segments):
    tree = PrefixTree.of(sequences)
    assert (len(tree), len(tree.starts_G)) == (num_tokens, num_segments)


def test_paths_by_hand():
    paths = PrefixTree.of([[5, 6, 7], [5, 6, 8, 9], [5, 6], [3]]).paths()
    assert paths.lengths.tolist() == [1, 3, 4]  # 3; 5 6 7; 5 6 8 9
    assert paths.token_P.tolist() == [0, 1, 2, 3, 1, 2, 4, 5]
    assert paths.first_U.tolist() == [0, 1, 2, 3, 6, 7]


@given(SEQUENCES)
def test_paths_are_the_sequences_that_no_other_goes_on_from(sequences):
    tree, tokens = PrefixTree.of(sequences), flat(sequences)
    paths = tree.paths()
    parts = np.split(tokens[tree.source_U][paths.token_P], paths.lengths.cumsum()[:-1])
    inner = {prefix[:-1] for prefix in prefixes(sequences)}
    assert sorted(map(tuple, parts)) == sorted({tuple(s) for s in sequences} - inner)
    assert paths.token_P[paths.first_U].tolist() == list(range(len(tree)))


@given(SEQUENCES)
def test_runs_and_scores_are_those_of_the_segments(sequences):
    tree = PrefixTree.of(sequences)
    runs = zip(tree.starts_G, tree.lengths_G, tree.subtree_ends_G, strict=True)
    below = [(length, end - start - length) for start, length, end in runs]
    assert tree.num_runs() == len(below) + sum(1 for _, rest in below if rest)
    assert tree.num_scores() == sum(length**2 + length * rest for length, rest in below)


@given(SEQUENCES)
def test_every_sequence_is_read_back_from_the_fewest_tokens(sequences):
    tree, tokens = PrefixTree.of(sequences), flat(sequences)
    assert tokens[tree.source_U][tree.place_T].tolist() == tokens.tolist()
    positions = [i for sequence in sequences for i in range(len(sequence))]
    assert tree.depth_U[tree.place_T].tolist() == positions
    assert len(tree) == len(prefixes(sequences))


@given(SEQUENCES)
def test_segments_say_who_is_above_whom(sequences):
    tree = PrefixTree.of(sequences)
    assert np.array_equal(
        np.cumsum(tree.lengths_G), np.append(tree.starts_G[1:], len(tree))
    )  # they cover the tree in order
    above = np.zeros((len(tree), len(tree)), dtype=bool)
    for path in np.split(tree.place_T, np.cumsum(tree.lengths)[:-1]):
        for i, place in enumerate(path):
            above[place, path[: i + 1]] = True
    ends_U = tree.subtree_ends_G.repeat(tree.lengths_G)
    place_U = np.arange(len(tree))
    sees = (place_U <= place_U[:, None]) & (place_U[:, None] < ends_U)
    assert np.array_equal(sees, above)
    contains = (tree.starts_G < tree.starts_G[:, None]) & (
        tree.starts_G[:, None] < tree.subtree_ends_G
    )
    assert np.array_equal(tree.levels_G, contains.sum(1))
    is_start_U = np.isin(place_U, tree.starts_G)
    forks = [g for g in range(len(tree.starts_G)) if contains[:, g].any()]
    for g in forks:  # a segment with others below ends at a fork, or it would be one with the next
        children = is_start_U & (tree.depth_U == tree.depth_U[tree.starts_G[g]] + tree.lengths_G[g])
        inside = (place_U > tree.starts_G[g]) & (place_U < tree.subtree_ends_G[g])
        assert (children & inside).sum() >= 2


@given(SEQUENCES)
def test_each_prediction_is_made_once(sequences):
    tree, tokens = PrefixTree.of(sequences), flat(sequences)
    predictions = tree.predictions()
    own_T = tree.place_T
    assert np.array_equal(predictions.place_R[predictions.row_T], own_T)
    labels = [label for s in sequences for label in (*s[1:], -1)]
    sources = predictions.label_source_R[predictions.row_T]
    assert np.where(sources < 0, -1, tokens[sources]).tolist() == labels
    pairs = {(prefix[:-1], prefix) for prefix in prefixes(sequences) if len(prefix) > 1}
    ends = {tuple(sequence) for sequence in sequences}
    assert len(predictions.place_R) == len(pairs) + len(ends)


@given(SEQUENCES, st.integers(3, 30), st.integers(1, 4), st.sampled_from(["ffd", "kk"]))
def test_bins_hold_every_unit_once_within_the_budget(sequences, max_tokens, min_bins, algorithm):
    arrays = [np.array(sequence) for sequence in sequences]
    for rows in (1, 2):
        num_units = len(arrays) // rows
        if num_units == 0:
            continue
        units = [sequences[u * rows : u * rows + rows] for u in range(num_units)]
        bins = pack_trees(
            arrays[: num_units * rows],
            rows_per_unit=rows,
            max_tokens=max_tokens,
            min_bins=min_bins,
            algorithm=algorithm,
        )
        assert sorted(unit for bin_ in bins for unit in bin_) == list(range(num_units))
        assert len(bins) >= min(min_bins, num_units)
        for bin_ in bins:
            size = len(prefixes([row for unit in bin_ for row in units[unit]]))
            assert size <= max_tokens or len(bin_) == 1


def test_a_group_shares_a_bin_and_a_large_one_is_cut_at_its_forks():
    prompts = [np.arange(100 * g, 100 * g + 40) for g in range(3)]
    rows = [np.append(prompts[i % 3], np.full(10, i)) for i in range(12)]  # groups interleaved
    # A group is 40 + 4 * 10 tokens.
    assert pack_trees(rows, max_tokens=80) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert pack_trees(rows, max_tokens=160) == [[0, 1, 3, 4, 6, 7, 9, 10], [2, 5, 8, 11]]
    # Two answers beside their prompt fit in 60; in packed sequences only one would.
    assert [len(bin_) for bin_ in pack_trees(rows, max_tokens=60)] == [2] * 6
    assert len(pack_trees(rows)) == 1
    assert [len(bin_) for bin_ in pack_trees(rows, min_bins=3)] == [4, 4, 4]


def test_turns_of_an_agent_share_a_bin_however_many():
    rows = [np.arange(40 + i) for i in range(600)]
    assert pack_trees(rows, max_tokens=640) == [list(range(600))]
    # The last turn alone is too long; the others are still one path.
    assert pack_trees(rows, max_tokens=638) == [list(range(599)), [599]]


def test_a_full_bin_is_cut_between_groups():
    prompts = [np.append(np.arange(20), np.full(20, 900 + g)) for g in range(3)]
    rows = [np.append(prompts[i // 4], np.full(10, i)) for i in range(12)]
    # All share 20 tokens, groups 40: two groups are 40 + 4 * 10 + 20 + 4 * 10.
    assert pack_trees(rows, max_tokens=145) == [list(range(8)), list(range(8, 12))]


def test_an_empty_sequence_is_refused():
    with pytest.raises(ValueError, match="needs a token"):
        PrefixTree.of([[1], []])
