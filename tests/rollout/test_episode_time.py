"""The seconds of an episode by stage: they do not overlap, and only training counts."""

from __future__ import annotations

import pytest

from areal.api.workflow_context import episode
from areal.rollout.episode_time import record_time, seconds_by_stage
from areal.utils import perf_tracer, stats_tracker


@pytest.fixture(autouse=True)
def _fresh():
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()


def test_stages_that_follow_each_other_add_up():
    spans = [("prompt", 1.0, 1.5), ("tokens", 1.5, 3.0), ("tool", 3.0, 4.0), ("tokens", 4.0, 5.0)]
    assert seconds_by_stage([*spans, ("reward", 5.0, 5.25)], 1.0, 6.0) == pytest.approx(
        {"first_token_s": 0.5, "generation_s": 2.5, "tool_s": 1.0, "reward_s": 0.25}
    )


def test_time_is_counted_once_where_stages_overlap():
    """As those of an agent that generates while its tools run, or of a group's samples."""
    spans = [("tool", 0.0, 4.0), ("tokens", 1.0, 3.0), ("tokens", 2.0, 5.0), ("reward", 9.0, 99.0)]
    found = seconds_by_stage(spans, 0.0, 10.0)
    assert found == pytest.approx({"generation_s": 4.0, "tool_s": 1.0, "reward_s": 1.0})


def run_episode(*, is_eval: bool = False) -> dict[str, float]:
    with (
        episode(task_id=0, sample=0, is_eval=is_eval, run_seed=1) as current,
        perf_tracer.episode_scope("tool"),
    ):
        pass
    record_time(current)
    return stats_tracker.export_all()


def test_only_training_episodes_are_recorded():
    stats = run_episode()
    assert stats["rollout/episode_s__count"] == 1
    assert 0 < stats["rollout/tool_s"] <= stats["rollout/episode_s"]
    assert run_episode(is_eval=True) == {}
