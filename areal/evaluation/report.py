"""Numbers of finished evaluations: metrics with intervals, counts, comparisons, a curve.

In: the results of the store. Out: JSON values and lines of text. Every metric has all samples of
all problems in its denominator: a sample that failed or was rejected counts as 0 and is named in
`counts` and `causes`; one that was cut off counts with its reward and is named as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from areal.evaluation.metrics import (
    Comparison,
    Estimate,
    average,
    compare,
    estimate,
    majority_at_k,
    pass_at_k,
)
from areal.evaluation.store import STATES, Evaluation, SampleResult
from areal.reward.answer_text import final_answer, plain_number

_MAX_CAUSES = 5


@dataclass(frozen=True, slots=True)
class Summary:
    evaluation: Evaluation
    num_problems: int
    num_samples: int  # of each problem
    counts: dict[str, int]  # samples by state
    causes: dict[str, int]  # why samples failed, the most frequent first
    num_tokens: int
    versions: list[int]  # of the weights; one, or none if the server does not say
    metrics: dict[str, Estimate]
    rewards: list[list[float]]  # by problem; 0 where there is none

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.evaluation.target,
            "id": self.evaluation.id,
            "step": self.evaluation.step,
            "weights": self.evaluation.identity["weights"],
            "version": self.versions[0] if self.versions else None,
            "problems": self.num_problems,
            "samples": self.num_problems * self.num_samples,
            "counts": self.counts,
            "causes": self.causes,
            "tokens": self.num_tokens,
            "metrics": {name: asdict(found) for name, found in self.metrics.items()},
        }


def summarize(
    evaluation: Evaluation,
    results: Sequence[SampleResult],
    *,
    num_problems: int,
    num_samples: int,
    ks: Sequence[int],
    threshold: float,
    votes: bool,
) -> Summary:
    """`threshold`: the least reward that passes. Samples beyond `num_samples` are left out."""
    by_row: dict[int, list[SampleResult]] = defaultdict(list)
    for result in results:
        if result.row < num_problems and result.sample < num_samples:
            by_row[result.row].append(result)
    problems = [by_row[row] for row in range(num_problems)]
    lacking = sum(num_samples - len(problem) for problem in problems)
    if lacking:
        raise RuntimeError(f"{evaluation.target}: {lacking} samples have no result; run it again")
    counted = [result for problem in problems for result in problem]
    counts = Counter(result.state for result in counted)
    causes = Counter(result.why for result in counted if result.state == "failed")
    return Summary(
        evaluation,
        num_problems,
        num_samples,
        {state: counts[state] for state in STATES},
        dict(causes.most_common(_MAX_CAUSES)),
        sum(result.num_tokens for result in counted),
        sorted({result.version for result in counted if result.version is not None}),
        _metrics(problems, ks, threshold, votes),
        [_rewards(problem) for problem in problems],
    )


def compare_summaries(a: Summary, b: Summary) -> Comparison:
    return compare(a.rewards, b.rewards)


def vote_of(completion: str) -> str | None:
    """The final answer of a text, numbers in one notation: 72, 72.0 and $72 are one answer."""
    answer = final_answer(completion)
    if answer is None:
        return None
    number = plain_number(answer)
    return answer.strip() if number is None else f"{number.normalize():f}"


def _metrics(
    problems: Sequence[Sequence[SampleResult]], ks: Sequence[int], threshold: float, votes: bool
) -> dict[str, Estimate]:
    rewards = [_rewards(problem) for problem in problems]
    metrics = {f"avg@{len(rewards[0])}": average(rewards)}
    for k in ks:
        passed = [sum(reward >= threshold for reward in problem) for problem in rewards]
        metrics[f"pass@{k}"] = estimate(
            [pass_at_k(len(own), num, k) for own, num in zip(rewards, passed, strict=True)]
        )
    for k in ks if votes else ():
        if k > 1:
            answers = [[vote_of(result.completion) for result in problem] for problem in problems]
            pairs = zip(answers, rewards, strict=True)
            metrics[f"maj@{k}"] = estimate([majority_at_k(*pair, k) for pair in pairs])
    return metrics


def _rewards(problem: Sequence[SampleResult]) -> list[float]:
    return [0.0 if result.reward is None else result.reward for result in problem]


# Text.


def table(summaries: Sequence[Summary]) -> str:
    """One line per target: metrics with their intervals, then what happened to the samples."""
    names = list(summaries[0].metrics)
    rows = [["target", *names, "samples", "cut off", "rejected", "failed"]]
    for summary in summaries:
        shown = [_shown(summary.metrics[name]) for name in names]
        counts = [str(summary.counts[state]) for state in ("truncated", "rejected", "failed")]
        total = f"{summary.num_problems} x {summary.num_samples}"
        rows.append([summary.evaluation.target, *shown, total, *counts])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([*lines, *_notes(summaries)])


def _shown(found: Estimate) -> str:
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _notes(summaries: Sequence[Summary]) -> list[str]:
    notes = []
    for summary in summaries:
        if summary.counts["failed"]:
            first = next(iter(summary.causes))
            notes.append(
                f"{summary.evaluation.target}: {summary.counts['failed']} samples failed and count "
                f"as 0, most often by {first}; the same command tries them again"
            )
    return notes


def comparison_text(a: Summary, b: Summary, found: Comparison) -> str:
    change = found.difference
    return (
        f"{b.evaluation.target} against {a.evaluation.target}, paired over {a.num_problems} "
        f"problems: {change.value:+.3f} [{change.low:+.3f}, {change.high:+.3f}], better on "
        f"{found.better}, worse on {found.worse}, p = {found.p_value:.3g} (sign test)"
    )
