"""TrainController over real processes: what the marks mean, and what becomes of failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from infra.toy_engine import ToyContract

from areal.api.alloc_mode import ParallelStrategy
from areal.api.scheduler_api import (
    GPUAllocationError,
    Job,
    SchedulingSpec,
    SchedulingStrategy,
    WorkerFailedError,
    WorkerTimeoutError,
)
from areal.infra.scheduler.local import LocalScheduler
from areal.infra.train_controller import TrainController
from areal.utils import stats_tracker
from areal.utils.threads import in_thread

TOY = "infra.toy_engine.ToyEngine"
BATCH = {
    "attention_mask": torch.arange(6) < torch.tensor([6, 1, 2, 5, 3])[:, None],
    "values": torch.arange(10.0).view(5, 2),
}


@pytest.fixture
def scheduler(tmp_path):
    scheduler = LocalScheduler(tmp_path, gpus=[])
    yield scheduler
    scheduler.delete_workers()


def open_toys(scheduler, *args, role="actor", replicas=2, target=None, **options):
    strategy = SchedulingStrategy("colocation" if target else "separation", target)
    job = Job(role=role, replicas=replicas, scheduling_strategy=strategy)
    return TrainController(
        scheduler, job, TOY, ParallelStrategy(), *args, contract=ToyContract, **options
    )


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_marks_statistics_and_errors_of_the_engine(scheduler):
    toys = open_toys(scheduler, 2, replicas=3)  # rank 2 computes the same rows as rank 0
    assert torch.equal(toys.double(BATCH), BATCH["values"] * 2)
    with stats_tracker.scope("outer"), stats_tracker.scope("inner"):
        assert toys.count(BATCH) in (2, 3)
    stats = stats_tracker.export("outer")
    assert stats["outer/inner/rows"] == 5  # the rows of rank 2 are not counted again
    assert stats["outer/inner/tokens/avg"] == pytest.approx(17 / 5)
    assert (stats["outer/inner/tokens/min"], stats["outer/inner/tokens/max"]) == (1, 6)
    one_row = {"attention_mask": torch.ones(1, 3, dtype=torch.bool), "values": torch.ones(1, 2)}
    assert toys.double(one_row).shape == (1, 2)  # a place without rows has nothing to add
    with pytest.raises(ValueError, match="5 rows, which do not make units of 2"):
        toys.count(BATCH, rows_per_unit=2)
    assert toys.rank() == 0
    with pytest.raises(AttributeError, match="data_parallel_rank is no call that reaches"):
        _ = toys.data_parallel_rank
    # All ranks have answered, so the world is whole: the error is raised and work goes on.
    with pytest.raises(KeyError, match="rank 1 has had enough") as caught:
        toys.fail([1])
    assert "actor/1: Traceback" in caught.value.__notes__[0]
    assert toys.rank() == 0

    # A function that a call returned runs on the ranks, beside the calls that follow.
    first = toys.later()
    waiting = in_thread("held", first, 2.0, -1)
    assert toys.rank() == 0 and not waiting.done()
    waiting.result(300)
    with pytest.raises(KeyError, match="rank 2 has had enough"):
        toys.later()(0.0, 2)

    shared = open_toys(scheduler, role="ref", replicas=3, target="actor")
    assert shared.pid() == toys.pid()
    shared.destroy()
    assert toys.rank() == 0
    pid = toys.pid()
    toys.destroy()
    toys.destroy()
    assert not is_alive(pid)


def test_a_rank_that_dies_is_named_and_the_others_are_ended(scheduler):
    toys = open_toys(scheduler)
    guest = open_toys(scheduler, role="ref", target="actor")
    pid = toys.pid()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerFailedError, match=r"actor/0: .*ended by signal SIGKILL"):
        toys.rank()
    with pytest.raises(RuntimeError, match="workers of actor have ended"):
        toys.rank()
    guest.destroy()
    toys.destroy()


def test_a_rank_that_waits_for_a_failed_one_is_ended(scheduler):
    """With the processes, whoever shares them."""
    host, guest = open_toys(scheduler), open_toys(scheduler, role="ref", target="actor")
    pid = host.pid()
    start = time.monotonic()
    with pytest.raises(KeyError, match="rank 1 has had enough"):
        guest.fail([1], seconds=600.0)
    assert time.monotonic() - start < 60 and not is_alive(pid)
    guest.destroy()
    host.destroy()


def test_a_call_has_a_deadline(scheduler):
    toys = open_toys(scheduler, replicas=1, request_timeout_s=0.5)
    pid = toys.pid()
    with pytest.raises(WorkerTimeoutError, match=r"actor/0: sleep: no answer within 0\.5 s"):
        toys.sleep(600.0)
    assert not is_alive(pid)


CTRL_C = """
import signal
import tempfile
from pathlib import Path
from infra.test_train_controller import open_toys
from areal.infra.scheduler.local import LocalScheduler

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
toys = open_toys(LocalScheduler(Path(tempfile.mkdtemp()), gpus=[]), replicas=1)
print(toys.pid(), flush=True)
try:
    toys.sleep(600.0)
