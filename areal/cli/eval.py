"""`areal eval TARGET... --suite NAME`: scores of models, with intervals; resumable.

Progress goes to stderr, the table to stdout, numbers to `--json FILE`, samples to the database
`--out`. The same command continues an evaluation that was killed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.cli.main import OVERRIDE

if TYPE_CHECKING:
    from areal.evaluation.report import Summary
    from areal.evaluation.runner import EvalPlan
    from areal.evaluation.settings import Options
    from areal.evaluation.store import ResultStore, SampleResult
    from areal.evaluation.targets import Target

ORACLE = "oracle"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Evaluates models: the final model of a run or its checkpoints, a folder, a hub name, a "
        "server. Without --suite a run is evaluated as its own evaluator does, with the same "
        "result. The same command continues what was interrupted."
    )
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="folder of a run or a model, hub name, or http://host:port of a server; "
        "key=value overrides, as for areal train, before or after the options",
    )
    parser.add_argument(
        "--suite", help="arithmetic, code, countdown, gsm8k, math, or a file of rows (JSON-lines)"
    )
    parser.add_argument("--config", metavar="FILE", help="a training config instead of a suite")
    parser.add_argument("--reward", metavar="NAME", help="name or import path of the reward")
    parser.add_argument(
        "--agent",
        metavar="NAME",
        help="workflow or agent, as a name or an import path; oracle: no model, the rows' own "
        "answers, to check the reward",
    )
    parser.add_argument("--n", type=int, metavar="N", help="samples of each problem")
    parser.add_argument("--k", metavar="K,...", help="of pass@k and maj@k; default: 1 and N")
    parser.add_argument(
        "--threshold", type=float, default=1.0, help="least reward that passes (default: 1)"
    )
    parser.add_argument("--limit", type=int, metavar="ROWS", help="only the first rows")
    parser.add_argument("--seed", type=int, help="of the samples; default: 1, or the run's")
    parser.add_argument(
        "--checkpoints", action="store_true", help="every checkpoint of a run, and its final model"
    )
    parser.add_argument(
        "--compare", nargs=2, metavar="TARGET", help="two targets, paired by problem"
    )
    parser.add_argument(
        "--out", default="eval.db", metavar="FILE", help="database of the samples (eval.db)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    parser.set_defaults(overrides=[])


def run(args: argparse.Namespace) -> int:
    targets, options = _read(args)
    from areal.utils.startup import importing

    with importing():
        from areal.evaluation.report import comparison_text, table
        from areal.evaluation.settings import load_settings
        from areal.evaluation.store import ResultStore

    settings = [load_settings(target, options) for target in targets]  # mistakes, before torch
    ks = _ks(args.k, settings[0].config)
    from areal.evaluation.runner import make_plan

    with ResultStore(args.out) as store:
        plans = [
            make_plan(target, found, limit=args.limit)
            for target, found in zip(targets, settings, strict=True)
        ]
        for plan in plans:
            _run_with_progress(plan, store)
        summaries = [_summary(plan, store, ks, args.threshold) for plan in plans]
    print(table(summaries))
    if len(curve := [s for s in summaries if s.evaluation.step is not None]) > 1:
        print(_curve(curve))
    compared = _compare(args, summaries)
    if compared is not None:
        print(comparison_text(*compared))
    if args.json is not None:
        _write_json(args, summaries, compared)
    return 0


def _read(args: argparse.Namespace) -> tuple[list[Target], Options]:
    from areal.evaluation.settings import Options
    from areal.evaluation.targets import ORACLE as ORACLE_TARGET
    from areal.evaluation.targets import find_targets

    overrides = [text for text in args.targets if OVERRIDE.match(text)] + args.overrides
    names = [*(args.compare or ()), *(t for t in args.targets if not OVERRIDE.match(t))]
    for name, least in (("n", 1), ("limit", 1), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}")
    options = Options(
        suite=args.suite,
        config=args.config,
        reward=args.reward,
        agent=args.agent,
        num_samples=args.n,
        seed=args.seed,
        overrides=tuple(overrides),
    )
    if args.agent == ORACLE:
        if names:
            raise ValueError(
                f"--agent oracle needs no model: leave out {', '.join(names)} (the rows of a run "
                "are those of --config FILE)"
            )
        return [ORACLE_TARGET], options
    if not names:
        raise ValueError("TARGET is missing: areal eval FOLDER_OR_HUB_NAME --suite gsm8k")
    return find_targets(names, checkpoints=args.checkpoints), options


def _ks(text: str | None, config: Any) -> list[int]:
    num_samples = config.eval_gconfig.n_samples
    if text is None:
        return sorted({1, num_samples})
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= num_samples for part in parts):
        raise ValueError(
            f"--k: expected numbers from 1 to the samples of a problem (--n {num_samples}), "
            f"separated by commas, got {text!r}"
        )
    return sorted({int(part) for part in parts})


def _summary(plan: EvalPlan, store: ResultStore, ks: list[int], threshold: float) -> Summary:
    from areal.evaluation.report import summarize

    return summarize(
        plan.evaluation,
        store.results(plan.evaluation.id),
        num_problems=len(plan.rows),
        num_samples=plan.num_samples,
        ks=ks,
        threshold=threshold,
        votes=plan.settings.votes,
    )


def _run_with_progress(plan: EvalPlan, store: ResultStore) -> None:
    from areal.evaluation.runner import run_missing

    total = len(plan.rows) * plan.num_samples
    missing = len(store.missing(plan.evaluation.id, len(plan.rows), plan.num_samples))
    with _bar(plan.target.name, total, done=total - missing) as advance:
        run_missing(plan, store, advance)


@contextmanager
def _bar(title: str, total: int, *, done: int) -> Iterator[Callable[[SampleResult], None]]:
    """A bar on a terminal; else one line at the start, and areal's own log."""
    import sys

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from areal.utils import logging

    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"{title}: {done} of {total} samples are there", file=sys.stderr, flush=True)
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[value]}"),
        TimeRemainingColumn(),
    )
    rewards: list[float] = []
    with logging.quiet(), Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=total, completed=done, value="")

        def advance(result: SampleResult) -> None:
            rewards.append(result.reward or 0.0)
            value = f"reward {sum(rewards) / len(rewards):.3f}"
            progress.update(bar, advance=1, value=value)

        yield advance


