"""Learning curves with and without training in FP8, several seeds of each: the demo's GRPO.

    areal demo --out runs/demo
    python benchmark/fp8_curves.py --model runs/demo/arithmetic/sft/model --json FILE --plot PNG
    python benchmark/fp8_curves.py --recipe examples/smollm2/grpo.yaml --model FOLDER --json FILE \
        [KEY=VALUE ...]
    python benchmark/fp8_curves.py --results FILE [FILE ...] --plot PNG

Each run is `areal train` of the recipe in a process of its own, all of them at once: the same
model, data, steps and keys, `plain` in the trainer's default precision (bfloat16 on a GPU, float32
on a CPU), `fp8` with archon.fp8_config.mode blockwise, `fp8_ffn` the same but for layers of
attention, and `fp8_server` with servers in FP8 as well, whose caches the trainer rounds like them;
there the evaluations are in FP8 too. The band is what the seeds of `plain` span at an evaluation;
`MODE_inside` is the share of evaluations where the mean of a mode lies within it or above.
--results draws what was measured, of several files with the same steps and keys together, and
writes it into one with --json.
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

_BLOCKWISE = {"actor.archon.fp8_config.mode": "blockwise"}
_SERVED = {"native.dtype": "fp8", "actor.archon.fp8_forward": "true"}
_NO_ATTENTION = {"actor.archon.fp8_config.exclude_modules": "[attention]"}
MODES = {
    "plain": {},
    "fp8": _BLOCKWISE,
    "fp8_ffn": _BLOCKWISE | _NO_ATTENTION,
    "fp8_server": _BLOCKWISE | _SERVED,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="folder of the warm-started model every run begins with")
    source.add_argument("--results", nargs="+", metavar="FILE", help="draw these, run nothing")
    parser.add_argument(
        "--recipe", default=RECIPES / "arithmetic_grpo.yaml", help="trained by GRPO"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=240, help="training steps per run")
    parser.add_argument("--json", metavar="FILE", help="write rows and curves")
    parser.add_argument("--plot", metavar="PNG", help="draw the curves")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further keys")
    args = parser.parse_intermixed_args()
    if args.results:
        read = [json.loads(Path(file).read_text(encoding="utf-8")) for file in args.results]
        runs = [(results["steps"], results.get("overrides", [])) for results in read]
        if any(run != runs[0] for run in runs):
            raise SystemExit("--results: the files differ in steps or keys; give each by itself")
        steps, overrides = runs[0]
        curves = {
            name: Curve([tuple(point) for point in points])
            for results in read
            for name, points in results["curves"].items()
        }
    else:
        steps, overrides = args.steps, args.overrides
        curves = train_all(args)
    rows = make_rows(curves)
    print_table(rows)
    if args.json:
        points = {name: curve.points for name, curve in curves.items()}
        write_json(args.json, rows, steps=steps, overrides=overrides, curves=points)
    if args.plot:
        plot_curves(Path(args.plot), curves, title="GRPO", label="held-out accuracy")


def train_all(args: argparse.Namespace) -> dict[str, Curve]:
    names = [(mode, seed) for mode in args.modes for seed in args.seeds]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(names)) as pool:
        runs = {
            f"{mode}_{seed}": pool.submit(train, args, Path(folder), mode, seed)
            for mode, seed in names
        }
        return {name: run.result() for name, run in runs.items()}


def train(args: argparse.Namespace, folder: Path, mode: str, seed: int) -> Curve:
    keys = {
        "cluster.fileroot": folder,
        "experiment_name": "fp8",
        "trial_name": f"{mode}_{seed}",
        "seed": seed,
        "actor.path": Path(args.model).resolve(),
        "total_train_steps": args.steps,
        "evaluator.freq_steps": max(args.steps // 10, 1),
        **MODES[mode],
    }
    arguments = [f"{key}={value}" for key, value in keys.items()]
    command = [sys.executable, "-m", "areal.cli.main", "train", str(args.recipe)]
    command += [*arguments, *args.overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{mode}, seed {seed}: {done.stderr.strip()[-2000:]}")
    return read_curve(folder / "fp8" / f"{mode}_{seed}" / "run.db", "eval/reward")


def make_rows(curves: dict[str, Curve]) -> list[Row]:
    by_mode = {
        mode: [curve for name, curve in curves.items() if name.rpartition("_")[0] == mode]
        for mode in MODES
    }
    rows = [
        Row(f"{name}_accuracy", curve.final, "held-out greedy accuracy at the end")
        for name, curve in curves.items()
    ]
    for mode, found in by_mode.items():
        if found:
            final = statistics.fmean(curve.final for curve in found)
            rows.append(Row(f"{mode}_accuracy", final, "mean of the seeds"))
        if found and mode != "plain" and by_mode["plain"]:
            rows += _beside(mode, _accuracies(found), _accuracies(by_mode["plain"]))
    return rows


def _beside(
    mode: str, found: Sequence[tuple[float, ...]], plain: Sequence[tuple[float, ...]]
) -> list[Row]:
    pairs = list(zip(found, plain, strict=True))
    inside = statistics.fmean(statistics.fmean(own) >= min(band) for own, band in pairs)
    gap = statistics.fmean(statistics.fmean(own) - statistics.fmean(band) for own, band in pairs)
    return [
        Row(f"{mode}_inside", inside, "share of the evaluations"),
        Row(f"{mode}_gap", gap, f"{mode} less plain, mean of the evaluations"),
    ]


def _accuracies(curves: Sequence[Curve]) -> list[tuple[float, ...]]:
    """Of every evaluation, those of the seeds."""
    return list(zip(*([value for _, _, value in curve.points] for curve in curves), strict=True))


if __name__ == "__main__":
    main()
