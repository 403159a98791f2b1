"""What holds of every loss for any batch: padding, order and cutting change nothing.

A batch is a list of sequences, each a dict of per-token tensors with its own mask; every loss is
brought to the form `fn(packed batch) -> loss`, and its denominator to `count(packed batch)`.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.algorithm.kl import k3, kl_loss
from areal.algorithm.loss import (
    LossInputs,
    cispo_loss,
    gspo_loss,
    ppo_clip_loss,
    reverse_kl_loss,
    sapo_loss,
    sft_loss,
    teacher_policy_loss,
    value_loss,
)
from areal.algorithm.off_policy import METRICS, importance_weight, loglinear_prox, m2po_keep, reject
from areal.algorithm.preference import dpo_loss, ipo_loss, reward_model_loss

KEYS = ("logp", "prox", "behave", "advantages", "ref", "values", "returns")
Batch = dict[str, torch.Tensor]

LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=5)
SEEDS = st.integers(0, 2**31)
few = settings(max_examples=20)


def sequences(lengths: list[int], seed: int) -> list[Batch]:
    gen = torch.Generator().manual_seed(seed)
    out = []
    for length in lengths:
        tensors = 0.3 * torch.randn(len(KEYS), length, generator=gen, dtype=torch.float64)
        sequence = dict(zip(KEYS, tensors, strict=True))
        sequence["advantages"] = sequence["advantages"].sign() * sequence["advantages"].exp()
        sequence["mask"] = torch.rand(length, generator=gen) < 0.8
        out.append(sequence)
    return out


def pack(batch: list[Batch]) -> Batch:
    bounds = torch.tensor([0] + [len(sequence["mask"]) for sequence in batch]).cumsum(0)
    return {key: torch.cat([s[key] for s in batch]) for key in batch[0]} | {"cu": bounds}


def padded(sequence: Batch, extra: int) -> Batch:
    """The same sequence with junk behind it, off the mask."""
    junk = {key: torch.full((extra,), math.nan, dtype=torch.float64) for key in KEYS}
    junk["mask"] = torch.zeros(extra, dtype=torch.bool)
    return {key: torch.cat([value, junk[key]]) for key, value in sequence.items()}


def policy(loss, **options):
    def fn(x: Batch) -> torch.Tensor:
        weight = importance_weight(x["prox"], x["behave"], x["mask"])
        inputs = LossInputs(x["logp"], x["prox"], x["advantages"], x["mask"], weight, x["cu"])
        return loss(inputs, **options)[0]

    return fn


TOKEN_LOSSES = {
    "ppo": policy(ppo_clip_loss, eps_clip=0.2, c_clip=3.0),
    "gspo": policy(gspo_loss, eps_clip=0.2),
    "sapo": policy(sapo_loss),
    "cispo": policy(cispo_loss, eps_clip=1.0, eps_clip_higher=0.3),
    "kl": lambda x: kl_loss(x["logp"], x["ref"], x["mask"], estimator=k3)[0],
    "value": lambda x: value_loss(x["values"], x["ref"], x["returns"], x["mask"], eps_clip=0.1)[0],
    "sft": lambda x: sft_loss(x["logp"], x["mask"]),
    "reverse_kl": lambda x: reverse_kl_loss(x["logp"], x["ref"], x["mask"]),
    "teacher": lambda x: teacher_policy_loss(x["logp"], x["behave"], x["ref"], x["mask"]),
}
PAIR_LOSSES = {
    "dpo": lambda x: dpo_loss(x["logp"], x["ref"], x["mask"], x["cu"], beta=0.5)[0],
    "ipo": lambda x: ipo_loss(x["logp"], x["ref"], x["mask"], x["cu"], beta=0.5)[0],
    "reward_model": lambda x: reward_model_loss(x["values"], x["cu"])[0],
}


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [*TOKEN_LOSSES, "dpo", "ipo"])
@few
@given(LENGTHS, SEEDS, st.integers(1, 5))
def test_padding_never_changes_a_loss(name: str, lengths: list[int], seed: int, extra: int):
    """Not for the reward model: its score is at the last token, so padding is packed away."""
    loss = (TOKEN_LOSSES | PAIR_LOSSES)[name]
    batch = sequences(lengths + lengths, seed)  # an even number, for pairs
    same(loss(pack([padded(s, extra) for s in batch])), loss(pack(batch)))


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@few
@given(LENGTHS, SEEDS)
def test_the_order_of_a_batch_does_not_matter(name: str, lengths: list[int], seed: int):
    batch = sequences(lengths, seed)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()
    same(TOKEN_LOSSES[name](pack([batch[i] for i in order])), TOKEN_LOSSES[name](pack(batch)))


@pytest.mark.parametrize("name", PAIR_LOSSES)
@few
@given(LENGTHS, SEEDS)
def test_the_order_of_pairs_does_not_matter(name: str, lengths: list[int], seed: int):
    batch = sequences(lengths + lengths, seed)
    pairs = [batch[i : i + 2] for i in range(0, len(batch), 2)]
    turned = [sequence for pair in reversed(pairs) for sequence in pair]
    same(PAIR_LOSSES[name](pack(turned)), PAIR_LOSSES[name](pack(batch)))


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@few
@given(LENGTHS, LENGTHS, SEEDS)
def test_two_ranks_make_the_loss_of_one(name: str, first: list, second: list, seed: int):
    """Each rank's mean weighs as many tokens as it holds, as the engine adds them up."""
    batch = sequences(first + second, seed)
    parts = [pack(batch[: len(first)]), pack(batch[len(first) :])]
    counts = [part["mask"].sum() for part in parts]
    total = sum(TOKEN_LOSSES[name](part) * n for part, n in zip(parts, counts, strict=True))
    same(total / max(sum(counts), 1), TOKEN_LOSSES[name](pack(batch)))


