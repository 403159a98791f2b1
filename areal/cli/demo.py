"""`areal demo`: from nothing to a rising reward, on a CPU, in minutes.

    tiny model + tokenizer  ->  warm start (SFTTrainer)  ->  asynchronous GRPO (PPOTrainer)

Each stage is an ordinary run of a file under `examples/math/` inside the folder `--out`, so the
same command resumes a demo that was interrupted or killed. A progress bar shows each run
(`run_with_progress`). The reward of every step is drawn as a braille plot in the terminal, and with
the greedy accuracy as a PNG file (`draw_terminal`, `save_png`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SFT_RECIPE = "arithmetic_sft.yaml"
GRPO_RECIPE = "arithmetic_grpo.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes a small Qwen3-shaped model, warm-starts it, and trains it by "
        "asynchronous GRPO on arithmetic. Run it again to resume."
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override the GRPO config"
    )
    parser.add_argument(
        "--out", default="runs/demo", help="folder of the demo (default: runs/demo)"
    )
    parser.add_argument("--fresh", action="store_true", help="delete the folder and start over")
    parser.add_argument(
        "--json", action="store_true", help="print the result as a last line of JSON"
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console(stderr=args.json)
    out = Path(args.out)
    if args.fresh:
        _delete_demo(out)
    began = time.perf_counter()
    try:
        result = _run_stages(out, args.overrides, console)
    except KeyboardInterrupt:
        console.print(f"\nStopped. The same command resumes it ({out}).")
        raise
    seconds = round(time.perf_counter() - began, 1)
    _show(result, seconds, console)
    if args.json:
        answer = {
            "accuracy_before": result.accuracy_before,
            "accuracy_after": result.accuracy_after,
            "seconds": seconds,
            "run_dir": str(result.run_dir),
        }
        print(json.dumps(answer), flush=True)
    return 0


@dataclass(frozen=True, slots=True)
class DemoResult:
    run_dir: Path
    rewards: list[float]  # mean sampled reward of every step
    evaluations: list[tuple[int, float]]  # (steps trained, greedy accuracy on held-out problems)

    @property
    def accuracy_before(self) -> float:
        return self.evaluations[0][1]

    @property
    def accuracy_after(self) -> float:
        return self.evaluations[-1][1]


def _run_stages(out: Path, overrides: list[str], console: Any) -> DemoResult:
    from areal.run.paths import RunPaths

    fileroot = f"cluster.fileroot={out}"
    grpo = _load(GRPO_RECIPE, [fileroot, *overrides])
    _check(grpo, out)  # before the warm start, which takes minutes
    console.print(f"[bold]areal demo[/bold]  folder: {out}")
    if not (out / "tiny_model").is_dir():
        make_model(out / "tiny_model")
        console.print(f"made a small Qwen3-shaped model: {out / 'tiny_model'}")
    sft = _load(SFT_RECIPE, [fileroot])
    if not RunPaths.of(sft).model.is_dir():
        run_with_progress(sft, console, title="warm start (SFT)", metric="loss")
    run_with_progress(grpo, console, title="async GRPO", metric="rollout/reward")
    paths = RunPaths.of(grpo)
    return _read_result(paths.root, paths.database)


def _check(grpo: Any, out: Path) -> None:
    """The checks of `areal check` without the model, which the first stages create."""
    from areal.cli.check import check_fileroot, check_names

    check_fileroot("--out", str(out))
    check_names(grpo)
    if not grpo.evaluator.eval_before_train:
        raise ValueError(
            "evaluator.eval_before_train must stay true: the demo compares the accuracy before "
            "and after"
        )


def make_model(folder: Path) -> None:
    """A Qwen3-shaped model with random weights and a character tokenizer."""
    import torch

    from areal.dataset.arithmetic import build_char_tokenizer
    from areal.models.hf_io import build_model, save_hf
    from areal.utils.fs import atomic_folder

    with atomic_folder(folder, private=False) as scratch:
        tokenizer = build_char_tokenizer(scratch)
        config = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "initializer_range": 0.08,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "dtype": "float32",
        }
        model = build_model(config, device="cpu", dtype=torch.float32)
        model.init_weights(0)
        save_hf(model.named_hf_tensors(), config, scratch)


def _load(recipe: str, overrides: list[str]) -> Any:
    from areal.cli.train import load_config

    return load_config([recipe_path(recipe), *overrides])


def recipe_path(name: str) -> str:
    """The recipe in a checkout's examples/, or the copy in an installed package."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "examples" / "math", package / "examples" / "math"):
        if (folder / name).is_file():
            return str(folder / name)
    raise FileNotFoundError(f"{name} is missing from this installation: reinstall areal")


