"""Attention over prefix trees: segment by segment, by a mask, and sequence by sequence."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from areal.models.common.attention import AttentionSpec, PackedAttention
from areal.models.common.attention_tree import TreeAttention
from areal.utils.prefix_tree import PrefixTree

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def random_sequences(seed: int, count: int, forks: int, length: int) -> list[list[int]]:
    """Each begins as some part of an earlier one: trees of any depth, and some sequences alone."""
    rng = random.Random(seed)
    sequences = [[rng.randrange(50) for _ in range(length)]]
    for _ in range(count - 1):
        old = rng.choice(sequences[-forks:])
        kept = rng.choice([0, len(old), rng.randrange(len(old))])
        new = [rng.randrange(50) for _ in range(rng.randrange(0 if kept else 1, length))]
        sequences.append(old[:kept] + new)
    return sequences


SHAPES = {
    "group": [[*range(20), 30 + i, *range(i)] for i in range(5)],
    "chain": [list(range(n)) for n in (3, 9, 17)],
    "unshared": [[i, *range(i)] for i in range(1, 6)],
    "equal": [list(range(7))] * 3,
    "one_token": [[1]],
    "forks": random_sequences(0, 40, 4, 12),
    "deep": random_sequences(1, 30, 1, 6),
}


def draw(tree: PrefixTree, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list:
    gen = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    drawn = [torch.randn(len(tree), n, HEAD_DIM, generator=gen) for n in heads]
    *qkv, weight = (x.to(device, dtype) for x in drawn)
    return [*(x.requires_grad_() for x in qkv), weight]


def with_gradients(attend, q, k, v, weight) -> list[torch.Tensor]:
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), (q, k, v))]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", SHAPES)
def test_a_tree_attends_as_its_sequences_do(name: str, window: int | None):
    tree = PrefixTree.of(SHAPES[name])
    attend = TreeAttention(tree, torch.device("cpu"))
    place_T = torch.as_tensor(tree.place_T)
    bounds, spec = torch.tensor([0, *tree.lengths.cumsum()]), AttentionSpec(0, window, 0.3)
    packed = PackedAttention(bounds, int(tree.lengths.max()))
    # Where each token of the tree is first found among the packed ones.
    source_U = torch.as_tensor(tree.source_U)

    def sequence_by_sequence(q, k, v):
        spread = (x.index_select(0, place_T) for x in (q, k, v))
        return packed(spec, *spread).index_select(0, source_U)

    inputs = draw(tree)
    got = with_gradients(partial(attend, spec), *inputs)
    expected = with_gradients(sequence_by_sequence, *inputs)
    # A shared token's gradient is a sum over its sequences, in an order of the CPU's choosing.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_all_ways_agree(name: str):
    tree = PrefixTree.of(SHAPES[name]).padded(4)
    attend, inputs = TreeAttention(tree, torch.device("cpu")), draw(tree)
    by_mask, by_paths, by_segments = (
        with_gradients(partial(way, AttentionSpec(0)), *inputs)
        for way in (attend.by_mask, attend.by_paths, attend.by_segments)
    )
    for found in (by_paths, by_segments):
        torch.testing.assert_close(found, by_mask, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("window", [None, 2, 5])
def test_paths_with_a_window_agree_with_the_mask(name: str, window: int | None):
    tree = PrefixTree.of(SHAPES[name])
    attend, inputs = TreeAttention(tree, torch.device("cpu")), draw(tree)
    spec = AttentionSpec(0, window, 0.3)
    by_mask = with_gradients(partial(attend.by_mask, spec), *inputs)
    by_paths = with_gradients(partial(attend.by_paths, spec), *inputs)
    torch.testing.assert_close(by_paths, by_mask, rtol=1e-5, atol=2e-6)


def test_short_answers_are_attended_by_paths_and_long_prompts_by_segments():
    """On a CPU: calls of a kernel are what costs with the first, scores with the second."""
    short = [[*range(6), 10 + group, i % 3, i, *range(5)] for group in range(20) for i in range(8)]
    long = [[*range(1000), 2000 + i, *range(i)] for i in range(16)]
    for sequences, is_short in ((short, True), (long, False)):
        tree = PrefixTree.of(sequences)
        attend, (*qkv, _) = TreeAttention(tree, torch.device("cpu")), draw(tree)
        spec = AttentionSpec(0)
        by_paths, by_segments = attend.by_paths(spec, *qkv), attend.by_segments(spec, *qkv)
        assert not torch.equal(by_paths, by_segments), "else nothing is told"
        assert torch.equal(attend(spec, *qkv), by_paths if is_short else by_segments)


def test_another_number_of_tokens_is_refused():
    tree = PrefixTree.of([[1, 2, 3]])
    q, k, v, _ = draw(PrefixTree.of([[1, 2]]))
    with pytest.raises(ValueError, match="the tree has 3 tokens, got 2"):
        TreeAttention(tree, torch.device("cpu"))(AttentionSpec(0), q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", [*SHAPES, "large"])
def test_cuda_kernels_equal_the_mask(name: str, dtype: torch.dtype):
    large = [[*range(700), 1000 + i, *range(i * 37)] for i in range(8)]
    tree = PrefixTree.of(large if name == "large" else SHAPES[name])
    attend, spec = TreeAttention(tree, torch.device("cuda")), AttentionSpec(0, scale=0.3)
    inputs = draw(tree, "cuda", dtype)
    got = with_gradients(partial(attend, spec), *inputs)
    exact = [x.detach().float().requires_grad_(x.requires_grad) for x in inputs]
    expected = with_gradients(partial(attend.by_mask, spec), *exact)
    for found, wanted in zip(got, expected, strict=True):
        error = (found.float() - wanted).norm() / wanted.norm().clamp(min=1e-2)
        assert error < (1e-4 if dtype is torch.float32 else 1e-2), float(error)
