"""Every algorithm on the arithmetic task: final accuracy and time to 0.8 at staleness 0, 2 and 8.

    python benchmark/algorithms.py --model runs/demo/arithmetic/sft/model --json FILE --plot FILE
    python benchmark/algorithms.py --results FILE --plot FILE [--curves docs/assets/curves]

The algorithms are the recipes `examples/math/arithmetic_*.yaml`, started from the same model with
the same seed and number of steps; each run is `areal train` in a process of its own, `--jobs` at a
time. The second form draws what an earlier run measured. Beside the usual rows the JSON file has
`curves`: for each run the held-out accuracy by step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from report import Row, print_table, write_json

from areal.cli.demo import recipe_path
from areal.utils.run_db import open_read_only

STALENESS = (0, 2, 8)
GOAL = 0.8
RECIPES = Path(recipe_path("arithmetic_grpo.yaml")).parent


@dataclass(frozen=True, slots=True)
class Run:
    """One algorithm at one staleness bound."""

    algorithm: str
    staleness: int

    @property
    def name(self) -> str:
        return f"{self.algorithm}_staleness_{self.staleness}"


@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out accuracy over a run: (steps trained, seconds since the start, accuracy)."""

    points: list[tuple[int, float, float]]

    @property
    def final(self) -> float:
        return self.points[-1][2]

    @property
    def seconds_to_goal(self) -> float | None:
        return next((seconds for _, seconds, value in self.points if value >= GOAL), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="folder of the warm-started model every run begins with")
    source.add_argument("--results", metavar="FILE", help="draw these results, run nothing")
    parser.add_argument("--only", nargs="*", help="names of algorithms; default: all")
    parser.add_argument("--steps", type=int, default=300, help="training steps per run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--json", metavar="FILE", help="write rows and curves")
    parser.add_argument("--plot", metavar="PNG", help="draw final accuracy by algorithm")
    parser.add_argument("--curves", metavar="FOLDER", help="draw one picture per algorithm")
    args = parser.parse_args()
    if args.results:
        curves = _read_curves(Path(args.results))
    else:
        curves = _measure(args.only or _all_algorithms(), args.model, args.steps, args.jobs)
    rows = _rows(curves)
    print_table(rows)
    if args.json:
        points = {run.name: curve.points for run, curve in curves.items()}
        write_json(args.json, rows, curves=points)
    if args.plot:
        _plot_final(curves, args.plot)
    if args.curves:
        _plot_curves(curves, Path(args.curves))
    return 0


def _all_algorithms() -> list[str]:
    stems = (path.stem.removeprefix("arithmetic_") for path in RECIPES.glob("arithmetic_*.yaml"))
    return sorted(set(stems) - {"sft"})


def _measure(algorithms: Sequence[str], model: str, steps: int, jobs: int) -> dict[Run, Curve]:
    runs = [Run(algorithm, eta) for algorithm in algorithms for eta in STALENESS]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        curves = pool.map(lambda run: _train(run, model, steps, Path(folder)), runs)
        return dict(zip(runs, curves, strict=True))


def _train(run: Run, model: str, steps: int, folder: Path) -> Curve:
    overrides = {
        "cluster.fileroot": folder,
        "experiment_name": "algorithms",
        "trial_name": run.name,
        "seed": 1,
        "actor.path": model,
        "total_train_steps": steps,
        "rollout.max_head_offpolicyness": run.staleness,
        "evaluator.freq_steps": max(steps // 10, 1),
        "evaluator.eval_before_train": "true",
    }
    file = RECIPES / f"arithmetic_{run.algorithm}.yaml"
    arguments = [f"{key}={value}" for key, value in overrides.items()]
    command = [sys.executable, "-m", "areal.cli.main", "train", str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{run.name}: {done.stderr.strip().splitlines()[-1]}")
    curve = _read_curve(folder / "algorithms" / run.name / "run.db")
    print(f"{run.name}: {curve.final:.3f}", file=sys.stderr, flush=True)
    return curve


def _read_curve(database: Path) -> Curve:
    with closing(open_read_only(database)) as connection:
        rows = connection.execute("SELECT step, time, stats FROM steps ORDER BY step").fetchall()
    start = rows[0]["time"]
    evaluated = ((row, json.loads(row["stats"]).get("eval/reward")) for row in rows)
    return Curve(
        [
            (row["step"] + 1, row["time"] - start, value)
            for row, value in evaluated
            if value is not None
        ]
    )


def _rows(curves: dict[Run, Curve]) -> list[Row]:
    rows = []
    for run, curve in curves.items():
        rows.append(Row(f"{run.name}_accuracy", curve.final, "held-out greedy accuracy"))
        if curve.seconds_to_goal is not None:
            rows.append(Row(f"{run.name}_time_to_{GOAL}", curve.seconds_to_goal, "s"))
    return rows


def _read_curves(file: Path) -> dict[Run, Curve]:
    curves = {}
    for name, points in json.loads(file.read_text(encoding="utf-8"))["curves"].items():
        algorithm, _, staleness = name.partition("_staleness_")
        curves[Run(algorithm, int(staleness))] = Curve([tuple(point) for point in points])
    return curves


def _plot_final(curves: dict[Run, Curve], path: str) -> None:
    from matplotlib import pyplot

    algorithms = list(dict.fromkeys(run.algorithm for run in curves))
    figure, axes = pyplot.subplots(figsize=(7, 0.5 + 0.35 * len(algorithms)))
    for row, eta in enumerate(STALENESS):
        values = [curves[Run(algorithm, eta)].final for algorithm in algorithms]
        heights = [place + 0.25 * (1 - row) for place in range(len(algorithms))]
        axes.barh(heights, values, height=0.25, label=f"staleness {eta}")
    axes.set_yticks(range(len(algorithms)), algorithms)
    axes.invert_yaxis()
    axes.set(xlabel="held-out greedy accuracy", xlim=(0, 1))
    axes.legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_curves(curves: dict[Run, Curve], folder: Path) -> None:
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for algorithm in dict.fromkeys(run.algorithm for run in curves):
        figure, axes = pyplot.subplots(figsize=(6, 3))
        for eta in STALENESS:
            points = curves[Run(algorithm, eta)].points
            axes.plot([p[0] for p in points], [p[2] for p in points], label=f"staleness {eta}")
        axes.set(xlabel="step", ylabel="held-out accuracy", title=algorithm, ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        figure.tight_layout()
        figure.savefig(folder / f"{algorithm}.png", dpi=100)
        pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