@few
@given(LENGTHS, SEEDS)
def test_m2po_keeps_the_same_tokens_in_any_order_and_with_padding(lengths: list[int], seed: int):
    def kept(batch: list[Batch]) -> set[float]:
        x = pack(batch)
        keep = m2po_keep(x["prox"], x["behave"], x["mask"], threshold=0.04)
        return set(x["prox"][keep].tolist())

    batch = sequences(lengths, seed)
    assert kept(batch) == kept([padded(s, 2) for s in reversed(batch)])


@few
@given(LENGTHS, SEEDS)
def test_staleness_zero_makes_decoupled_equal_plain_ppo(lengths: list[int], seed: int):
    """The weights that sampled are the weights the step begins with: bit for bit the same loss."""
    x = pack(sequences(lengths, seed))
    prox = x["behave"]
    weight = importance_weight(prox, x["behave"], x["mask"])
    plain = LossInputs(x["logp"], x["behave"], x["advantages"], x["mask"])
    decoupled = LossInputs(x["logp"], prox, x["advantages"], x["mask"], weight)
    options = dict(eps_clip=0.2, c_clip=3.0)
    assert torch.equal(ppo_clip_loss(decoupled, **options)[0], ppo_clip_loss(plain, **options)[0])


@few
@given(LENGTHS, SEEDS, st.integers(0, 9))
def test_fresh_tokens_have_the_sampling_policy_as_their_guess(lengths, seed: int, version: int):
    x = pack(sequences(lengths, seed))
    fresh = torch.full_like(x["mask"], version, dtype=torch.long)
    assert torch.equal(loglinear_prox(x["logp"], x["behave"], fresh, version), x["behave"])


@pytest.mark.parametrize("metric", METRICS)
@few
@given(LENGTHS, SEEDS)
def test_identical_policies_weigh_exactly_one(metric: str, lengths: list[int], seed: int):
    x = pack(sequences(lengths, seed))
    logp, mask = x["logp"] - 1, x["mask"]
    ones = mask.float()
    assert torch.equal(importance_weight(logp, logp, mask), ones)
    for level in ("token", "sequence"):
        for action in ("mask", "clamp") if metric == "ratio" else ("mask",):
            weight = reject(
                logp,
                logp,
                mask,
                x["cu"],
                level=level,
                action=action,
                metric=metric,
                agg="sum",
                upper=2.0,
                lower=None,
            )
            assert torch.equal(weight, ones)
    assert torch.equal(m2po_keep(logp, logp, mask, threshold=1e-12), mask)


@pytest.mark.parametrize("loss", [ppo_clip_loss, gspo_loss])
@few
@given(LENGTHS, SEEDS)
def test_the_ratio_of_identical_policies_is_exactly_one(loss, lengths: list[int], seed: int):
    x = pack(sequences(lengths, seed))
    inputs = LossInputs(x["logp"], x["logp"], x["advantages"], x["mask"], cu_seqlens=x["cu"])
    _, metrics = loss(inputs, eps_clip=0.0)
    assert (metrics["importance_weight"] == 1).all() and not metrics["clip_ratio"].any()
