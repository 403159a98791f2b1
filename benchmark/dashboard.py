"""What a view of the dashboard costs in a run of a million prompts and ten thousand samples.

    python benchmark/dashboard.py [--rows 1000000] [--samples 10000] [--json report.json]

The median and the slowest of `--laps` answers per view, each with a new connection as the server
has it; no view should take 200 ms. Times are of the CPU, so a busy machine measures the same; the
database lies in the page cache. `recorder_step` is what a run pays per step to keep samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
from report import Row, print_table, write_json

from areal.dashboard.routes import Routes
from areal.rollout.executor import Batch
from areal.run.database import RunDatabase, Start, StoredSample
from areal.trainer.samples import SampleRecorder

STEP_SIZE = 512
GROUP = 8
TOKENS = 512
CONFIG = """\
experiment_name: benchmark
trial_name: dashboard
total_train_epochs: 1
total_train_steps: 100000
train_dataset: {batch_size: 512}
rollout: {max_head_offpolicyness: 2}
"""
# Of 64 prompts one was rejected, one stale and one failed.
_TASKS = """
INSERT INTO tasks (task_id, epoch, row, state, why, issued_version, head_version, tail_version,
                   closed_version, step, reward, issued_at, finished_at, closed_at)
WITH RECURSIVE ids(id) AS (SELECT 0 UNION ALL SELECT id + 1 FROM ids WHERE id + 1 < :rows)
SELECT id, 0, id,
       CASE id % 64 WHEN 1 THEN 'rejected' WHEN 2 THEN 'stale' WHEN 3 THEN 'failed'
            ELSE 'trained' END,
       CASE id % 64 WHEN 3 THEN 'TimeoutError: 30 s' ELSE '' END,
       id / :size, id / :size, id / :size, id / :size,
       CASE WHEN id % 64 IN (1, 2, 3) THEN NULL ELSE id / :size END, 0.5, 1.0, 2.0, 3.0
FROM ids
"""
# View -> path and query; {task} is a stored sample's prompt.
VIEWS: dict[str, tuple[str, dict[str, str]]] = {
    "runs": ("runs", {}),
    "now": ("run/0/now", {}),
    "seconds": ("run/0/seconds", {}),
    "samples": ("run/0/samples", {}),
    "samples_by_text": ("run/0/samples", {"text": "not in any text"}),
    "samples_by_reward": ("run/0/samples", {"min_reward": "0.5", "min_length": "10"}),
    "samples_waiting": ("run/0/samples", {"state": "finished"}),
    "sample": ("run/0/sample/{task}/0", {}),
    "prompts": ("run/0/prompts", {}),
    "prompts_failed": ("run/0/prompts", {"state": "failed"}),
    "prompts_of_a_step": ("run/0/prompts", {"step": "7"}),
    "prompt": ("run/0/prompt/{task}", {}),
    "curves": ("run/0/curves", {}),
    "alarms": ("run/0/alarms", {}),
    "config": ("run/0/config", {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--laps", type=int, default=7)
    parser.add_argument("--json", help="also write the report to this file")
    args = parser.parse_args()
    rows = measure(args.rows, args.samples, args.laps)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def measure(num_rows: int, num_samples: int, laps: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with RunDatabase(root / "run.db") as database:
            task = _write(database, num_rows, num_samples)
            rows = [_recorder_cost(database, num_rows, laps)]
            routes = Routes([root])
            for name, (path, query) in VIEWS.items():
                ask = partial(routes.answer, path.format(task=task), query)
                times = [_time(ask) for _ in range(laps)]
                rows.append(Row(name, statistics.median(times) * 1e3, "ms"))
                rows.append(Row(f"{name}_slowest", max(times) * 1e3, "ms"))
    slowest = max(row.value for row in rows if row.name in VIEWS)
    return [*rows, Row("slowest_view", slowest, "ms")]


def _write(database: RunDatabase, num_rows: int, num_samples: int) -> int:
    """Returns a prompt whose samples are stored."""
    num_steps = max(1, num_rows // STEP_SIZE)
    database.record_start(Start(0, CONFIG, 10**9, {}))
    stats = {f"area/statistic_{i}": i / 7 for i in range(50)}
    stats |= {"rollout/reward": 0.5, "timeperf/step": 1.0, "timeperf/train": 0.7, "tokens": 1e5}
    text = json.dumps(stats)
    with database.transaction() as connection:
        connection.execute(_TASKS, {"rows": num_rows, "size": STEP_SIZE})
        connection.executemany(
            "INSERT INTO steps VALUES (?, ?, ?)",
            ((step, float(step), text) for step in range(num_steps)),
        )
    rng = np.random.default_rng(0)
    data = safetensors.numpy.save(_values(rng))
    words = "the quick brown fox jumps over the lazy dog " * (TOKENS // 9)
    samples = [
        StoredSample(
            STEP_SIZE * (i // GROUP % num_steps),
            i % GROUP,
            i % GROUP,
            i // GROUP % num_steps,
            float(i % 2),
            TOKENS,
            False,
            "what does the fox do?",
            words,
            data,
        )  # fmt: skip
        for i in range(num_samples)
    ]
    database.record_samples(samples, {token: f"w{token} " for token in range(32_000)})
    return samples[-1].task_id


def _values(rng: np.random.Generator) -> dict[str, np.ndarray]:
    floats = {key: rng.normal(size=TOKENS) for key in ("logprobs", "advantages", "prox_logp")}
    return {
        **{key: values.astype(np.float32) for key, values in floats.items()},
        "ids": rng.integers(0, 32_000, TOKENS, dtype=np.int32),
        "mask": np.arange(TOKENS) >= 8,
        "versions": np.ones(TOKENS, dtype=np.int32),
    }


class _Words:
    """Stands for a tokenizer, whose own time is not measured here."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def _recorder_cost(database: RunDatabase, num_rows: int, laps: int) -> Row:
    group = {
        "input_ids": torch.randint(0, 32_000, (GROUP, TOKENS)),
        "attention_mask": torch.ones(GROUP, TOKENS),
        "loss_mask": torch.ones(GROUP, TOKENS),
        "versions": torch.ones(GROUP, TOKENS),
        "logprobs": torch.randn(GROUP, TOKENS),
    }
    data = {key: torch.randn(GROUP, TOKENS) for key in ("advantages", "prox_logp")}
    data["rewards"] = torch.ones(GROUP)
    recorder = SampleRecorder(database, _Words(), total_steps=1)
    batch = Batch(0, [num_rows], [group], [])
    times = [_time(lambda: recorder.record(batch, data, 0)) for _ in range(laps)]
    return Row("recorder_step", statistics.median(times) * 1e3, "ms")


def _time(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    main()
