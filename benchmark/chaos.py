"""kill -9 of a run's processes at random moments: every fault is survived, every ledger balances.

    python benchmark/chaos.py --faults 100 --seed 1 --json FILE

Trains the arithmetic recipe, made tiny, again and again. In each run some processes are killed:

    server       the inference server: the run starts another, and goes on
    controller   the training process: `areal train` starts it again from its recover point
    everything   all processes of the run at once: the same command is given again, as a user would

A fault is survived when the run trains a step afterwards. A run is good when it ends with exit code
0, its ledger balances, every prompt was trained exactly once and every step on a full batch. The
exit code is 0 only if all of that holds. The JSON file is written after each run, and the runs it
has are not repeated: the same command given again does what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from report import Row, print_table, write_json

from areal.cli.demo import make_model, recipe_path
from areal.rollout.books import balance
from areal.utils.run_db import open_read_only
from areal.utils.stacks import descendants

T = TypeVar("T")

TARGETS = ("server", "controller", "everything")
FAULTS_PER_RUN = 4
STEPS_PER_FAULT = 8
BATCH = 8
DEADLINE_S = 180.0
EARLY = 0.25  # share of faults that come while the run still recovers from the one before
SMALL = (
    f"train_dataset.batch_size={BATCH}",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=6",
    "evaluator.freq_steps=null",
    "evaluator.eval_before_train=false",
    "recover.freq_steps=2",
    "recover.retries=20",  # faults may come faster than recover points
)


class ChaosError(RuntimeError):
    """A fault that was not survived, or books that do not agree."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kill, as it is planned."""

    target: str
    after_steps: int  # trained since the fault before; 0: it may still be recovering
    delay_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """One kill, as it went."""

    run: int
    target: str
    recovery_s: float  # to the end of the next step


def plan(seed: int, run: int, num_faults: int) -> list[Fault]:
    draw = random.Random(f"{seed}/{run}")
    targets: list[str] = []
    while len(targets) < num_faults:
        targets += draw.sample(TARGETS, len(TARGETS))
    faults = []
    for target in targets[:num_faults]:
        if faults and draw.random() < EARLY:
            faults.append(Fault(target, 0, draw.uniform(0, 4.0)))
        else:
            faults.append(Fault(target, draw.randint(1, 3), draw.uniform(0, 0.4)))
    return faults


