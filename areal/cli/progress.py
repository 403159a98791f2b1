"""A progress bar over a training run: the observer the command line puts on a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def run_with_progress(config: Any, console: Any, *, title: str, metric: str) -> None:
    """Run the experiment `config` describes; show steps done, `metric` and the time left.

    Where nobody can watch a bar grow (a file, a pipe) the run's own lines tell the story.
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
    # The bar tells the story; warnings and errors still come through.
    with logging.quiet(), Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=None, value="")

        def on_step(step: int, total: int, stats: Mapping[str, float]) -> None:
            value = f"{metric.rpartition('/')[2]} {stats[metric]:.3f}"
            progress.update(bar, completed=step, total=total, value=value)

        run_experiment(config, on_step=on_step)
