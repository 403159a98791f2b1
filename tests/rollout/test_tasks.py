"""Single rows beside the stream: order, bounds, rejections, failures, timeouts, the end."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from rollout_world import FakeWorkflow, open_world

from areal.rollout.tasks import TaskFailedError

SHARED = FakeWorkflow()


class Solver:
    async def run(self, data, **extra_kwargs):
        return 1.0


class Touching(FakeWorkflow):
    """Leaves a file behind when it is closed."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def close(self) -> None:
        (self.folder / "closed").touch()


def reject_two(group):
    return group["rewards"][0] != 2


def submit_rows(world, workflow, count, **options):
    return [world.executor.submit({"i": i}, workflow, **options) for i in range(count)]


def rewards(results):
    return [None if group is None else group["rewards"].tolist() for group in results]


def test_results_come_once_and_in_the_order_of_submission(tmp_path):
    with open_world(tmp_path) as world:
        slow_first = FakeWorkflow(act=lambda i, *_: (0.05 if i == 0 else 0.0, "ok"))
        assert submit_rows(world, slow_first, 4, group_size=2) == [0, 1, 2, 3]
        assert rewards(world.executor.wait(4)) == [[i, i] for i in range(4)]
        with pytest.raises(ValueError, match="wait for 1 tasks, 0 are submitted"):
            world.executor.wait(1)
        assert world.executor.submit({"i": 9}, slow_first) == 4
        assert world.ledger.balance()["total"] == 0


def test_none_is_a_rejection_by_workflow_or_filter(tmp_path):
    with open_world(tmp_path) as world:
        workflow = FakeWorkflow(act=lambda i, *_: (0.0, "none" if i == 1 else "ok"))
        path = f"{__name__}.reject_two"
        submit_rows(world, workflow, 4, should_accept_fn=path)
        assert rewards(world.executor.wait(4)) == [[0.0], None, None, [3.0]]


def test_a_failure_raises_in_the_wait_that_meets_it_and_the_others_stay(tmp_path):
    with open_world(tmp_path) as world:
        broken = FakeWorkflow(act=lambda i, *_: (0.0, ValueError("bad row") if i == 1 else "ok"))
        submit_rows(world, broken, 3)
        with pytest.raises(TaskFailedError, match="task 1 failed: ValueError: bad row") as caught:
            world.executor.wait(3)
        assert isinstance(caught.value.__cause__, ValueError)
        assert rewards(world.executor.wait(2)) == [[0.0], [2.0]]
        assert world.executor.stats()["retried/ValueError"] == 1, "it was tried again"
        task_id = world.executor.submit({"i": 0}, broken, task_id=1)
        with pytest.raises(TaskFailedError, match="task 1 failed"):
            world.executor.wait_for_task(task_id)


def test_one_task_is_waited_for_by_its_id(tmp_path):
    with open_world(tmp_path) as world:
        submit_rows(world, FakeWorkflow(), 2)
        task_id = world.executor.submit({"i": 7}, FakeWorkflow(), task_id=40)
        assert world.executor.submit({"i": 8}, FakeWorkflow()) == 41
        with pytest.raises(ValueError, match="task_id: 40 is submitted"):
            world.executor.submit({"i": 7}, FakeWorkflow(), task_id=40)
        assert rewards([world.executor.wait_for_task(task_id)]) == [[7.0]]
        with pytest.raises(ValueError, match="40 is not submitted, or was waited for already"):
            world.executor.wait_for_task(40)
        assert rewards(world.executor.wait(3)) == [[0.0], [1.0], [8.0]]


def test_a_timeout_loses_nothing(tmp_path):
    with open_world(tmp_path) as world:
        task_id = world.executor.submit({"i": 5}, FakeWorkflow(act=lambda *_: (0.3, "ok")))
        with pytest.raises(TimeoutError, match="within 0.01 s: 1 tasks run, 0 are queued"):
            world.executor.wait(1, timeout=0.01)
        assert world.executor.wait(1, timeout=0.01, raise_timeout=False) == []
        assert world.executor.wait_for_task(task_id, timeout=0.01, raise_timeout=False) is None
        assert rewards([world.executor.wait_for_task(task_id)]) == [[5.0]]