finally:
    if CLEANS_UP:
        toys.destroy()
"""


@pytest.mark.parametrize("cleans_up", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ctrl_c_ends_everything_while_a_rank_is_busy(tmp_path, cleans_up):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", CTRL_C.replace("CLEANS_UP", str(cleans_up))]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        pid = int(run.stdout.readline())
        run.send_signal(signal.SIGINT)
        try:
            assert b"KeyboardInterrupt" in run.communicate(timeout=900)[1]
        finally:
            run.kill()
    deadline = time.monotonic() + 300
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)


def test_what_cannot_start_says_why(scheduler, tmp_path):
    with pytest.raises(ValueError, match="greeting must be polite"):
        open_toys(scheduler, replicas=1, greeting="refuse")
    few = LocalScheduler(tmp_path, gpus=["0"])
    with pytest.raises(GPUAllocationError, match="actor: needs 2 GPUs and 1 are free"):
        open_toys(few, replicas=2)
    open_toys(few, role="critic", replicas=1)
    assert few.gpus_of("critic") == ["0"] and few.take_free_gpus(1) is None
    few.delete_workers()
    spec = SchedulingSpec(env_vars={"PYTHONHOME": "/nowhere", "PYTHONPATH": ""})
    job = Job(role="lost", replicas=1, tasks=[spec])
    with pytest.raises(WorkerFailedError, match=r"lost/0.*exit code 1(.|\n)*encodings"):
        TrainController(scheduler, job, TOY, ParallelStrategy(), contract=ToyContract)


@pytest.mark.slow
def test_ray_workers_fail_by_name_too():
    ray = pytest.importorskip("ray", reason="scheduler.type=ray needs the extra `ray`")
    from areal.infra.scheduler.ray import RayScheduler

    scheduler = RayScheduler(placement="SPREAD")
    try:
        toys = open_toys(scheduler)
        assert torch.equal(toys.double(BATCH), BATCH["values"] * 2)
        with pytest.raises(KeyError, match="rank 1 has had enough"):
            toys.fail([1])
        os.kill(toys.pid(), signal.SIGKILL)
        with pytest.raises(WorkerFailedError, match="actor/0: "):
            toys.rank()
        toys.destroy()
        slow = open_toys(scheduler, role="slow", replicas=1, request_timeout_s=1.0)
        with pytest.raises(WorkerTimeoutError, match=r"slow/0: sleep: no answer within 1 s"):
            slow.sleep(600.0)
        with pytest.raises(GPUAllocationError, match="9999 workers need 9999 CPUs"):
            open_toys(scheduler, role="many", replicas=9999)
    finally:
        ray.shutdown()
