"""Scopes, denominators, every reduce type, threads, and the reduction over ranks."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from areal.utils import stats_tracker
from areal.utils.stats_tracker import ReduceType, StatsTracker

MASK = torch.tensor([True, True, False, True])
VALUES = torch.tensor([1.0, 2.0, 100.0, 6.0])


def test_default_reduction_counts_only_the_mask():
    tracker = StatsTracker()
    tracker.denominator(n=MASK)
    tracker.stat(denominator="n", x=VALUES)
    assert tracker.export() == {"n": 3.0, "x/avg": 3.0, "x/max": 6.0, "x/min": 1.0}


@pytest.mark.parametrize(
    ("reduce_type", "expected"),
    [
        (ReduceType.AVG, 3.0),
        (ReduceType.SUM, 9.0),
        (ReduceType.MIN, 1.0),
        (ReduceType.MAX, 6.0),
    ],
)
def test_single_reductions_keep_the_plain_key(reduce_type, expected):
    tracker = StatsTracker()
    tracker.denominator(n=MASK)
    tracker.stat("n", reduce_type, x=VALUES)
    assert tracker.export(key="x") == {"x": expected}


def test_average_weighs_entries_not_calls():
    tracker = StatsTracker()
    for values in ([1.0], [4.0, 4.0, 7.0]):
        tracker.denominator(n=torch.ones(len(values), dtype=torch.bool))
        tracker.stat("n", x=torch.tensor(values))
    assert tracker.export() == {"n": 4.0, "x/avg": 4.0, "x/max": 7.0, "x/min": 1.0}


def test_nan_outside_the_mask_does_not_leak():
    tracker = StatsTracker()
    tracker.denominator(n=MASK)
    tracker.stat("n", x=torch.tensor([1.0, 2.0, float("nan"), 6.0]))
    assert tracker.export()["x/avg"] == 3.0


def test_nothing_counted_gives_no_mean_but_a_zero_denominator():
    tracker = StatsTracker()
    tracker.denominator(n=torch.zeros(3, dtype=torch.bool), m=torch.zeros(0, dtype=torch.bool))
    tracker.stat("n", x=torch.ones(3))
    tracker.stat("m", y=torch.ones(0))
    assert tracker.export() == {"n": 0.0, "m": 0.0}


def test_scopes_nest_and_stat_finds_the_nearest_denominator():
    tracker = StatsTracker()
    with tracker.scope("outer"):
        tracker.denominator(n=torch.tensor([True, False]))
        with tracker.scope("inner"):
            tracker.stat("n", ReduceType.AVG, x=torch.tensor([5.0, 9.0]))
            tracker.denominator(n=torch.tensor([False, True]))
            tracker.stat("n", ReduceType.AVG, y=torch.tensor([5.0, 9.0]))
    exported = tracker.export(key="outer/inner")
    assert exported == {"outer/inner/n": 1.0, "outer/inner/x": 5.0, "outer/inner/y": 9.0}
    assert tracker.export() == {"outer/n": 1.0}


def test_scalar_mean_and_count():
    tracker = StatsTracker()
    tracker.scalar(lr=1.0, loss=2.0)
    tracker.scalar(lr=3.0)
    assert tracker.export() == {"lr": 2.0, "lr__count": 2.0, "loss": 2.0, "loss__count": 1.0}


def test_timing_ignores_the_scope_and_survives_an_exception():
    tracker = StatsTracker()
    with pytest.raises(KeyError), tracker.scope("update"), tracker.record_timing("step"):
        raise KeyError
    exported = tracker.export()
    assert exported["timeperf/step__count"] == 1.0
    assert 0 <= exported["timeperf/step"] < 5


def test_export_resets_unless_told_otherwise():
    tracker = StatsTracker()
    tracker.scalar(x=1.0)
    assert tracker.export(reset=False) == tracker.export()
    assert tracker.export() == {}


def test_key_selects_whole_path_segments():
    tracker = StatsTracker()
    tracker.scalar(**{"a/x": 1.0, "ab/x": 2.0})
    assert tracker.export(key="a") == {"a/x": 1.0, "a/x__count": 1.0}


def test_named_trackers_are_shared_and_prefix_their_keys():
    stats_tracker.get("test-named").scalar(reward=0.5)
    assert stats_tracker.get("test-named").export() == {
        "test-named/reward": 0.5,
        "test-named/reward__count": 1.0,
    }
    stats_tracker.get("test-named").scalar(reward=0.5)
    stats_tracker.scalar(plain=2.0)
    exported = stats_tracker.export_all()
    assert exported["test-named/reward"] == 0.5
    assert exported["plain"] == 2.0


def test_scopes_of_concurrent_tasks_do_not_mix():
    tracker = StatsTracker()

    async def record(name: str) -> None:
        with tracker.scope(name):
            await asyncio.sleep(0)
            tracker.scalar(x=1.0)

    async def main() -> None:
        await asyncio.gather(*(record(f"task{i}") for i in range(4)))

    asyncio.run(main())
    assert [key for key in tracker.export() if key.endswith("x")] == [
        f"task{i}/x" for i in range(4)
    ]


def test_threads_lose_nothing():
    tracker = StatsTracker()

    def record() -> None:
        for _ in range(200):
            tracker.scalar(x=1.0)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracker.export()["x__count"] == 800.0


def test_large_float_sums_stay_exact():
    tracker = StatsTracker()
    tracker.denominator(n=torch.ones(3, dtype=torch.bool))
    tracker.stat("n", ReduceType.SUM, x=torch.tensor([2.0**25, 1.0, 1.0]))
    assert tracker.export()["x"] == 2.0**25 + 2


def test_errors_name_the_statistic():
    tracker = StatsTracker()
    with pytest.raises(ValueError, match="no denominator n has been recorded"):
        tracker.stat("n", x=VALUES)
    with pytest.raises(ValueError, match="n must be a bool tensor, got torch.float32"):
        tracker.denominator(n=VALUES)
    tracker.denominator(n=MASK)
    with pytest.raises(ValueError, match=r"stat x has shape \(2,\)"):
        tracker.stat("n", x=torch.ones(2))
    tracker.scalar(y=1.0)
    with pytest.raises(ValueError, match="y was recorded as scalar and now as avg"):
        tracker.stat("n", ReduceType.AVG, y=VALUES)
    with pytest.raises(ValueError, match="plain numbers with scalar"):
        tracker.stat("n", ReduceType.SCALAR, z=VALUES)


def test_reduction_over_ranks_tolerates_missing_keys():
    exported = run_ranks(2, "utils.test_stats_tracker:export_on_rank")
    assert exported[0] == exported[1]
    assert exported[0] == {
        "n": 4.0,
        "x/avg": 2.5,
        "x/min": 0.0,
        "x/max": 8.0,
        "only": 7.0,
        "only__count": 1.0,
    }


def export_on_rank():
    rank, tracker = dist.get_rank(), StatsTracker()
    tracker.denominator(n=torch.ones(3 - 2 * rank, dtype=torch.bool))
    tracker.stat("n", x=torch.tensor([0.0, 1.0, 1.0] if rank == 0 else [8.0]))
    if rank == 0:
        tracker.scalar(only=7.0)
    return tracker.export(reduce_group=dist.group.WORLD)
