"""Metrics of an evaluation, and their 95 % intervals. Pure: numbers in, numbers out.

Problems are independent, the samples of one problem are not, so a problem is the unit everywhere: a
metric is the mean of one value per problem, and its interval comes from the spread of these values.

    avg@n    mean reward
    pass@k   chance that at least one of k samples passes: 1 - C(n - c, k) / C(n, k), unbiased
    maj@k    mean reward of the answer that most of k samples give; ties share

Intervals: Wilson's score interval if all values lie in [0, 1], with the number of problems replaced
by the effective one, mean (1 - mean) / se^2; so it stays inside [0, 1] and has a width also when
every problem has the same value. Otherwise mean +- 1.96 se.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054  # 97.5 % quantile of the normal distribution
MAX_SUBSETS = 1000  # of samples, for maj@k; more are sampled, always the same


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    low: float  # of the 95 % interval
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """B against A over the same problems."""

    difference: Estimate  # mean over problems of B's mean reward minus A's
    better: int  # problems on which B is better
    worse: int
    p_value: float  # of the two-sided sign test over these problems


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval of one value per problem."""
    mean = sum(values) / len(values)
    error = _standard_error(values)
    if all(0 <= value <= 1 for value in values):
        return Estimate(mean, *_wilson(mean, error, len(values)))
    return Estimate(mean, mean - Z95 * error, mean + Z95 * error)


def average(rewards: Sequence[Sequence[float]]) -> Estimate:
    """avg@n of the rewards of each problem's n samples.

    The mean is over all samples in order, as the trainer takes it: the bits are the same.
    """
    flat = [reward for problem in rewards for reward in problem]
    around = estimate([sum(problem) / len(problem) for problem in rewards])
    return Estimate(sum(flat) / len(flat), around.low, around.high)


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, have one that passes."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must lie between 1 and the number of samples {num_samples}, got {k}")
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def majority_at_k(answers: Sequence[str | None], rewards: Sequence[float], k: int) -> float:
    """Mean over subsets of k samples of the reward of the most frequent answer.

    A sample without an answer (None) does not vote; without any vote the reward is 0. Answers that
    tie share the vote. An answer's reward is the mean over all samples that give it.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"k must lie between 1 and the number of samples {len(answers)}, got {k}")
    worth = {
        answer: _mean([r for a, r in zip(answers, rewards, strict=True) if a == answer])
        for answer in set(answers)
        if answer is not None
    }
    return _mean([_vote(subset, worth) for subset in _subsets(answers, k)])


def compare(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> Comparison:
    """Paired by problem: rewards of the samples of the same problems, in the same order."""
    pairs = zip(a, b, strict=True)
    changes = [_mean(theirs) - _mean(ours) for ours, theirs in pairs]
    mean, error = _mean(changes), _standard_error(changes)
    better, worse = sum(c > 0 for c in changes), sum(c < 0 for c in changes)
    difference = Estimate(mean, mean - Z95 * error, mean + Z95 * error)
    return Comparison(difference, better, worse, sign_test(better, worse))


def sign_test(better: int, worse: int) -> float:
    """Two-sided exact p-value that better and worse are equally likely; with one sample per problem
    and rewards of 0 and 1 this is McNemar's exact test."""
    total = better + worse
    tail = sum(math.comb(total, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**total)


def _standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def _wilson(mean: float, error: float, count: int) -> tuple[float, float]:
    spread = mean * (1 - mean)
    trials = spread / error**2 if error > 0 and spread > 0 else count
    scale = 1 + Z95**2 / trials
    center = mean + Z95**2 / (2 * trials)
    half = Z95 * math.sqrt(spread / trials + Z95**2 / (4 * trials**2))
    # The mean is inside by algebra; rounding may say otherwise at 0 and 1.
    return max(0.0, min(mean, (center - half) / scale)), min(
        1.0, max(mean, (center + half) / scale)
    )


def _vote(subset: Sequence[str | None], worth: dict[str, float]) -> float:
    votes = Counter(answer for answer in subset if answer is not None)
    most = max(votes.values(), default=0)
    # Sorted: the order of a sum changes its last bits.
    return _mean([worth[answer] for answer in sorted(votes) if votes[answer] == most])


def _subsets(answers: Sequence[str | None], k: int) -> list[tuple[str | None, ...]]:
    if math.comb(len(answers), k) <= MAX_SUBSETS:
        return list(itertools.combinations(answers, k))
    drawn = random.Random(0)
    return [tuple(drawn.sample(answers, k)) for _ in range(MAX_SUBSETS)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
