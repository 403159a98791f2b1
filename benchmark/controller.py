"""What one controller carries: concurrent episodes and finished samples per second.

    python benchmark/controller.py [--seconds 10] [--workers 0 1] [--json report.json]

Real: WorkflowExecutor, staleness gate, groups of 8, run database with ledger and trajectories, the
native HTTP client, and a trainer thread that takes every batch, books it and publishes a version.
Stand-ins: the model (generation_stand_in.py, a process of its own: answers of 256 tokens after a
drawn time) and the optimizer (no time at all). Rewards are numbers, without a reward process.

| load      | offered                                                                          |
|-----------|----------------------------------------------------------------------------------|
| `aim`     | 10,000 episodes in groups that last 5 s in the mean: 2,000 samples a second      |
| `wide`    | 40,000 episodes, groups of 20 s: as many samples, four times the episodes        |
| `full`    | 10,000 episodes, groups of 0.5 s: more than it can carry, which is its limit     |

With `--workers N` the episodes run in that many processes (`rollout.workers`), which then hold the
client and the workflow; the figures are still those of the controller's event loop.

`samples` are finished and trained ones per second; `cpu` is what one sample costs the event loop's
thread, which other programs on the machine change little; `lag` is how late the event loop runs a
timer; the shares are of the event loop's busy time. The best of `--repeats` runs counts. Where
`load_average` tells of other programs, samples and lag say little, `cpu` still much.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from report import Row, print_table, write_json
from stack_samples import StackSampler

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest, WeightUpdateMeta
from areal.api.scheduler_api import Job, SchedulingSpec
from areal.api.workflow_api import GroupResult, RolloutWorkflow
from areal.api.workflow_context import workflow_context
from areal.engine.remote.engine import RemoteEngine
from areal.engine.remote.native import NativeRemoteEngine
from areal.infra.scheduler.local import LocalScheduler
from areal.rollout.event_loop import TaskRunner, tune_gc
from areal.rollout.executor import WorkflowExecutor
from areal.rollout.failures import FailureLimits
from areal.rollout.ledger import Ledger
from areal.rollout.source import PromptSource
from areal.rollout.staleness import StalenessManager
from areal.rollout.worker import WorkflowRecipe
from areal.rollout.workers import RolloutWorkers
from areal.run.database import RunDatabase
from areal.utils.child_process import ChildProcess
from areal.workflow.transcript import Transcript, group_trajectory

GROUP_SIZE = 8
BATCH_SIZE = 128  # groups of one step: 1,024 samples
PROMPT_TOKENS = 128

PARTS = {
    "idle": ("selectors.py:select",),
    "encode": ("rollout/trajectory.py:encode",),
    "ledger": ("rollout/ledger.py", "run/database.py"),
    "checks": ("rollout/trajectory.py", "rollout/buffer.py"),
    "grouping": ("rollout/group.py", "utils/data.py", "api/workflow_context.py"),
    "executor": ("rollout/",),
    "workflow": ("workflow/", "benchmark/controller.py"),
    "client": ("engine/remote/", "engine/native/", "/aiohttp/"),
    "event_loop": ("/asyncio/",),
}


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    episodes: int
    group_s: float  # how long a group lasts, in the mean

    @property
    def mean_s(self) -> float:
        """Of one episode: the longest of n uniform times is 2n / (n + 1) of their mean."""
        return self.group_s * (GROUP_SIZE + 1) / (2 * GROUP_SIZE)


LOADS = (Load("aim", 10_000, 5.0), Load("wide", 40_000, 20.0), Load("full", 10_000, 0.5))


class OneReply(RolloutWorkflow):
    """A prompt, a reply, a trajectory: `rlvr` without tokenizer and reward process."""

    def __init__(self) -> None:
        self._gconfig = GenerationHyperparameters(max_new_tokens=256)

    async def arun_episode(self, engine, data):
        transcript = Transcript([data["i"] % 1000] * PROMPT_TOKENS)
        gconfig = self._gconfig.new(seed=workflow_context.next_seed())
        reply = await engine.agenerate(ModelRequest(input_ids=transcript.ids, gconfig=gconfig))
        transcript.add_reply(reply)
        return transcript.trajectory(float(data["i"] % 2))

    async def arun_group(self, engine, data, num_samples):
        prompt = [data["i"] % 1000] * PROMPT_TOKENS
        request = ModelRequest(input_ids=prompt, gconfig=self._gconfig)
        samples = await engine.agenerate_group(request, workflow_context.next_seeds(num_samples))
        failures = {i: one for i, one in enumerate(samples) if isinstance(one, Exception)}
        if failures:
            return GroupResult(None, failures)  # all are needed: nothing fails here
        return GroupResult(group_trajectory(prompt, samples, [float(data["i"] % 2)] * num_samples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="least measured part of a run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=[load.name for load in LOADS])
    parser.add_argument("--workers", type=int, nargs="*", default=[0], help="processes, to compare")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of episodes")
    parser.add_argument("--json", help="also write the report to this file")
    args = parser.parse_args()
    rows: list[Row] = []
    for load in LOADS:
        if args.only in (None, load.name):
            scaled = replace(load, episodes=int(load.episodes * args.scale))
            for workers in args.workers:
                runs = [measure(scaled, args.seconds, workers) for _ in range(args.repeats)]
                rows += max(runs, key=lambda run: run[0].value)
    rows.append(Row("load_average", os.getloadavg()[0], "of the last minute; this alone: 2 to 3"))
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def measure(load: Load, seconds: float, workers: int) -> list[Row]:
    with ExitStack() as stack:
        controller = Controller(load, workers, stack)
        # Until the first answers have been replaced by others, the load is not the one that lasts.
        controller.train(until=time.monotonic() + max(2.0, 1.2 * load.group_s))
        # Groups that started together end together, for many rounds: only whole rounds say enough.
        seconds = load.group_s * math.ceil(seconds / load.group_s)
        with StackSampler(controller.loop_thread_id, PARTS) as sampler:
            probe = controller.start_probe()
            cpu_began = controller.loop_cpu_s()
            began, before = time.monotonic(), controller.num_samples
            controller.train(until=began + seconds)
            wall_s = time.monotonic() - began
            cpu_s = controller.loop_cpu_s() - cpu_began
        samples = controller.num_samples - before
        lags_ms = 1e3 * np.array(probe.lags_s)
        in_flight = GROUP_SIZE * np.array(probe.running)
    rows = {
        "samples": (samples / wall_s, "samples/s"),
        "episodes": (float(in_flight.mean()), "in groups that run, mean"),
        "cpu": (1e6 * cpu_s / max(1, samples), "us of the loop's thread per sample"),
        "lag_p50": (float(np.percentile(lags_ms, 50)), "ms"),
        "lag_p99": (float(np.percentile(lags_ms, 99)), "ms"),
    } | {f"share_{part}": (share, "of busy") for part, share in sampler.shares().items()}
    name = load.name if workers == 0 else f"{load.name}_{workers}_workers"
    return [Row(f"{name}_{row}", value, unit) for row, (value, unit) in rows.items()]


class Probe:
    """Every 20 ms on the event loop: how late it is, and how many groups run."""

    def __init__(self, gate: StalenessManager) -> None:
        self.lags_s: list[float] = []
        self.running: list[int] = []
        self._gate = gate

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + 0.02
            await asyncio.sleep(0.02)
            self.lags_s.append(time.perf_counter() - due)
            self.running.append(self._gate.get_stats().running)


class Controller:
    """The rollout side of a run, and a trainer that needs no time to train.

    `publish(version)` makes the weights of `version` serve, by default by a call of the engine.
    """

    def __init__(
        self,
        load: Load,
        num_workers: int,
        stack: ExitStack,
        engine: RemoteEngine | None = None,
        publish: Callable[[int], None] | None = None,
    ) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        database = stack.enter_context(RunDatabase(Path(folder) / "run.db"))
        self.ledger = Ledger(database)
        self._runner = TaskRunner()
        self._runner.start()
        stack.callback(self._runner.close)
        self._engine = engine or _open_engine(load, stack)
        stack.callback(self._engine.destroy)  # before the event loop ends
        self._publish = publish or self._update
        groups = max(1, load.episodes // GROUP_SIZE)
        self._gate = StalenessManager(
            max_concurrent_rollouts=groups,
            consumer_batch_size=BATCH_SIZE,
            # No step waits for a slow group: what is measured is the carrying.
            max_staleness=100 + 10 * groups // BATCH_SIZE,
        )
        workers, workflow = None, OneReply()
        if num_workers:
            scheduler = LocalScheduler(Path(folder), gpus=[])
            job = Job("rollout_worker", num_workers, [SchedulingSpec(cpu=1)], overlapping=True)
            workers = RolloutWorkers(self._runner, self._engine, scheduler, job)
            stack.callback(workers.close)
            workers.start()
            workflow = WorkflowRecipe("controller.OneReply")
        self._executor = WorkflowExecutor(
            self._runner,
            self._engine,
            self.ledger,
            self._gate,
            run_seed=1,
            limits=FailureLimits(),
            workers=workers,
        )
        stack.callback(self._executor.close)
        source = PromptSource([{"i": i} for i in range(10_000)], batch_size=BATCH_SIZE)
        tune_gc()  # as the trainer does
        self._executor.start(source, workflow, group_size=GROUP_SIZE)
        self.num_samples = 0
        self._step = 0
        self.loop_thread_id = self._on_loop(threading.get_ident)

    def train(self, until: float) -> None:
        """At least one batch."""
        while True:
            batch = self._executor.prepare_batch()
            self.num_samples += sum(len(t["rewards"]) for t in batch.trajectories)
            version = self._step + 1
            self._publish(version)
            self._executor.mark_trained(batch, self._step)
            self._executor.set_version(version)
            self.ledger.prune(self._step - 2)
            self._step = version
            if time.monotonic() >= until:
                return

    def _update(self, version: int) -> None:
        self._engine.update_weights(WeightUpdateMeta(type="disk", path="", version=version))

    @property
    def num_steps(self) -> int:
        return self._step

    def close(self) -> None:
        """Ends the episodes; the ledger is then at rest."""
        self._executor.close()

    def start_probe(self) -> Probe:
        probe = Probe(self._gate)
        self._runner.call(lambda: self._runner.spawn(probe.run(), name="probe"))
        return probe

    def loop_cpu_s(self) -> float:
        return self._on_loop(time.thread_time)

    def _on_loop(self, function):
        async def call():
            return function()

        return self._runner.run(call()).result(60)


def _open_engine(load: Load, stack: ExitStack) -> NativeRemoteEngine:
    script = Path(__file__).with_name("generation_stand_in.py")
    child = ChildProcess(
        [sys.executable, str(script), "--mean-s", str(load.mean_s)], name="stand-in"
    )
    stack.callback(child.terminate)
    port = json.loads(child.wait_ready(timeout_s=60))["port"]
    engine = NativeRemoteEngine([f"127.0.0.1:{port}"], "none")
    engine.initialize()
    return engine


if __name__ == "__main__":
    main()