def test_without_a_timeout_the_longest_time_without_a_result_bounds_the_wait(tmp_path):
    with open_world(tmp_path, timeout_s=0.1) as world:
        world.executor.submit({"i": 0}, FakeWorkflow(act=lambda *_: (3600.0, "ok")))
        with pytest.raises(TimeoutError, match="no result within 0.1 s"):
            world.executor.wait(1)


def test_no_more_run_at_once_than_allowed(tmp_path):
    with open_world(tmp_path, max_concurrent=3) as world:
        submit_rows(world, FakeWorkflow(act=lambda *_: (0.002, "ok")), 10, group_size=2)
        world.executor.wait(10)
        assert world.engine.most_in_flight == 3 * 2


def test_a_paused_executor_starts_nothing(tmp_path):
    with open_world(tmp_path) as world:
        world.executor.pause()
        task_id = world.executor.submit({"i": 5}, FakeWorkflow())
        with pytest.raises(TimeoutError, match="1 are queued.*paused"):
            world.executor.wait_for_task(task_id, timeout=0.05)
        world.executor.resume()
        assert rewards([world.executor.wait_for_task(task_id)]) == [[5.0]]


def test_a_workflow_built_for_one_row_is_closed_after_it(tmp_path):
    with open_world(tmp_path) as world:
        for workflow in (Touching, f"{__name__}.Touching"):
            world.executor.submit({"i": 1}, workflow, {"folder": str(tmp_path)})
            assert rewards(world.executor.wait(1)) == [[1.0]]
            (tmp_path / "closed").unlink()
        for shared in (SHARED, f"{__name__}.SHARED"):
            world.executor.submit({"i": 1}, shared)
            assert rewards(world.executor.wait(1)) == [[1.0]]
        assert len(SHARED.attempts) == 2
        with pytest.raises(ValueError, match="do not fit Touching"):
            world.executor.submit({"i": 1}, Touching)
        with pytest.raises(ValueError, match="built already"):
            world.executor.submit({"i": 1}, FakeWorkflow(), {"folder": "x"})
        with pytest.raises(ValueError, match="workflow: .* is neither a RolloutWorkflow"):
            world.executor.submit({"i": 1}, dict)
        with pytest.raises(ValueError, match="wrap an agent with"):
            world.executor.submit({"i": 1}, Solver)


def test_close_wakes_a_waiter_and_ends_what_runs(tmp_path):
    raised = []
    with open_world(tmp_path, max_concurrent=1) as world:
        submit_rows(world, FakeWorkflow(act=lambda *_: (3600.0, "ok")), 2)

        def wait():
            with pytest.raises(RuntimeError, match="closed") as caught:
                world.executor.wait(1)
            raised.append(caught)

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.05)
        world.executor.close()
        waiter.join(5.0)
        assert raised and world.engine.in_flight == 0
        with pytest.raises(RuntimeError, match="closed"):
            world.executor.submit({"i": 0}, FakeWorkflow())


def test_an_evaluation_does_not_outlive_the_executor(tmp_path):
    with open_world(tmp_path) as world:
        threading.Timer(0.05, world.executor.close).start()
        with pytest.raises(RuntimeError, match="closed"):
            world.executor.rollout_batch([{"i": 0}], FakeWorkflow(act=lambda *_: (3600.0, "ok")))


def test_an_evaluation_reads_its_rows_as_it_goes(tmp_path):
    read, read_at_start = [], {}

    class Rows(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    def act(task_id, sample, attempt):
        read_at_start[task_id] = len(read)
        return 0.0, "ok"

    with open_world(tmp_path, max_concurrent=2) as world:
        rows = Rows([{"i": i} for i in range(12)])
        results = world.executor.rollout_batch(rows, FakeWorkflow(act=act))
    assert rewards(results) == [[float(i)] for i in range(12)]
    assert read == list(range(12))
    assert read_at_start[0] <= 4, "no row had ended: twice as many as run at once"
