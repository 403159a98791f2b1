"""When failures stop a run, and what the last line says."""

from __future__ import annotations

import logging

import pytest

from areal.rollout.failures import FailureMeter, RejectionStreak, RolloutFailedError, describe


def test_one_kind_failing_always_stops_soon_and_is_named():
    meter = FailureMeter(0.1)
    for i in range(10):
        assert meter.error is None
        meter.on_group_failed(ValueError("no answer") if i else KeyError("odd one out"))
    assert isinstance(meter.error, RolloutFailedError)
    assert "10 of the last 10 groups failed" in str(meter.error)
    assert "max_failure_ratio=0.1" in str(meter.error)
    assert str(meter.error).endswith("(9x): ValueError: no answer")
    assert isinstance(meter.error.__cause__, ValueError)


def test_a_share_within_the_bound_goes_on_for_ever():
    meter = FailureMeter(0.1)
    for i in range(1000):
        if i % 10 == 9:
            meter.on_group_failed(OSError("flaky"))
        else:
            meter.on_group_succeeded()
    assert meter.error is None
    assert meter.groups == {"OSError": 100}


def test_only_the_recent_past_counts():
    meter = FailureMeter(0.5, window=20)
    for _ in range(500):
        meter.on_group_succeeded()
    for _ in range(10):
        meter.on_group_failed(OSError())
    assert meter.error is None
    meter.on_group_failed(OSError())
    assert meter.error is not None


def test_a_finished_set_is_judged_whatever_its_size():
    meter = FailureMeter(0.1)
    meter.on_group_failed(ValueError("x"))
    assert meter.error is None
    with pytest.raises(RolloutFailedError):
        meter.check(ended=3)
    FailureMeter(0.0).check(ended=3)


def test_attempts_are_counted_by_kind():
    meter = FailureMeter(1.0)
    for error in (ValueError(), ValueError(), OSError()):
        meter.on_attempt_failed(error, True)
    assert meter.attempts == {"ValueError": 2, "OSError": 1}


def test_description_is_one_short_line():
    assert describe(ValueError("a\n  b")) == "ValueError: a b"
    assert describe(KeyError()) == "KeyError"
    assert len(describe(ValueError("x" * 1000))) < 330


def test_ratio_out_of_range():
    with pytest.raises(ValueError, match="max_failure_ratio"):
        FailureMeter(1.5)


def test_rejections_in_a_row_are_told_seldom(caplog):
    streak = RejectionStreak(patience=5)
    warned = []
    with caplog.at_level(logging.WARNING, logger="areal"):
        for count in range(1, 25):
            streak.on_rejected("should_accept_fn" if count % 2 else "workflow returned None")
            if len(caplog.records) > len(warned):
                warned.append(count)
        streak.on_kept()
        for _ in range(39):
            streak.on_rejected("should_accept_fn")
    assert warned == [5, 10, 20] and len(caplog.records) == 3
    assert "should_accept_fn 3x" in caplog.text and "nothing can be trained" in caplog.text
