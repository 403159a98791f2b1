"""How long episodes spend in each stage: statistics that say where rollout's time went.

    with episode(task_id=3, sample=0, is_eval=False, run_seed=1) as current:
        ...                                     # the workflow
    record_time(current)

In: the spans that generation, tools and rewards report of the episode that runs
(`perf_tracer.episode_span`). Out: `rollout/episode_s`, and of it the parts `rollout/first_token_s`,
`generation_s`, `tool_s` and `reward_s`, which do not overlap. Only training episodes that ended
well are recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from areal.api.workflow_context import Episode, Span
from areal.utils import stats_tracker

# Name of a span -> statistic. Where spans overlap (an agent's calls, the samples of a group), the
# time is that of the first.
STAGES = {
    "tokens": "generation_s",
    "prompt": "first_token_s",
    "tool": "tool_s",
    "reward": "reward_s",
}


def record_time(ended: Episode) -> None:
    """Of an episode that has just ended well; no-op for one of an evaluation."""
    if not ended.is_eval:
        now = time.perf_counter()
        stages = seconds_by_stage(ended.spans, ended.began, now)
        stats_tracker.get("rollout").scalar(episode_s=now - ended.began, **stages)


def seconds_by_stage(spans: Sequence[Span], began: float, ended: float) -> dict[str, float]:
    """By statistic, without those of 0 seconds; at most `ended - began` together."""
    found: dict[str, float] = {}
    reached = began
    for name, start, end in spans:  # nearly always one after the other
        if start < reached or end > ended:
            return _seconds_once(spans, began, ended)
        reached = end
        if end > start and name in STAGES:
            statistic = STAGES[name]
            found[statistic] = found.get(statistic, 0.0) + end - start
    return found


def _seconds_once(spans: Sequence[Span], began: float, ended: float) -> dict[str, float]:
    """As `seconds_by_stage`, of spans that overlap or reach beyond the episode."""
    clipped = [(name, max(start, began), min(end, ended)) for name, start, end in spans]
    found: dict[str, float] = {}
    taken: list[tuple[float, float]] = []
    before = 0.0
    for name, statistic in STAGES.items():
        own = [(start, end) for one, start, end in clipped if one == name and end > start]
        if own:
            taken += own
            covered = _length(taken)
            found[statistic] = covered - before
            before = covered
    return found


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    """Of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
