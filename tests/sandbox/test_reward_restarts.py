"""When the next worker starts, by hand: no clock but the numbers here."""

from __future__ import annotations

import errno
import signal

import pytest

from areal.sandbox.restarts import GIVE_UP_S, Restarts, is_from_outside, is_passing
from areal.utils.child_process import RestartBudget


def test_the_first_death_costs_nothing_and_the_next_ones_more_each():
    restarts, now, delays = Restarts(RestartBudget(3)), 100.0, []
    for _ in range(10):
        restarts.on_death(now)
        delays.append(restarts.delay_s(now))
        now += delays[-1]
    assert delays == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
    restarts.on_returned()
    restarts.on_death(now)
    assert restarts.delay_s(now) == 0.0


def test_one_blow_that_ends_all_workers_is_one_death_too_many_at_most():
    restarts = Restarts(RestartBudget(3))
    for _ in range(64):
        restarts.on_death(100.0)
    assert restarts.delay_s(100.0) == pytest.approx(0.1)


def test_starts_that_fail_by_themselves_are_counted():
    restarts = Restarts(RestartBudget(3))
    found = [restarts.on_failed_start(float(i), from_outside=False) for i in range(4)]
    assert found == [False, False, False, True]
    assert not restarts.on_failed_start(5.0, from_outside=False), "a new call has its own chance"


def test_starts_that_something_outside_ends_have_time_and_not_for_ever():
    restarts = Restarts(RestartBudget(0))
    assert not any(restarts.on_failed_start(float(t), from_outside=True) for t in range(100))
    restarts.on_ready()
    assert not restarts.on_failed_start(200.0, from_outside=True)
    assert not restarts.on_failed_start(200.0 + GIVE_UP_S, from_outside=True)
    assert restarts.on_failed_start(201.0 + GIVE_UP_S, from_outside=True)


def test_who_ended_it():
    assert is_from_outside(-signal.SIGKILL) and is_from_outside(-signal.SIGTERM)
    for code in (0, 1, None, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
        assert not is_from_outside(code)
    assert is_passing(OSError(errno.EAGAIN, "")) and not is_passing(OSError(errno.ENOENT, ""))
