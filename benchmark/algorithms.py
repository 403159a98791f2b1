"""Every algorithm on the arithmetic task: final accuracy and time to 0.8 at staleness 0, 2 and 8.

    python benchmark/algorithms.py --model runs/demo/arithmetic/sft/model --json FILE --plot PNG
    python benchmark/algorithms.py --model ... --json FILE --cpu --jobs 8 --deadline 450
    python benchmark/algorithms.py --results FILE --plot PNG [--curves docs/assets/curves]

The algorithms are the recipes `examples/math/arithmetic_*.yaml`, started from the same model with
the same seed and number of steps; each run is `areal train` in a process of its own, `--jobs` at a
time, each on its own share of the cores. The last form draws what was measured and runs nothing.

The JSON file is written whenever a run ends, and the runs it has are not repeated: the same command
given again does what is missing. Beside the usual rows it has `curves`, for each run the held-out
accuracy by step, and `errors`, for each failed run the last line it said. The exit code is 0 when
no run failed and none is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from report import Row, print_table, write_json

from areal.cli.demo import recipe_path
from areal.run.database import open_read_only

STALENESS = (0, 2, 8)
GOAL = 0.8
# That of most recipes; the demo's takes three times as much, which suits data up to 2 versions old.
# What the steps of 8 versions can move the weights by must stay small, whatever is corrected for.
LEARNING_RATE = 3e-4
RECIPES = Path(recipe_path("arithmetic_grpo.yaml")).parent


@dataclass(frozen=True, slots=True)
class Run:
    """One algorithm at one staleness bound."""

    algorithm: str
    staleness: int

    @property
    def name(self) -> str:
        return f"{self.algorithm}_staleness_{self.staleness}"

    @classmethod
    def named(cls, name: str) -> Run:
        algorithm, _, staleness = name.partition("_staleness_")
        return cls(algorithm, int(staleness))


@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out accuracy over a run: (steps trained, seconds since the start, accuracy)."""

    points: list[tuple[int, float, float]]

    @property
    def final(self) -> float:
        return self.points[-1][2]

    @property
    def steps_to_goal(self) -> int | None:
        """The time to the goal. In steps: seconds say more of the runs beside it on the machine."""
        return next((step for step, _, value in self.points if value >= GOAL), None)


@dataclass(slots=True)
class Results:
    """What is known so far."""

    steps: int
    curves: dict[Run, Curve] = field(default_factory=dict)
    errors: dict[Run, str] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Results:
        report = json.loads(file.read_text(encoding="utf-8"))
        curves = {
            Run.named(name): Curve([tuple(point) for point in points])
            for name, points in report["curves"].items()
        }
        return cls(report["steps"], curves)  # what failed is tried again

    def write(self, file: str) -> None:
        write_json(
            file,
            self.rows(),
            steps=self.steps,
            curves={run.name: curve.points for run, curve in self.curves.items()},
            errors={run.name: error for run, error in self.errors.items()},
        )

    def rows(self) -> list[Row]:
        rows = []
        for run in sorted(self.curves, key=lambda run: (run.algorithm, run.staleness)):
            curve = self.curves[run]
            rows.append(Row(f"{run.name}_accuracy", curve.final, "held-out greedy accuracy"))
            if curve.steps_to_goal is not None:
                rows.append(Row(f"{run.name}_time_to_{GOAL}", curve.steps_to_goal, "steps"))
        rows += [Row(f"{run.name}_failed", 1, error) for run, error in self.errors.items()]
        return rows


@dataclass(frozen=True, slots=True)
class Budget:
    """What every run is given, and what all of them together."""

    model: str
    steps: int
    jobs: int
    on_cpu: bool
    deadline_s: float | None


