"""Every stage of a start is a line with its time, a movement, and named while it lasts."""

from __future__ import annotations

import gc
import importlib
import logging
import time

import pytest

from areal.utils import startup, waits
from areal.utils.startup import stage


def test_a_line_with_its_time(caplog):
    with caplog.at_level(logging.INFO, logger="areal"), stage("data set numbers"):
        assert any("data set numbers" in line for line in waits.describe())
    assert caplog.records[-1].getMessage().startswith("data set numbers: 0.")
    assert waits.quiet_s() < 1


def test_a_stage_that_fails_has_no_such_line(caplog):
    caplog.set_level(logging.INFO, logger="areal")
    with pytest.raises(KeyError), stage("data set numbers"):
        raise KeyError
    assert not caplog.records


def test_nothing_need_move_before_its_own_deadline():
    with stage("a server", limit_s=1000):
        time.sleep(0.05)
        assert waits.quiet_s() == 0
    time.sleep(0.05)
    assert waits.quiet_s() > 0


def test_deadlines_nest():
    with waits.allowed(1000):
        with waits.allowed(0.001):
            time.sleep(0.05)
            assert waits.quiet_s() == 0
        assert waits.quiet_s() == 0


def test_another_process_reads_the_clock():
    with waits.share_clock() as file:
        clock = waits.open_clock(file.fileno())
        waits.progress()
        assert clock.quiet_s() < 5
        time.sleep(0.05)
        assert clock.quiet_s() >= 0.05
        with waits.allowed(10):
            assert clock.quiet_s() == 0


def test_a_long_stage_is_reported_while_it_lasts(caplog):
    done = startup.threading.Event()
    with caplog.at_level(logging.INFO, logger="areal"):
        reporter = startup.threading.Thread(
            target=startup._report, args=("a server", time.monotonic() - 9.95, done, 0.05)
        )
        reporter.start()
        while not caplog.records:
            time.sleep(0.01)
        done.set()
        reporter.join()
    assert "a server: 10 s so far" in caplog.text


def test_what_was_imported_is_never_looked_at_by_the_collector():
    gc.unfreeze()
    before = gc.get_freeze_count()
    with startup.importing():
        assert not gc.isenabled()
        importlib.import_module("wave")
    assert gc.isenabled() and gc.get_freeze_count() > before
    gc.unfreeze()
    with pytest.raises(ImportError), startup.importing():
        importlib.import_module("no_such_module_anywhere")
    assert gc.isenabled()
    gc.unfreeze()
