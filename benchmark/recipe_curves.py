"""Learning curves of the recipes that algorithms.py leaves out: teachers, preferences, SFT.

    areal demo --out runs/demo
    python benchmark/recipe_curves.py --demo runs/demo --curves docs/assets/curves [--only dpo]

Runs each recipe below as a user would, after the demo whose models it begins with, and draws the
held-out figure it follows. A run the folder already has goes on where it stopped, and is only
drawn when it had ended. `KEY=VALUE` arguments go to every run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from algorithms import Curve, plot_curves, read_curve
from report import Row, print_table, write_json

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str  # of the picture
    file: str
    trial: str
    stat: str
    label: str


RECIPES = (
    Recipe(
        "distill",
        "distillation/arithmetic_distill.yaml",
        "distill",
        "eval/reward",
        "held-out accuracy",
    ),
    Recipe(
        "rl_and_distill",
        "distillation/arithmetic_grpo_distill.yaml",
        "rl_and_distill",
        "eval/reward",
        "held-out accuracy",
    ),
    Recipe(
        "rw",
        "alignment/arithmetic_rw.yaml",
        "rw",
        "eval/reward_accuracy",
        "held-out pairs ranked right",
    ),
    Recipe(
        "dpo",
        "alignment/arithmetic_dpo.yaml",
        "dpo",
        "eval/reward_accuracy",
        "held-out pairs ranked right",
    ),
    Recipe(
        "ipo",
        "alignment/arithmetic_ipo.yaml",
        "ipo",
        "eval/reward_accuracy",
        "held-out pairs ranked right",
    ),
    Recipe("sft", "sft/arithmetic_sft.yaml", "sft-plain", "eval/loss", "held-out loss"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", required=True, help="the folder of `areal demo --out`")
    parser.add_argument("--curves", required=True, metavar="FOLDER", help="where pictures go")
    parser.add_argument("--only", action="append", choices=[r.name for r in RECIPES])
    parser.add_argument("--json", metavar="FILE", help="also write the figures")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    rows: list[Row] = []
    for recipe in RECIPES:
        if not args.only or recipe.name in args.only:
            curve = train(recipe, Path(args.demo), args.overrides)
            plot_curves(
                Path(args.curves) / f"{recipe.name}.png",
                {"": curve},
                title=recipe.name,
                label=recipe.label,
            )
            rows.append(Row(f"{recipe.name}_before", curve.points[0][2], recipe.label))
            rows.append(Row(f"{recipe.name}_after", curve.final, recipe.label))
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def train(recipe: Recipe, demo: Path, overrides: list[str]) -> Curve:
    mine = [f"cluster.fileroot={demo}", "evaluator.eval_before_train=true", *overrides]
    command = [sys.executable, "-m", "areal.cli.main", "train"]
    subprocess.run([*command, str(EXAMPLES / recipe.file), *mine], check=True)
    return read_curve(demo / "arithmetic" / recipe.trial / "run.db", recipe.stat)


if __name__ == "__main__":
    main()