def _curve(summaries: list[Summary]) -> str:
    from areal.cli.demo import draw_terminal

    name = next(iter(summaries[0].metrics))
    values = [summary.metrics[name].value for summary in summaries]
    first, last = summaries[0].evaluation.step, summaries[-1].evaluation.step
    assert first is not None and last is not None
    title = f"{name} of the checkpoints, steps {first} to {last}"
    return draw_terminal(values, title=title, steps=(first, last))


def _compare(args: argparse.Namespace, summaries: list[Summary]) -> Any:
    from areal.evaluation.report import compare_summaries

    if args.compare is None:
        return None
    by_name = {summary.evaluation.target: summary for summary in summaries}
    a, b = (by_name.get(name) for name in args.compare)
    if a is None or b is None or a is b:
        raise ValueError(f"--compare: expected two different models, got {' '.join(args.compare)}")
    if a.evaluation.identity["rows"] != b.evaluation.identity["rows"]:
        raise ValueError("--compare: the two were evaluated on different rows: give --suite")
    return a, b, compare_summaries(a, b)


def _write_json(args: argparse.Namespace, summaries: list[Summary], compared: Any) -> None:
    from areal.utils.fs import atomic_write_text

    content: dict[str, Any] = {
        "suite": summaries[0].evaluation.suite,
        "samples_per_problem": summaries[0].num_samples,
        "threshold": args.threshold,
        "database": str(Path(args.out).absolute()),
        "evaluations": [summary.as_json() for summary in summaries],
    }
    if compared is not None:
        a, b, found = compared
        pair = {"a": a.evaluation.target, "b": b.evaluation.target}
        content["comparison"] = {**pair, "metric": next(iter(a.metrics)), **asdict(found)}
    atomic_write_text(Path(args.json), json.dumps(content, indent=1) + "\n")
