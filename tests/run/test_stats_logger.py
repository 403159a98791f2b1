"""The console line, the database row, the order of things, and what a tracker is given."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from run.test_database import step_stats

from areal.run.database import RunDatabase
from areal.run.stats_logger import Figure, StatsLogger
from areal.run.trackers import TrackerThread

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


def in_thread(tracker: ListTracker) -> TrackerThread:
    return TrackerThread("list", lambda: tracker)


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
    stats_logger = StatsLogger(run_db, [in_thread(tracker)], total_steps=300)
    stats_logger.commit(11, STATS)
    stats_logger.close()
    expected = {key: value for key, value in STATS.items() if not key.endswith("__count")}
    assert step_stats(run_db) == [(11, expected)]
    assert tracker.logged == [(11, expected)]


def test_debug_level_shows_the_whole_table(run_db, caplog):
    with caplog.at_level(logging.DEBUG, "areal"):
        StatsLogger(run_db, total_steps=300).commit(11, STATS)
    assert "update/ratio/avg" in caplog.messages[-1] and "1.01" in caplog.messages[-1]


def test_close_closes_trackers_once(run_db):
    tracker = ListTracker()
    stats_logger = StatsLogger(run_db, [in_thread(tracker)], total_steps=1)
    stats_logger.close()
    stats_logger.close()
    assert tracker.closed == 1


class BrokenTracker(ListTracker):
    """Fails at what it is told to, in a new way every third time."""

    def __init__(self, *broken: str) -> None:
        super().__init__()
        self.broken = broken
        self.attempts = 0
        if "open" in broken:
            raise ConnectionRefusedError(111, "Connection refused")

    def log(self, step, stats) -> None:
        self.attempts += 1
        if "log" in self.broken:
            raise SystemExit(1) if self.attempts % 3 == 0 else ConnectionResetError("by peer")
        super().log(step, stats)

    def close(self) -> None:
        super().close()
        if "close" in self.broken:
            raise TimeoutError("no answer")


def commit_steps(stats_logger: StatsLogger, count: int) -> None:
    for step in range(count):
        stats_logger.commit(step, {"loss": 1.0})


@pytest.mark.parametrize("broken", ["open", "log", "close"])
def test_a_tracker_that_raises_is_warned_of_once_and_counted(run_db, caplog, broken):
    good = ListTracker()
    threads = [TrackerThread("broken", lambda: BrokenTracker(broken)), in_thread(good)]
    with caplog.at_level(logging.WARNING, "areal"):
        stats_logger = StatsLogger(run_db, threads, total_steps=9)
        commit_steps(stats_logger, 6)
        stats_logger.close()
    assert len(good.logged) == 6 and good.closed == 1
    assert len(step_stats(run_db)) == 6
    *warnings, summary = caplog.messages
    kinds = {
        "open": {"ConnectionRefusedError": 1},
        "log": {"ConnectionResetError": 4, "SystemExit": 2},
        "close": {"TimeoutError": 1},
    }[broken]
    assert len(warnings) == len(kinds)
    assert all(text.startswith("tracker broken: ") for text in warnings)
    shown = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
    assert summary == f"tracker broken is incomplete: {shown}"


def test_what_a_tracker_failed_at_is_a_statistic_of_the_step(run_db, caplog):
    tracker = TrackerThread("broken", lambda: BrokenTracker("log"))
    stats_logger = StatsLogger(run_db, [tracker], total_steps=2)
    stats_logger.commit(0, {"loss": 1.0})
    deadline = time.monotonic() + 300
    while not tracker.failures():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with caplog.at_level(logging.INFO, "areal"):
        stats_logger.commit(1, {"loss": 1.0})
    stats_logger.close()
    recorded = dict(step_stats(run_db))
    assert recorded[0] == {"loss": 1.0}
    failed = {"trackers/failed": 1.0, "trackers/failed/ConnectionResetError": 1.0}
    assert recorded[1] == {"loss": 1.0, **failed}
    assert "Step 2/2 | loss 1 | tracker errors 1 (ConnectionResetError)" in caplog.messages


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_a_tracker_that_hangs_holds_nobody_up(run_db, caplog, where):
    released = threading.Event()

    class Hanging(ListTracker):
        def __init__(self) -> None:
            super().__init__()
            self.hang("open")

        def hang(self, here: str) -> None:
            if where == here:
                assert released.wait(900)

        def log(self, step, stats) -> None:
            self.hang("log")

        def close(self) -> None:
            self.hang("close")

    stats_logger = StatsLogger(run_db, [TrackerThread("slow", Hanging)], total_steps=1200)
    tic = time.monotonic()
    with caplog.at_level(logging.WARNING, "areal"):
        commit_steps(stats_logger, 1200)
        stats_logger.close(timeout_s=0.5)
    assert time.monotonic() - tic < 60
    released.set()
    assert "tracker slow: it did not finish in time and is abandoned" in caplog.text
    full = "1000 steps are queued for it: new ones are dropped" in caplog.text
    assert full == (where in ("open", "log"))
    assert "tracker slow is incomplete: " in caplog.messages[-1]


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
