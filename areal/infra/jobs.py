"""The worker processes of a run as jobs of a scheduler: ranks, servers, rollout workers."""

from __future__ import annotations

from dataclasses import replace

from areal.api.config.experiment import BaseExperimentConfig, PPOConfig
from areal.api.scheduler_api import Job, SchedulingSpec


def all_jobs(config: BaseExperimentConfig) -> list[Job]:
    jobs = [model_job(config, role) for role, count in num_processes(config).items() if count]
    if isinstance(config, PPOConfig):
        if not config.rollout.api_url:
            jobs.append(server_job(config))
        if config.served_models():
            jobs.append(server_job(config.of_teacher(), "teacher"))
        if config.rollout.workers:
            jobs.append(rollout_worker_job(config))
    return jobs


def num_processes(config: BaseExperimentConfig) -> dict[str, int]:
    """Role -> number of its own worker processes; 0 for a role that runs in the controller or in
    another role's processes."""
    hosts = config.hosts()
    return {
        role: section.num_ranks if hosts[role] == role else 0
        for role, section in config.models().items()
    }


def model_job(config: BaseExperimentConfig, role: str) -> Job:
    """The ranks of one model."""
    section = config.models()[role]
    return Job(
        role=role,
        replicas=section.num_ranks,
        tasks=section.scheduling_spec or [SchedulingSpec()],
        scheduling_strategy=section.scheduling_strategy,
    )


def server_job(config: PPOConfig, role: str = "rollout") -> Job:
    """The inference servers, one worker each; those of a teacher by its view of the config."""
    rollout = config.rollout
    num_threads = config.server.threads * rollout.ranks_per_server
    specs = rollout.scheduling_spec or [SchedulingSpec()]
    return Job(
        role=role,
        replicas=rollout.num_servers,
        tasks=[replace(spec, cpu=spec.cpu or num_threads) for spec in specs],
        default_gpus=rollout.ranks_per_server,
    )


def rollout_worker_job(config: PPOConfig) -> Job:
    """A core each."""
    count, one_core = config.rollout.workers, [SchedulingSpec(cpu=1)]
    return Job("rollout_worker", count, one_core, default_gpus=0, overlapping=True)
