"""The scheduler contract: what a job may say, and what an error tells."""

from __future__ import annotations

import pytest

from areal.api.scheduler_api import (
    Job,
    SchedulerError,
    SchedulingSpec,
    SchedulingStrategy,
    WorkerTimeoutError,
)


def test_one_spec_serves_all_workers_or_each_has_its_own():
    shared = Job(role="actor", replicas=3, tasks=[SchedulingSpec(gpu=1)])
    assert [shared.spec_of(i).gpu for i in range(3)] == [1, 1, 1]
    own = Job(role="actor", replicas=2, tasks=[SchedulingSpec(gpu=1), SchedulingSpec(gpu=2)])
    assert [own.spec_of(i).gpu for i in range(2)] == [1, 2]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Job(role="actor", replicas=0), "job actor: replicas must be at least 1, got 0"),
        (
            lambda: Job(role="actor", replicas=3, tasks=[SchedulingSpec()] * 2),
            "tasks must have 1 or 3 entries, got 2",
        ),
        (lambda: SchedulingStrategy(type="colocation"), "colocation needs target"),
        (lambda: SchedulingStrategy(target="actor"), "separation has none"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_an_error_names_the_worker():
    error = WorkerTimeoutError("rollout/1", "not ready after 300 s")
    assert isinstance(error, SchedulerError) and isinstance(error, RuntimeError)
    assert str(error) == "rollout/1: not ready after 300 s"
    assert (error.worker, error.reason) == ("rollout/1", "not ready after 300 s")
