"""What a step costs in the run database, in a young run and in one of a million prompts.

    python benchmark/ledger.py [--rows 1000000] [--steps 20] [--json report.json]

A step is the life of 512 prompts: issued, settled with a trajectory of 512 tokens, trained, and the
trajectories of the step two before forgotten, as a recover point every step has it. The median of
`--steps` such steps is taken in a run of 1,000 prompts and in one of `--rows`; `ratio` should be 1.
What is asked once (rewind at the start, balance on demand) may grow with the run: it is shown.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from report import Row, print_table, write_json

from areal.rollout.buffer import Outcome
from areal.rollout.ledger import Ledger
from areal.rollout.source import Prompt
from areal.run.database import RunDatabase

STEP_SIZE = 512
TOKENS = 512
YOUNG = 1_000

# The past of a run, written at once: of 64 prompts one was rejected, one stale and one failed.
_PAST = """
INSERT INTO tasks (task_id, epoch, row, state, issued_version, head_version, tail_version,
                   closed_version, step, reward, issued_at, finished_at, closed_at)
WITH RECURSIVE ids(id) AS (SELECT 0 UNION ALL SELECT id + 1 FROM ids WHERE id + 1 < :rows)
SELECT id, 0, id,
       CASE id % 64 WHEN 1 THEN 'rejected' WHEN 2 THEN 'stale' WHEN 3 THEN 'failed'
            ELSE 'trained' END,
       id / :size, id / :size, id / :size, id / :size,
       CASE WHEN id % 64 IN (1, 2, 3) THEN NULL ELSE id / :size END, 0.5, 0.0, 0.0, 0.0
FROM ids
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", help="also write the report to this file")
    args = parser.parse_args()
    rows = measure(args.rows, args.steps)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def measure(num_rows: int, num_steps: int) -> list[Row]:
    with ExitStack() as stack:
        runs = {age: _Past(stack, rows) for age, rows in (("young", YOUNG), ("old", num_rows))}
        # In turns: whatever else the machine does meets both alike.
        for _ in range(num_steps):
            for run in runs.values():
                run.step()
        young, old = (run.median() for run in runs.values())
        once = runs["old"].once()
    return [
        *_parts("young", young),
        *_parts("old", old),
        Row("ratio", sum(old.values()) / sum(young.values()), "x"),
        *(Row(f"old_{name}", seconds * 1e3, "ms, once") for name, seconds in once.items()),
    ]


def _parts(age: str, parts: dict[str, float]) -> list[Row]:
    rows = [Row(f"{age}_{name}", seconds * 1e3, "ms") for name, seconds in parts.items()]
    return [*rows, Row(f"{age}_step", sum(parts.values()) * 1e3, "ms")]


class _Past:
    """A run that has `num_rows` prompts behind it, and goes on."""

    def __init__(self, stack: ExitStack, num_rows: int) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        database = stack.enter_context(RunDatabase(Path(folder) / "run.db"))
        with database.transaction() as connection:
            connection.execute(_PAST, {"rows": num_rows, "size": STEP_SIZE})
        self._ledger = Ledger(database)
        self._next_id = num_rows
        self._step = num_rows // STEP_SIZE + 1
        self._laps: list[dict[str, float]] = []

    def step(self) -> None:
        self._laps.append(_step(self._ledger, self._step, self._next_id))
        self._step += 1
        self._next_id += STEP_SIZE

    def median(self) -> dict[str, float]:
        """Seconds of each part of a step."""
        return {part: statistics.median(lap[part] for lap in self._laps) for part in self._laps[0]}

    def once(self) -> dict[str, float]:
        return {
            "balance": _time(self._ledger.balance),
            "rewind": _time(lambda: self._ledger.rewind(self._step - 1, self._step)),
        }


def _step(ledger: Ledger, step: int, first_id: int) -> dict[str, float]:
    ids = range(first_id, first_id + STEP_SIZE)
    prompts = [Prompt(task_id, 0, task_id, {}) for task_id in ids]
    outcomes = [
        Outcome(task_id, "finished", step, step, step, trajectory=_trajectory(step))
        for task_id in ids
    ]
    # One in 64 turns out too old: such ends accumulate over a run as well.
    stale, trained = ids[::64], [task_id for task_id in ids if task_id % 64 != ids[0] % 64]
    return {
        "issue": _time(lambda: ledger.issue(prompts, step)),
        "settle": _time(lambda: ledger.settle(outcomes, step)),
        "stale": _time(lambda: ledger.stale(stale, step)),
        "trained": _time(lambda: ledger.trained(trained, step, step)),
        "prune": _time(lambda: ledger.prune(step - 2)),
    }


def _trajectory(version: int) -> dict[str, torch.Tensor]:
    """One sample as a workflow returns it."""
    return {
        "input_ids": torch.randint(0, 32_000, (1, TOKENS), dtype=torch.int32),
        "attention_mask": torch.ones(1, TOKENS, dtype=torch.bool),
        "loss_mask": torch.ones(1, TOKENS, dtype=torch.bool),
        "logprobs": torch.randn(1, TOKENS),
        "versions": torch.full((1, TOKENS), version, dtype=torch.int32),
        "rewards": torch.ones(1),
    }


def _time(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