def main() -> int:
    args = _parse()
    if args.results:
        results, missing = Results.read(Path(args.results)), 0
    else:
        budget = Budget(args.model, args.steps, args.jobs, args.cpu, args.deadline)
        runs = [Run(name, eta) for name in args.only or _all_algorithms() for eta in args.staleness]
        results = _earlier(args.json, args.steps)
        _measure(runs, budget, results, args.json)
        missing = sum(run not in results.curves for run in runs)
    if not results.rows():
        raise SystemExit("no run has ended: give more time by --deadline")
    print_table(results.rows())
    if missing:
        print(f"{missing} runs failed or were not started: give the command again", file=sys.stderr)
    if args.plot:
        _plot_final(results.curves, args.plot)
    if args.curves:
        _plot_each(results.curves, Path(args.curves))
    return 1 if missing else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="folder of the warm-started model every run begins with")
    source.add_argument("--results", metavar="FILE", help="draw these results, run nothing")
    parser.add_argument("--only", nargs="*", help="names of algorithms; default: all")
    parser.add_argument(
        "--staleness",
        nargs="*",
        type=int,
        choices=STALENESS,
        default=STALENESS,
        help="default: all",
    )
    parser.add_argument("--steps", type=int, default=240, help="training steps per run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--cpu", action="store_true", help="leave a GPU of this machine alone")
    parser.add_argument(
        "--deadline", type=float, metavar="SECONDS", help="start no run later than this"
    )
    parser.add_argument("--json", metavar="FILE", help="write rows and curves; go on from there")
    parser.add_argument("--plot", metavar="PNG", help="draw final accuracy by algorithm")
    parser.add_argument("--curves", metavar="FOLDER", help="draw one picture per algorithm")
    args = parser.parse_args()
    if unknown := sorted(set(args.only or ()) - set(_all_algorithms())):
        parser.error(f"--only: no recipe arithmetic_{unknown[0]}.yaml, see {RECIPES}")
    return args


def _all_algorithms() -> list[str]:
    stems = (path.stem.removeprefix("arithmetic_") for path in RECIPES.glob("arithmetic_*.yaml"))
    return sorted(set(stems) - {"sft"})


def _earlier(file: str | None, steps: int) -> Results:
    """What `file` has from an earlier call, or nothing."""
    if file is None or not Path(file).exists():
        return Results(steps)
    results = Results.read(Path(file))
    if results.steps != steps:
        raise SystemExit(
            f"{file} holds runs of {results.steps} steps, --steps is {steps}: name another file"
        )
    return results


def _measure(runs: Sequence[Run], budget: Budget, results: Results, file: str | None) -> None:
    """Fill `results` with the runs it lacks, and `file` with them whenever one ends."""
    began = time.monotonic()
    shares = _core_shares(budget.jobs)

    def train_in_time(run: Run) -> Curve | None:
        if budget.deadline_s is not None and time.monotonic() - began > budget.deadline_s:
            return None
        return _train(run, budget, Path(folder))

    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(budget.jobs, initializer=_take_cores, initargs=(shares,)) as pool,
    ):
        missing = [run for run in runs if run not in results.curves]
        running = {pool.submit(train_in_time, run): run for run in missing}
        for done in as_completed(running):
            run = running[done]
            try:
                curve = done.result()
            except RuntimeError as error:
                results.errors[run] = str(error)
                print(f"{run.name}: {error}", file=sys.stderr, flush=True)
            else:
                if curve is None:
                    continue
                results.curves[run] = curve
                print(f"{run.name}: {curve.final:.3f}", file=sys.stderr, flush=True)
            if file is not None:
                results.write(file)


