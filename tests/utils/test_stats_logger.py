"""The console line, the database row, the order of things, and what a tracker is given."""

from __future__ import annotations

import logging

import pytest

from areal.utils.run_db import RunDatabase
from areal.utils.stats_logger import Figure, StatsLogger

STATS = {
    "timeperf/step": 0.42,
    "timeperf/step__count": 1.0,
    "rollout/reward": 0.61,
    "loss": -0.003,
    "tokens_per_second": 9812.0,
    "rollout/staleness": 1.2,
    "rollout/failed": 0.0,
    "update/ratio/avg": 1.01,
}


class ListTracker:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, step, stats) -> None:
        self.logged.append((step, dict(stats)))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def run_db(tmp_path):
    with RunDatabase(tmp_path / "run.db") as db:
        yield db


def test_console_line(run_db, caplog):
    with caplog.at_level(logging.INFO, "areal"):
        StatsLogger(run_db, total_steps=300).commit(11, STATS)
    assert caplog.messages == [
        "Step 12/300 | 0.42 s | reward 0.61 | loss -0.003 | 9.8k tok/s | staleness 1.2"
    ]


def test_what_went_wrong_in_the_step_is_counted_by_kind(run_db, caplog):
    """The statistics count since the start; the line has what is new."""
    first = {
        "rollout/retried": 3,
        "rollout/retried/TimeoutError": 2,
        "rollout/retried/ServerError": 1,
        "rollout/rejected": 4,
        "rollout/rejected/should_accept_fn": 4,
        "rollout/stale": 0,
    }
    second = {**first, "rollout/retried": 4, "rollout/retried/ServerError": 2, "rollout/stale": 2}
    many = {f"rollout/failed/E{i}": 1 for i in range(5)}
    with caplog.at_level(logging.INFO, "areal"):
        stats_logger = StatsLogger(run_db, total_steps=9)
        stats_logger.commit(0, first)
        stats_logger.commit(1, second)
        stats_logger.commit(2, second)
        stats_logger.commit(3, {**many, "rollout/failed": 5, "server/restarts": 1})
    assert caplog.messages == [
        "Step 1/9 | retried 3 (TimeoutError 2, ServerError 1) | rejected 4 (should_accept_fn)",
        "Step 2/9 | retried 1 (ServerError) | stale 2",
        "Step 3/9",
        "Step 4/9 | failed 5 (E4 1, E3 1, E2 1, ...) | server restarts 1",
    ]


def test_absent_figures_leave_no_gap(run_db, caplog):
    with caplog.at_level(logging.INFO, "areal"):
        StatsLogger(run_db, total_steps=300).commit(-1, {"eval/reward": 0.4})
    assert caplog.messages == ["Step 0/300 | eval 0.4"]


def test_database_and_trackers_get_everything_but_counts(run_db):
    tracker = ListTracker()
    StatsLogger(run_db, [tracker], total_steps=300).commit(11, STATS)
    expected = {key: value for key, value in STATS.items() if not key.endswith("__count")}
    assert run_db.step_stats() == [(11, expected)]
    assert tracker.logged == [(11, expected)]


def test_debug_level_shows_the_whole_table(run_db, caplog):
    with caplog.at_level(logging.DEBUG, "areal"):
        StatsLogger(run_db, total_steps=300).commit(11, STATS)
    assert "update/ratio/avg" in caplog.messages[-1] and "1.01" in caplog.messages[-1]


def test_close_closes_trackers_once(run_db):
    tracker = ListTracker()
    stats_logger = StatsLogger(run_db, [tracker], total_steps=1)
    stats_logger.close()
    stats_logger.close()
    assert tracker.closed == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (12.0, "12"),
        (12.34, "12.3"),
        (1.234, "1.23"),
        (-0.0301, "-0.03"),
        (3.2e-5, "3.2e-05"),
        (1_234_567.0, "1.2M"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_read_short(value, text):
    assert Figure("x").show(value) == text
