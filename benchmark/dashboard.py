"""What a view of the dashboard costs in a run of a million prompts and ten thousand samples.

    python benchmark/dashboard.py [--rows 1000000] [--samples 10000] [--browser] [--demo RUN]
                                  [--json report.json]

The median and the slowest of `--laps` answers per view, each with a new connection as the server
has it; no view should take 200 ms. Times are of the CPU, so a busy machine measures the same; the
database lies in the page cache. `recorder_step` is what a run pays per step to keep samples.

`--browser` also measures first paint and every view in Chromium, by the clock and, of the views, in
CPU time of server and browser together (dashboard_browser.py). `--demo` takes the run of `areal
demo` and says which share of its time goes into what the dashboard shows: keeping the samples of
each step, and timing episodes. Some steps of it are run again, and the last is recorded again, as
it was. Both are seconds of the CPU, so that a busy machine measures the same share: of all
processes of the run, and of the controller alone.
"""

from __future__ import annotations

import argparse
import json
import os
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

from areal.api.workflow_context import Episode
from areal.cli.train import load_config
from areal.dashboard.reader import RunReader
from areal.dashboard.routes import Routes
from areal.rollout.episode_time import record_time
from areal.rollout.executor import Batch
from areal.run.database import RunDatabase, Start, StoredSample
from areal.run.paths import RunPaths
from areal.trainer.experiment import run_experiment
from areal.trainer.samples import SampleRecorder
from areal.utils import stats_tracker
from areal.utils.stacks import descendants
from areal.utils.tokenizer import load_hf_tokenizer

STEP_SIZE = 512
GROUP = 8
TOKENS = 512
DEMO_STEPS = 24
DEMO_STARTS = 4  # steps until all has been computed once
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
    parser.add_argument("--browser", action="store_true", help="also in Chromium")
    parser.add_argument("--demo", metavar="RUN", help="folder of the demo's run of GRPO")
    parser.add_argument("--json", help="also write the report to this file")
    args = parser.parse_args()
    rows = measure(args.rows, args.samples, args.laps, browser=args.browser)
    if args.demo is not None:
        rows += demo_share(Path(args.demo), args.laps)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def measure(num_rows: int, num_samples: int, laps: int, *, browser: bool = False) -> list[Row]:
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
            rows.append(Row("slowest_view", slowest, "ms"))
            if browser:
                from dashboard_browser import PLACES, in_browser  # needs Playwright

                rows += in_browser(root, task=task, laps=laps)
                views = {f"browser_{name}" for name in PLACES}
                shown = [row.value for row in rows if row.name in views]
                rows.append(Row("browser_slowest_view", max(shown), "ms"))
                cpu = {f"{view}_cpu" for view in views}
                spent = max(row.value for row in rows if row.name in cpu)
                rows.append(Row("browser_slowest_view_cpu", spent, "ms"))
    return rows


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


def demo_share(run: Path, laps: int) -> list[Row]:
    """What the recording of a run's samples and the timing of its episodes cost it."""
    with RunReader(run) as reader:
        config, steps = reader.config(), [row for row in reader.steps() if row.step >= 0]
        stored = reader.query("SELECT * FROM samples WHERE step = ?", (steps[-1].step,))
        groups = config["train_dataset.batch_size"]
    tokenizer = load_hf_tokenizer(str(RunPaths(run).model))
    batch, data = _recorded_batch([safetensors.numpy.load(row["data"]) for row in stored])
    with tempfile.TemporaryDirectory() as folder, RunDatabase(Path(folder) / "run.db") as database:
        recorder = SampleRecorder(database, tokenizer, total_steps=len(steps))
        recorder.record(batch, data, 0)  # texts of tokens are stored once
        samples_s = [_time(lambda: recorder.record(batch, data, 0)) for _ in range(10 * laps)]
    episodes_s = [_time(partial(_record_times, _episodes(groups))) for _ in range(10 * laps)]
    cost = statistics.median(samples_s) + statistics.median(episodes_s)
    all_s, controller_s = _cpu_per_step(run)
    return [
        Row("demo_step_cpu", all_s * 1e3, "ms"),
        Row("demo_step_cpu_controller", controller_s * 1e3, "ms"),
        Row("demo_recording_samples", statistics.median(samples_s) * 1e3, "ms"),
        Row("demo_timing_episodes", statistics.median(episodes_s) * 1e3, "ms"),
        Row("demo_share", 100 * cost / all_s, "%"),
        Row("demo_share_of_controller", 100 * cost / controller_s, "%"),
    ]


def _cpu_per_step(run: Path) -> tuple[float, float]:
    """CPU seconds of a step of the run: of all its processes, and of the controller."""
    marks: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"cluster.fileroot={folder}", f"total_train_steps={DEMO_STEPS}"]
        changes += ["evaluator.freq_steps=null", "evaluator.eval_before_train=false"]
        config = load_config([str(run / "config.yaml"), *changes])
        run_experiment(config, lambda *_: marks.append((_cpu_s(), time.process_time())))
    first, last = marks[DEMO_STARTS], marks[-1]
    num_steps = len(marks) - 1 - DEMO_STARTS
    return (last[0] - first[0]) / num_steps, (last[1] - first[1]) / num_steps


def _cpu_s() -> float:
    """Of this process and all that it started and that live."""
    ticks = 0
    for pid in {os.getpid(), *descendants(os.getpid())}:
        # The name, which may hold anything, ends with the last parenthesis.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _recorded_batch(samples: list[dict[str, np.ndarray]]) -> tuple[Batch, dict[str, torch.Tensor]]:
    """The group as the trainer had it, from what was stored of it."""
    width = max(len(sample["ids"]) for sample in samples)

    def padded(key: str) -> torch.Tensor:
        rows = [np.pad(one[key].astype(np.float32), (0, width - len(one[key]))) for one in samples]
        return torch.from_numpy(np.stack(rows))

    lengths = torch.tensor([len(sample["ids"]) for sample in samples])
    mask = torch.arange(width) < lengths[:, None]
    group = {
        "input_ids": padded("ids").int(),
        "attention_mask": mask,
        "loss_mask": padded("mask"),
        "versions": padded("versions").int(),
        "logprobs": padded("logprobs"),
    }
    data = {"advantages": padded("advantages"), "prox_logp": padded("prox_logp")}
    data["rewards"] = torch.ones(len(samples))
    return Batch(0, [0], [group], []), data


def _episodes(count: int) -> list[Episode]:
    """As a step of the demo has them: groups, each a request and a reward."""
    now = time.perf_counter()
    spans = [("prompt", now, now + 1e-9), ("tokens", now + 1e-9, now + 2e-9)]
    spans.append(("reward", now + 2e-9, now + 3e-9))
    ended = [Episode(i, 0, False, 1, is_group=True, began=now) for i in range(count)]
    for one in ended:
        one.spans += spans
    return ended


def _record_times(ended: list[Episode]) -> None:
    for one in ended:
        record_time(one)
    stats_tracker.export_all()


def _time(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    main()