def _core_shares(jobs: int) -> SimpleQueue[set[int]]:
    """The cores of each job, disjoint when there are enough of them."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    width = max(len(cores) // jobs, 1)
    shares: SimpleQueue[set[int]] = SimpleQueue()
    for first in range(0, jobs * width, width):
        shares.put({cores[i % len(cores)] for i in range(first, first + width) if cores})
    return shares


def _take_cores(shares: SimpleQueue[set[int]]) -> None:
    """Bind this thread, and so the processes it starts: each run sees only its share."""
    if share := shares.get():
        os.sched_setaffinity(0, share)


def _train(run: Run, budget: Budget, folder: Path) -> Curve:
    overrides = {
        "cluster.fileroot": folder,
        "experiment_name": "algorithms",
        "trial_name": run.name,
        "seed": 1,
        "actor.path": budget.model,
        "total_train_steps": budget.steps,
        "actor.optimizer.lr": LEARNING_RATE,
        "rollout.max_head_offpolicyness": run.staleness,
        "evaluator.freq_steps": max(budget.steps // 10, 1),
        "evaluator.eval_before_train": "true",
    }
    file = RECIPES / f"arithmetic_{run.algorithm}.yaml"
    arguments = [f"{key}={value}" for key, value in overrides.items()]
    command = [sys.executable, "-m", "areal.cli.main", "train", str(file), *arguments]
    hidden_gpu = {"CUDA_VISIBLE_DEVICES": ""} if budget.on_cpu else {}
    env = {**os.environ, **hidden_gpu}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(lines[-1])
    return read_curve(folder / "algorithms" / run.name / "run.db", "eval/reward")


def read_curve(database: Path, stat: str) -> Curve:
    """The held-out figure `stat` wherever a run has evaluated it."""
    with closing(open_read_only(database)) as connection:
        rows = connection.execute("SELECT step, time, stats FROM steps ORDER BY step").fetchall()
    start = rows[0]["time"]
    evaluated = ((row, json.loads(row["stats"]).get(stat)) for row in rows)
    return Curve(
        [
            (row["step"] + 1, row["time"] - start, value)
            for row, value in evaluated
            if value is not None
        ]
    )


def _plot_final(curves: dict[Run, Curve], path: str) -> None:
    from matplotlib import pyplot

    algorithms = sorted({run.algorithm for run in curves})
    size = (9, 0.5 + 0.35 * len(algorithms))
    figure, (finals, times) = pyplot.subplots(1, 2, sharey=True, figsize=size)
    for row, eta in enumerate(STALENESS):
        there = [
            (place + 0.25 * (row - 1), curves[Run(algorithm, eta)])
            for place, algorithm in enumerate(algorithms)
            if Run(algorithm, eta) in curves
        ]
        finals.barh(
            [place for place, _ in there],
            [curve.final for _, curve in there],
            height=0.25,
            label=f"staleness {eta}",
        )
        reached = [(place, curve.steps_to_goal) for place, curve in there if curve.steps_to_goal]
        times.barh([place for place, _ in reached], [steps for _, steps in reached], height=0.25)
    finals.set_yticks(range(len(algorithms)), algorithms)
    finals.invert_yaxis()
    finals.set(xlabel="held-out greedy accuracy at the end", xlim=(0, 1))
    figure.legend(loc="upper right", ncols=len(STALENESS))
    times.set(xlabel=f"steps to {GOAL} (no bar: not reached)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_each(curves: dict[Run, Curve], folder: Path) -> None:
    for name in sorted({run.algorithm for run in curves}):
        runs = [Run(name, eta) for eta in STALENESS if Run(name, eta) in curves]
        named = {f"staleness {run.staleness}": curves[run] for run in runs}
        plot_curves(folder / f"{name}.png", named, title=name, label="held-out accuracy")


def plot_curves(picture: Path, curves: dict[str, Curve], *, title: str, label: str) -> None:
    """Curves by their names in a legend; one without a name needs none."""
    from matplotlib import pyplot

    picture.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(6, 3))
    for name, curve in curves.items():
        axes.plot([p[0] for p in curve.points], [p[2] for p in curve.points], label=name)
    top = max(1.0, *(point[2] for curve in curves.values() for point in curve.points))
    axes.set(xlabel="step", ylabel=label, title=title, ylim=(0, top))
    axes.grid(alpha=0.3)
    if any(curves):
        axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(picture, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