def _delete_demo(out: Path) -> None:
    """Delete `out` only if it is a demo's folder, so that a mistyped --out deletes nothing else."""
    if not out.exists():
        return
    if not (out / "tiny_model").is_dir():
        raise ValueError(f"--fresh: {out} was not made by areal demo; choose another --out")
    shutil.rmtree(out)


def _read_result(run_dir: Path, database: Path) -> DemoResult:
    from areal.run.database import open_read_only, read_steps

    with closing(open_read_only(database)) as connection:
        steps = read_steps(connection)
    rewards = [stats["rollout/reward"] for step, stats in steps if step >= 0]
    accuracies = [(s + 1, stats["eval/reward"]) for s, stats in steps if "eval/reward" in stats]
    return DemoResult(run_dir, rewards, accuracies)


def _show(result: DemoResult, seconds: float, console: Any) -> None:

    png = result.run_dir / "reward.png"
    save_png(png, result.rewards, result.evaluations, title="areal demo: asynchronous GRPO")
    console.print(draw_terminal(smooth(result.rewards, 10), title="sampled reward"), markup=False)
    before, after = f"{result.accuracy_before:.3f}", f"{result.accuracy_after:.3f}"
    console.print(
        f"\nheld-out greedy accuracy: [bold]{before}[/bold] after the warm start -> "
        f"[bold green]{after}[/bold green] after {len(result.rewards)} steps of asynchronous GRPO "
        f"({seconds:.0f} s)",
        soft_wrap=True,
    )
    console.print(f"curve: {png}")
    console.print(f"look at it: areal dash {result.run_dir.parent}", soft_wrap=True)
    if sys.stdout.isatty():
        console.print(
            "next: edit examples/math/arithmetic_grpo.yaml and run `areal train` on it, "
            "or start over with `areal demo --fresh`"
        )


def run_with_progress(config: Any, console: Any, *, title: str, metric: str) -> None:
    """Run the experiment of `config`; show steps done, `metric` and the time left.

    If the console is not a terminal, the run's own log lines are shown instead.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from areal.trainer.experiment import run_experiment
    from areal.utils import logging

    if not console.is_terminal:
        console.print(title)
        return run_experiment(config)
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[value]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # The bar replaces INFO lines; warnings and errors are still shown.
    with logging.quiet(), Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=None, value="")

        def on_step(step: int, total: int, stats: Mapping[str, float]) -> None:
            value = f"{metric.rpartition('/')[2]} {stats[metric]:.3f}"
            progress.update(bar, completed=step, total=total, value=value)

        run_experiment(config, on_step=on_step)


# Bit of a dot inside one braille cell, by row (top to bottom) and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Trailing mean over `window` values; the first points average over fewer."""
    out, total = [], 0.0
    for i, value in enumerate(values):
        total += value
        if i >= window:
            total -= values[i - window]
        out.append(total / min(i + 1, window))
    return out


def draw_terminal(
    values: Sequence[float],
    *,
    title: str,
    steps: tuple[int, int] | None = None,
    width: int = 60,
    height: int = 10,
) -> str:
    """`values` as a braille plot of `width` x `height` characters with the scale on the left.

    `steps`: those of the first and the last value; default: one value a step.
    """
    if not values:
        return f"{title}: no points yet"
    low, high = min(0.0, min(values)), max(1.0, max(values))
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]
    for x in range(columns):
        value = values[min(x * len(values) // columns, len(values) - 1)]
        y = round((1 - (value - low) / (high - low)) * (rows - 1))
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    lines = [f"{'':>6}{title}"]
    for row, line in enumerate(cells):
        level = high - (high - low) * row / (height - 1)
        label = f"{level:5.2f} " if row % 3 == 0 or row == height - 1 else " " * 6
        lines.append(label + "│" + "".join(chr(0x2800 + cell) for cell in line))
    lines.append(" " * 6 + "└" + "─" * width)
    first, last = (f"step {one}" for one in steps or (1, len(values)))
    lines.append(f"{'':>7}{first}{last:>{max(width - len(first), 1)}}")
    return "\n".join(lines)


def save_png(
    path: Path, rewards: Sequence[float], evaluations: Sequence[tuple[int, float]], *, title: str
) -> None:
    """The reward of every step, its running mean, and the evaluated (step, accuracy) points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(
        steps, smooth(rewards, 20), color="tab:blue", label="sampled reward, mean of 20 steps"
    )
    if evaluations:
        axes.plot(*zip(*evaluations, strict=True), "o-", color="tab:green", label="greedy accuracy")
    axes.set(xlabel="step", ylabel="reward", title=title, ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
