"""Learning curves with and without training in FP8, several seeds of each: the demo's GRPO.

    areal demo --out runs/demo
    python benchmark/fp8_curves.py --model runs/demo/arithmetic/sft/model --json FILE --plot PNG
    python benchmark/fp8_curves.py --recipe examples/smollm2/grpo.yaml --model FOLDER --json FILE \
        [KEY=VALUE ...]
    python benchmark/fp8_curves.py --results FILE --plot PNG

Each run is `areal train` of the recipe in a process of its own, all of them at once: the same
model, data, steps and keys, in the trainer's default precision (`plain`: bfloat16 on a GPU, float32
on a CPU) and with archon.fp8_config.mode blockwise (`fp8`). Servers do not differ. The band is what
the seeds of `plain` span at an evaluation; `inside` is the share of evaluations where the mean of
`fp8` lies within it or above. The last form draws what was measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from algorithms import RECIPES, Curve, plot_curves, read_curve
from report import Row, print_table, write_json

MODES = {"plain": "disabled", "fp8": "blockwise"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="folder of the warm-started model every run begins with")
    source.add_argument("--results", metavar="FILE", help="draw these results, run nothing")
    parser.add_argument(
        "--recipe", default=RECIPES / "arithmetic_grpo.yaml", help="trained by GRPO"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=240, help="training steps per run")
    parser.add_argument("--json", metavar="FILE", help="write rows and curves")
    parser.add_argument("--plot", metavar="PNG", help="draw the curves")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further keys")
    args = parser.parse_intermixed_args()
    if args.results:
        read = json.loads(Path(args.results).read_text(encoding="utf-8"))["curves"]
        curves = {name: Curve([tuple(point) for point in points]) for name, points in read.items()}
    else:
        curves = train_all(args.recipe, args.model, args.seeds, args.steps, args.overrides)
    rows = make_rows(curves)
    print_table(rows)
    if args.json and not args.results:
        points = {name: curve.points for name, curve in curves.items()}
        write_json(args.json, rows, steps=args.steps, curves=points)
    if args.plot:
        plot_curves(Path(args.plot), curves, title="GRPO", label="held-out accuracy")


def train_all(
    recipe: str | Path, model: str, seeds: Sequence[int], steps: int, overrides: Sequence[str]
) -> dict[str, Curve]:
    names = [(mode, seed) for mode in MODES for seed in seeds]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(names)) as pool:
        runs = {
            f"{mode}_{seed}": pool.submit(
                train, recipe, Path(folder), model, mode, seed, steps, overrides
            )
            for mode, seed in names
        }
        return {name: run.result() for name, run in runs.items()}


def train(
    recipe: str | Path,
    folder: Path,
    model: str,
    mode: str,
    seed: int,
    steps: int,
    overrides: Sequence[str],
) -> Curve:
    keys = {
        "cluster.fileroot": folder,
        "experiment_name": "fp8",
        "trial_name": f"{mode}_{seed}",
        "seed": seed,
        "actor.path": Path(model).resolve(),
        "actor.archon.fp8_config.mode": MODES[mode],
        "total_train_steps": steps,
        "evaluator.freq_steps": max(steps // 10, 1),
    }
    arguments = [f"{key}={value}" for key, value in keys.items()]
    command = [sys.executable, "-m", "areal.cli.main", "train", str(recipe), *arguments, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{mode}, seed {seed}: {done.stderr.strip()[-2000:]}")
    return read_curve(folder / "fp8" / f"{mode}_{seed}" / "run.db", "eval/reward")


def make_rows(curves: dict[str, Curve]) -> list[Row]:
    by_mode = {
        mode: [curve for name, curve in curves.items() if name.startswith(mode)] for mode in MODES
    }
    rows = [
        Row(f"{name}_accuracy", curve.final, "held-out greedy accuracy at the end")
        for name, curve in curves.items()
    ]
    for mode, found in by_mode.items():
        rows.append(
            Row(f"{mode}_accuracy", statistics.fmean(c.final for c in found), "mean of the seeds")
        )
    evaluations = list(zip(*(_accuracies(by_mode[mode]) for mode in MODES), strict=True))
    inside = [statistics.fmean(fp8) >= min(plain) for plain, fp8 in evaluations]
    rows.append(Row("inside", statistics.fmean(inside), "share of the evaluations"))
    gap = [statistics.fmean(fp8) - statistics.fmean(plain) for plain, fp8 in evaluations]
    rows.append(Row("gap", statistics.fmean(gap), "fp8 less plain, mean of the evaluations"))
    return rows


def _accuracies(curves: Sequence[Curve]) -> list[tuple[float, ...]]:
    """Of every evaluation, those of the seeds."""
    return list(zip(*([value for _, _, value in curve.points] for curve in curves), strict=True))


if __name__ == "__main__":
    main()
