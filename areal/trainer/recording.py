"""Everything a run has kept of one step: enough to train it again.

    recording = read_recording("runs/math/first", step=7)

In: the run's folder, which is only read, also while the run goes on. Out: a Recording, or a
ValueError or FileNotFoundError that says why there is none, and of which steps there is. Loads no
torch, so that a mistake is answered at once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from areal.api.cli_args import PPOConfig, experiment_class, load_expr_config
from areal.api.scratch import ScratchFolder
from areal.rollout.ledger_balance import read_trained, steps_with_trajectories
from areal.run.database import Start, open_read_only, read_ledger_view, read_start, read_steps
from areal.run.fingerprint import run_identity, trainer_name
from areal.run.paths import RunPaths
from areal.run.recover import RecoverPoint, RecoverStore


@dataclass(frozen=True, slots=True)
class Recording:
    step: int  # counted from 0
    start: Start  # of the process that trained it
    config: PPOConfig
    statistics: dict[str, float]
    trajectories: list[bytes]  # as stored, in the order of the batch
    task_ids: list[int]  # of the trajectories
    point_before: RecoverPoint
    point_after: RecoverPoint | None
    points: Mapping[int, RecoverPoint]  # all of the run, by the last step in their weights
    database: Path


def newest_recording(folder: str | Path) -> Recording:
    """Of the newest step that can be trained again."""
    paths = RunPaths(Path(folder).absolute())
    with closing(open_read_only(paths.database)) as connection:
        stored = sorted(steps_with_trajectories(connection), reverse=True)
    why = (
        "no trajectory is stored, as those up to the newest recover point are dropped. Give its "
        f"config instead ({paths.config}), or train with recover.freq_steps=1"
    )
    for step in stored:
        try:
            return read_recording(folder, step)
        except ValueError as error:
            why = str(error)
    raise ValueError(f"{paths.root}: no step of it can be computed again: {why}")


def read_recording(folder: str | Path, step: int) -> Recording:
    paths = RunPaths(Path(folder).absolute())  # ranks may have another working directory
    with closing(open_read_only(paths.database)) as connection:
        connection.execute("BEGIN")  # one snapshot of a live run
        ledger = read_ledger_view(connection, paths.database)
        statistics = dict(read_steps(connection))
        _check_trained(step, list(statistics), paths)
        start = _start(connection, step, paths)
        config = _load_config(start, paths)
        identity = run_identity(config, start.dataset_size)
        store = RecoverStore(paths.recover, lambda: ledger, identity=identity)
        points = {point.global_step: point for point in store.points()}
        batch = read_trained(connection, step)
        kept = [data for _, data in batch if data is not None]
        if step - 1 not in points or len(kept) < len(batch):
            stored = steps_with_trajectories(connection)
            whole = sorted(n for n in stored if n - 1 in points and n in statistics)
            raise ValueError(_why_not(step, whole, points, paths))
    before, after = points[step - 1], points.get(step)
    return Recording(
        step=step,
        start=start,
        config=config,
        statistics=statistics[step],
        trajectories=kept,
        task_ids=[task_id for task_id, _ in batch],
        point_before=before,
        point_after=after,
        points=points,
        database=paths.database,
    )


def _check_trained(step: int, recorded: list[int], paths: RunPaths) -> None:
    steps = [number for number in recorded if number >= 0]  # -1 is before the first
    if step not in steps:
        there = f"its steps are {steps[0]} to {steps[-1]}" if steps else "it has none yet"
        raise ValueError(f"--step {step}: {paths.root} has not trained this step; {there}")


def _start(connection: sqlite3.Connection, step: int, paths: RunPaths) -> Start:
    start = read_start(connection, step)
    if start is None:
        raise ValueError(f"{paths.database} does not say with which config step {step} was trained")
    return start


def _load_config(start: Start, paths: RunPaths) -> PPOConfig:
    with ScratchFolder("replay") as scratch:
        file = scratch / "config.yaml"
        file.write_text(start.config, encoding="utf-8")
        config, _ = load_expr_config([str(file)], experiment_class([str(file)]))
    if not isinstance(config, PPOConfig):
        raise ValueError(
            f"{paths.root} is a run of trainer: {trainer_name(config)}; only trainer: ppo records "
            "trajectories to train a step on again"
        )
    return config


def _why_not(
    step: int, whole: list[int], points: Mapping[int, RecoverPoint], paths: RunPaths
) -> str:
    lacking = f"trajectories of step {step} were deleted"
    if step == 0:
        lacking = "no recover point is written before the first step"
    elif step - 1 not in points:
        lacking = f"there is no recover point {paths.recover / f'step_{step - 1}'}"
    others = f"steps that can be: {', '.join(map(str, whole))}" if whole else "no step of it can be"
    return (
        f"--step {step}: it cannot be trained again, because {lacking}; {others}. A run keeps more "
        "with recover.mode=on, recover.freq_steps=1 and a larger recover.keep"
    )
