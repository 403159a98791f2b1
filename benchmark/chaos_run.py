"""One training run of chaos.py, the processes of it that are killed, and whether it bore that.

A fault is survived when the run trains a step afterwards. A run is good when it ends with exit code
0, its ledger balances, every prompt was trained exactly once and every step on a full batch.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from areal.cli.demo import recipe_path
from areal.rollout.ledger_balance import read_balance
from areal.run.database import open_read_only
from areal.utils.stacks import descendants

T = TypeVar("T")

STEPS_PER_FAULT = 8
BATCH = 8
DEADLINE_S = 300.0
SMALL = (
    "trial_name=chaos",
    f"train_dataset.batch_size={BATCH}",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=6",
    "evaluator.freq_steps=null",
    "evaluator.eval_before_train=false",
    "recover.freq_steps=2",
    "recover.retries=20",  # faults may come faster than recover points
)
# The word of a command by which the processes of a target are known: its place, and its beginning.
COMMANDS = {
    "server": (3, b"serve"),
    "controller": (3, b"train"),
    "rollout worker": (-2, b"rollout_worker/"),  # the last one is empty
    "rank": (-2, b"actor/"),
}


class ChaosError(RuntimeError):
    """A fault that was not survived, or books that do not agree."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kill, as it is planned."""

    target: str  # a key of COMMANDS, or "everything"
    after_steps: int  # trained since the fault before; 0: while the run recovers from that
    delay_s: float
    choice: float  # in [0, 1): which of several processes


@dataclass(frozen=True, slots=True)
class Result:
    """One kill, as it went."""

    run: int
    target: str
    is_early: bool  # the run had not recovered from the fault before
    recovery_s: float  # to the end of the next step


class ChaosRun:
    """`overrides` make the run what its faults need: give it ranks, or rollout workers."""

    def __init__(
        self,
        number: int,
        folder: Path,
        model: Path,
        faults: list[Fault],
        overrides: tuple[str, ...],
    ) -> None:
        self._number = number
        self._folder = folder / "arithmetic" / "chaos"
        self._faults = faults
        self._num_steps = STEPS_PER_FAULT * (len(faults) + 1)
        command = [sys.executable, "-m", "areal.cli.main", "train"]
        command += [recipe_path("arithmetic_grpo.yaml"), f"cluster.fileroot={folder}"]
        command += [f"actor.path={model}", f"total_train_steps={self._num_steps}"]
        self._command = [*command, *SMALL, *overrides]
        self._log = folder / "console.log"
        self._struck: list[tuple[Fault, float]] = []  # not yet recovered from, and when
        self._results: list[Result] = []
        self._process = self._start()

    def go(self) -> list[Result]:
        try:
            for fault in self._faults:
                self._strike(fault)
            self._recover()
            self._wait_for("end of the run", lambda: self._process.poll() is not None)
            self._check_books()
            return self._results
        finally:
            self._kill_everything()

    def _start(self) -> subprocess.Popen:
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self._log, "a") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log, env=one_thread)

    def _strike(self, fault: Fault) -> None:
        if fault.after_steps:
            self._recover()
            began = time.time()
            self._wait_for("steps", lambda: self._steps_since(began) >= fault.after_steps)
            time.sleep(fault.delay_s)
        else:
            self._find(fault)
            self._let_pass(fault.delay_s)
        if fault.target == "everything":
            moment = time.time()
            self._kill_everything()
            self._process = self._start()
        else:
            pid = self._find(fault)
            moment = time.time()
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(pid, signal.SIGKILL)
        self._struck.append((fault, moment))

    def _let_pass(self, seconds: float) -> None:
        """Not longer than until the run has recovered: its steps are numbered."""
        last = max((moment for _, moment in self._struck), default=0.0)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._steps_since(last):
            time.sleep(0.02)

    def _recover(self) -> None:
        """Wait for a step after the last fault; it counts for all that have none yet."""
        if not self._struck:
            return
        last = self._struck[-1][1]
        self._wait_for("step after the fault", lambda: self._steps_since(last) or self._has_ended())
        step = self._query(f"SELECT min(time) FROM steps WHERE time > {last}") or time.time()
        self._results += [
            Result(self._number, fault.target, fault.after_steps == 0, step - moment)
            for fault, moment in self._struck
        ]
        self._struck.clear()

    def _wait_for(self, what: str, look: Callable[[], T]) -> T:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := look()):
            if self._process.poll() not in (None, 0):
                raise ChaosError(f"exit code {self._process.returncode}: {self._last_line()}")
            if time.monotonic() > deadline:
                raise ChaosError(f"no {what} within {DEADLINE_S:g} s: {self._last_line()}")
            time.sleep(0.02)
        return found

    def _find(self, fault: Fault) -> int:
        """The process to kill; waits until there is one."""
        if fault.target == "everything":
            return self._process.pid
        pids = self._wait_for(fault.target, lambda: self._processes_of(fault.target))
        return pids[int(fault.choice * len(pids))]

    def _processes_of(self, target: str) -> list[int]:
        if self._has_ended():
            raise ChaosError("the run ended before its last fault: raise STEPS_PER_FAULT")
        place, word = COMMANDS[target]
        found = []
        for pid in descendants(self._process.pid):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if len(words) > 3 and words[place].startswith(word):
                    found.append(pid)
        return found

    def _kill_everything(self) -> None:
        """All at once, as far as that goes: stopped first, so that nobody sees another die."""
        if self._process.poll() is None:
            pids = [self._process.pid, *descendants(self._process.pid)]
            for signum in (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signum)
        self._process.wait()

    def _has_ended(self) -> bool:
        return self._process.poll() == 0

    def _steps_since(self, moment: float) -> int:
        return self._query(f"SELECT count(*) FROM steps WHERE time > {moment}") or 0

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
        if not self._has_ended():
            raise ChaosError(f"exit code {self._process.returncode}: {self._last_line()}")
        with closing(open_read_only(self._folder / "run.db")) as connection:
            counts = read_balance(connection)
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
