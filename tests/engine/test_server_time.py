"""The time of inference servers by cause."""

from __future__ import annotations

import random
import time

import pytest

from areal.engine.server_time import BusyIntervals, InFlight, IntervalUnion, ServerTimes

CAUSES = ("busy_s", "no_request_s", "paused_s", "offloaded_s", "control_s")


def test_busy_intervals_merge_and_resume():
    busy = BusyIntervals()
    for start, end in [(1.0, 1.1), (1.102, 1.2), (1.3, 1.4)]:
        busy.add(start, end)
    assert busy.since(0) == [(1.0, 1.2), (1.3, 1.4)]
    assert busy.since(1.15) == [(1.15, 1.2), (1.3, 1.4)]
    busy.add(1.4, 1.5)
    assert busy.since(1.4) == [(1.4, 1.5)]


def test_a_union_counts_each_moment_once_in_any_order():
    union = IntervalUnion()
    for start, end in [(5, 6), (1, 2), (1.5, 3), (0, 0.5), (2, 5), (4, 4), (9, 7)]:
        union.add(start, end)
    assert union.total_s == pytest.approx(0.5 + 5)
    assert union.since(2) == [(2, 6)] and union.since(0) == [(0, 0.5), (1, 6)]
    assert union.since(6) == []


def test_a_union_of_many_intervals_is_that_of_their_moments():
    draw, union, moments = random.Random(3), IntervalUnion(), set()
    for _ in range(300):
        start = draw.randrange(2000)
        end = start + draw.randrange(1, 12)
        union.add(start, end)
        moments |= set(range(start, end))
    assert union.total_s == pytest.approx(len(moments))


def test_requests_are_in_flight_from_the_first_to_the_last():
    """Also those that run on are told of, and nothing twice."""
    in_flight = InFlight()
    began = time.time()
    with in_flight.request("a"):
        with in_flight.request("a"), in_flight.request("b"):
            (first,) = in_flight.take()["a"]
        (rest,) = in_flight.take()["a"]
        assert in_flight.take().keys() == {"a"}
    ended = time.time()
    assert began <= first[0] <= first[1] == rest[0] <= rest[1] <= ended
    assert in_flight.take().keys() == {"a"} and in_flight.take() == {}


def test_every_moment_of_a_server_has_one_cause():
    """Ten seconds of two servers: weights are loaded from 2 to 4, both are paused from 3 to 5, and
    the first has requests from 1 to 3 and from 4 to 8."""
    times = ServerTimes()
    times.follow(["a", "b"])
    zero = time.time() + 0.0
    before = times.stats()
    times.add_busy({"a": [(zero + 4, zero + 8), (zero + 1, zero + 3)], "unknown": [(0.0, zero)]})
    times.add("paused", zero + 3, zero + 5)
    times.add("control", zero + 2, zero + 4)
    found = times.stats()
    gained = {name: found[name] - before[name] for name in CAUSES}
    assert gained["control_s"] == pytest.approx(2 * 2)
    assert gained["paused_s"] == pytest.approx(2 * 1)
    assert gained["busy_s"] == pytest.approx(1 + 3)
    assert gained["offloaded_s"] == 0
    assert times.busy_since(zero + 2) == {
        "a": [(zero + 2, zero + 3), (zero + 4, zero + 8)],
        "b": [],
    }


def test_causes_that_go_on_add_up_to_the_time_that_passed():
    times = ServerTimes()
    latest = time.time()
    times.follow(["a"])
    earliest = time.time()
    times.begin("paused")
    with times.in_flight.request("a"):
        time.sleep(0.02)
        assert times.stats()["busy_s"] < times.stats()["paused_s"]
        times.end("paused")
        paused = times.stats()["paused_s"]
        times.begin("offloaded")
        time.sleep(0.02)
        times.end("offloaded")
        time.sleep(0.02)
    least = time.time() - earliest
    found = times.stats()
    most = time.time() - latest
    assert found["paused_s"] == paused > 0
    assert found["offloaded_s"] > 0 and found["busy_s"] > 0
    assert least - 1e-3 <= sum(found[name] for name in CAUSES) <= most + 1e-3


def test_the_time_of_a_server_begins_when_it_comes():
    times = ServerTimes()
    times.follow(["a"])
    long_ago = time.time() - 1000
    times.add_busy({"a": [(long_ago, long_ago + 500)]})
    times.add("control", long_ago, long_ago + 500)
    assert sum(times.stats().values()) < 500
    times.follow([])
    assert sum(times.stats().values()) == 0