class ChaosRun:
    """One training run, and the faults it is put through."""

    def __init__(self, number: int, folder: Path, model: Path, faults: list[Fault]) -> None:
        self._number = number
        self._folder = folder / "arithmetic" / "chaos"
        self._faults = faults
        self._num_steps = STEPS_PER_FAULT * (len(faults) + 1)
        settings = (f"cluster.fileroot={folder}", f"actor.path={model}", "trial_name=chaos")
        steps = f"total_train_steps={self._num_steps}"
        command = [sys.executable, "-m", "areal.cli.main", "train"]
        self._command = [*command, recipe_path("arithmetic_grpo.yaml"), *settings, *SMALL, steps]
        self._log = folder / "console.log"
        self._process = self._start()

    def go(self) -> list[Result]:
        try:
            results = [self._strike(fault) for fault in self._faults]
            self._wait_for("the end of the run", self._process.poll, is_there=_is_a_number)
            if self._process.returncode != 0:
                raise ChaosError(f"exit code {self._process.returncode}: {self._last_line()}")
            self._check_books()
            return results
        finally:
            self._kill_everything()

    def _start(self) -> subprocess.Popen:
        with open(self._log, "a") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log)

    def _strike(self, fault: Fault) -> Result:
        began = time.time()
        if fault.after_steps:
            self._wait_for("steps", lambda: self._steps_since(began) >= fault.after_steps)
        time.sleep(fault.delay_s)
        if fault.target == "everything":
            struck = time.time()
            self._kill_everything()
            self._process = self._start()
        else:
            pid = self._wait_for(f"a {fault.target}", lambda: self._find(fault.target))
            struck = time.time()
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(pid, signal.SIGKILL)
        self._wait_for("a step after the fault", lambda: self._steps_since(struck) or self._ended())
        return Result(self._number, fault.target, self._next_step_time(struck) - struck)

    def _wait_for(
        self, what: str, look: Callable[[], T], is_there: Callable[[T], bool] = bool
    ) -> T:
        deadline = time.monotonic() + DEADLINE_S
        while not is_there(found := look()):
            if self._process.poll() not in (None, 0):
                raise ChaosError(f"exit code {self._process.returncode}: {self._last_line()}")
            if time.monotonic() > deadline:
                raise ChaosError(f"no {what} within {DEADLINE_S:g} s: {self._last_line()}")
            time.sleep(0.02)
        return found

    def _find(self, target: str) -> int | None:
        """The process to kill, None while there is none."""
        if self._ended():
            raise ChaosError("the run ended before its last fault: raise STEPS_PER_FAULT")
        for pid in descendants(self._process.pid):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if words[3:4] == [b"serve" if target == "server" else b"train"]:
                    return pid
        return None

    def _kill_everything(self) -> None:
        """All at once, as far as that goes: stopped first, so that nobody sees another die."""
        if self._process.poll() is None:
            pids = [self._process.pid, *descendants(self._process.pid)]
            for signum in (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signum)
        self._process.wait()

    def _ended(self) -> bool:
        return self._process.poll() == 0

    def _steps_since(self, moment: float) -> int:
        return self._query(f"SELECT count(*) FROM steps WHERE time > {moment}") or 0

    def _next_step_time(self, moment: float) -> float:
        return self._query(f"SELECT min(time) FROM steps WHERE time > {moment}") or moment

    def _query(self, sql: str) -> float | None:
        database = self._folder / "run.db"
        if not database.exists():
            return None
        try:
            with closing(open_read_only(database)) as connection:
                return connection.execute(sql).fetchone()[0]
        except sqlite3.OperationalError:  # the tables are just being made
            return None

    def _check_books(self) -> None:
        with closing(open_read_only(self._folder / "run.db")) as connection:
            counts = balance(connection)
            per_step = [
                count
                for (count,) in connection.execute(
                    "SELECT count(DISTINCT epoch || '/' || row) FROM tasks GROUP BY step"
                )
            ]
        expected = self._num_steps * BATCH
        if not counts["trained"] == counts["total"] == expected:
            raise ChaosError(f"{expected} prompts were to be trained once: {counts}")
        if per_step != [BATCH] * self._num_steps:
            raise ChaosError(f"prompts per step: {per_step}, expected {BATCH} in each")

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"


def _is_a_number(code: int | None) -> bool:
    return code is not None


def sizes(num_faults: int) -> Iterator[int]:
    """Faults of each run."""
    while num_faults > 0:
        yield min(num_faults, FAULTS_PER_RUN)
        num_faults -= FAULTS_PER_RUN


def read_results(path: str | None, seed: int) -> list[Result]:
    """Those of an earlier call with the same seed."""
    if path is None or not Path(path).exists():
        return []
    report = json.loads(Path(path).read_text())
    return [Result(**result) for result in report["faults"]] if report["seed"] == seed else []


def summary(results: list[Result]) -> list[Row]:
    rows = [Row("faults survived", len(results), "")]
    for target in TARGETS:
        seconds = [result.recovery_s for result in results if result.target == target]
        if seconds:
            rows.append(Row(f"{target}: faults", len(seconds), ""))
            rows.append(Row(f"{target}: recovery, median", statistics.median(seconds), "s"))
            rows.append(Row(f"{target}: recovery, longest", max(seconds), "s"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="where results are kept")
    args = parser.parse_args()
    results = read_results(args.json, args.seed)
    done = {result.run for result in results}
    for run, num_faults in enumerate(sizes(args.faults)):
        if run in done:
            continue
        folder = Path(tempfile.mkdtemp(prefix="areal-chaos-"))
        make_model(folder / "model")
        try:
            results += ChaosRun(
                run, folder, folder / "model", plan(args.seed, run, num_faults)
            ).go()
        except RuntimeError as error:
            print(f"run {run} of seed {args.seed} failed, its folder is {folder}: {error}")
            return 1
        shutil.rmtree(folder)
        print(f"run {run}: {num_faults} faults survived, {len(results)} in all", flush=True)
        if args.json:
            faults = [asdict(result) for result in results]
            write_json(args.json, summary(results), seed=args.seed, faults=faults)
    print_table(summary(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
