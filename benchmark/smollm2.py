"""A pretrained model learns sums by asynchronous GRPO: held-out accuracy before and after.

    python benchmark/smollm2.py --model runs/smollm2/model --data runs/smollm2/data \
        --json FILE --plot PNG [key=value ...]
    python benchmark/smollm2.py --results FILE --plot PNG

Model and data are those that `examples/smollm2/prepare.py` writes. The run is `areal train
examples/smollm2/grpo.yaml` in a process of its own, as a user would start it, with any further keys
as given; its folder is kept. The JSON file has the usual rows and `curve`: for every step the
seconds since the first evaluation, the sampled reward and, where measured, the held-out accuracy.
The last form draws what was measured and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from report import Row, print_table, write_json

from areal.run.database import open_read_only

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "examples/smollm2/grpo.yaml"
WINDOW = 10  # steps that the reward at the beginning and at the end is averaged over


@dataclass(frozen=True, slots=True)
class Point:
    """One step; `step` counts those trained, so that 0 is the starting model."""

    step: int
    seconds: float
    reward: float | None  # mean over the samples trained on; none before the first step
    accuracy: float | None  # greedy, on the held-out rows; only where evaluated
    tokens: float  # trained on, prompts included


def main() -> None:
    args = _parse()
    if args.results:
        report = json.loads(Path(args.results).read_text(encoding="utf-8"))
        curve = [Point(**point) for point in report["curve"]]
    else:
        curve = _measure(args)
    if args.plot:
        _plot(curve, args.plot)


def _measure(args: argparse.Namespace) -> list[Point]:
    runs = Path(args.runs).resolve()
    folder = runs / "smollm2" / f"benchmark-{time.strftime('%Y%m%d-%H%M%S')}"
    began = time.monotonic()
    _train(args.model, args.data, folder, args.overrides)
    wall_s = time.monotonic() - began
    curve = _read_curve(folder / "run.db")
    rows = _rows(curve, wall_s)
    print_table(rows)
    if args.json:
        points = [asdict(point) for point in curve]
        write_json(args.json, rows, overrides=args.overrides, curve=points)
    return curve


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="model folder that prepare.py wrote")
    source.add_argument("--results", metavar="FILE", help="draw these results, run nothing")
    parser.add_argument("--data", help="data folder that prepare.py wrote")
    parser.add_argument("--runs", default="runs", help="folder the run is kept in")
    parser.add_argument("--json", metavar="FILE", help="write rows and the curve")
    parser.add_argument("--plot", metavar="PNG", help="draw the curve")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the recipe")
    args = parser.parse_args()
    if args.model and not args.data:
        parser.error("--model needs --data")
    return args


def _train(model: str, data: str, folder: Path, overrides: Sequence[str]) -> None:
    data = str(Path(data).resolve())
    arguments = [
        f"cluster.fileroot={folder.parents[1]}",
        f"experiment_name={folder.parent.name}",
        f"trial_name={folder.name}",
        f"actor.path={Path(model).resolve()}",
        f"train_dataset.path={data}",
        f"valid_dataset.path={data}",
        *overrides,
    ]
    # From the checkout, where the recipe's import paths begin.
    subprocess.run(
        [sys.executable, "-m", "areal.cli.main", "train", RECIPE, *arguments],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": _search_path()},
    )


def _search_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _read_curve(database: Path) -> list[Point]:
    with closing(open_read_only(database)) as connection:
        rows = connection.execute("SELECT step, time, stats FROM steps ORDER BY step").fetchall()
    return [
        Point(
            step=row["step"] + 1,
            seconds=row["time"] - rows[0]["time"],
            reward=stats.get("rollout/reward"),
            accuracy=stats.get("eval/reward"),
            tokens=stats.get("tokens", 0),
        )
        for row in rows
        for stats in [json.loads(row["stats"])]
    ]


def _rows(curve: Sequence[Point], wall_s: float) -> list[Row]:
    evaluated = [point.accuracy for point in curve if point.accuracy is not None]
    rewards = [point.reward for point in curve if point.reward is not None]
    training_s = curve[-1].seconds
    return [
        Row("accuracy_before", evaluated[0], "held-out greedy accuracy"),
        Row("accuracy_after", evaluated[-1], "held-out greedy accuracy"),
        Row("accuracy_best", max(evaluated), "held-out greedy accuracy"),
        Row("reward_first", statistics.fmean(rewards[:WINDOW]), f"sampled, first {WINDOW} steps"),
        Row("reward_last", statistics.fmean(rewards[-WINDOW:]), f"sampled, last {WINDOW} steps"),
        Row("steps", len(rewards), "steps"),
        Row("wall", wall_s, "s, process start to end"),
        Row("training", training_s, "s, first evaluation to last step, evaluations included"),
        Row("throughput", sum(point.tokens for point in curve) / training_s, "tokens/s trained on"),
    ]


def _plot(curve: Sequence[Point], path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    sampled = [(point.step, point.reward) for point in curve if point.reward is not None]
    greedy = [(point.step, point.accuracy) for point in curve if point.accuracy is not None]
    axes.plot(*zip(*sampled, strict=True), linewidth=0.8, alpha=0.6, label="training, sampled")
    axes.plot(*zip(*greedy, strict=True), marker="o", label="held out, greedy")
    axes.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
