"""Schedulers start worker processes; `scheduler.type` chooses one."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from areal.infra.scheduler.local import LocalScheduler

if TYPE_CHECKING:
    from areal.api.config.run import SchedulerConfig
    from areal.api.scheduler_api import Job, Scheduler


def open_scheduler(config: SchedulerConfig, jobs: Sequence[Job], *, logs: Path) -> Scheduler:
    """`jobs` are all jobs of the run. `logs` is the folder of the workers' logs, for schedulers
    that write them."""
    if config.type == "local":
        return LocalScheduler(logs)
    if config.type == "slurm":
        raise ValueError(
            "scheduler.type: slurm is a job to submit: areal launch slurm --script SCRIPT.py "
            "FILE.yaml (or areal train FILE.yaml), or set it to ray inside a Ray cluster"
        )
    if importlib.util.find_spec("ray") is None:
        raise ValueError("scheduler.type: ray is not installed: pip install 'areal[ray]'")
    from areal.infra.scheduler.ray import RayScheduler

    return RayScheduler(jobs, placement=config.placement)
