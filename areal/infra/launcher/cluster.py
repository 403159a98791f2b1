"""Joins the Ray cluster of a run and waits until it is complete and large enough.

    RAY_ADDRESS -> that cluster, once `num_nodes` machines are alive; none -> one on this machine

Without this, a run whose machines are missing or too small would wait forever for its workers; here
it fails at once, or after a deadline, with the numbers.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import ray

from areal.infra.jobs import all_jobs
from areal.infra.scheduler.ray import check_fits, join_cluster, resources_of
from areal.utils import logging

if TYPE_CHECKING:
    from areal.api.config.experiment import BaseExperimentConfig
    from areal.api.scheduler_api import Job

logger = logging.getLogger("RayLauncher")

_POLL_S = 0.5


def open_cluster(config: BaseExperimentConfig, *, timeout_s: float) -> None:
    """Makes this process a driver of the cluster, for its lifetime."""
    address, num_nodes = os.environ.get("RAY_ADDRESS"), config.cluster.n_nodes
    if address is None and num_nodes > 1:
        raise ValueError(
            f"cluster.n_nodes: {num_nodes} machines need a Ray cluster: name one by --address "
            "HOST:PORT or RAY_ADDRESS, or set cluster.n_nodes=1"
        )
    deadline = time.monotonic() + timeout_s
    if address is not None:
        wait_for_port(address, deadline)
    jobs = all_jobs(config)
    join_cluster(jobs)
    _wait_for_nodes(num_nodes, deadline)
    check_resources(jobs)


def check_resources(jobs: Sequence[Job]) -> None:
    """The workers of all roles together fit on the cluster."""
    bundles = [resources_of(job, index) for job in jobs for index in range(job.replicas)]
    check_fits(" and ".join(job.role for job in jobs), bundles)


def wait_for_port(address: str, deadline: float) -> None:
    """Wait for the head, because Ray itself fails if it is not up yet."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:  # "auto", "ray://...": Ray resolves them
        return
    while True:
        try:
            with closing(socket.create_connection((host, int(port)), timeout=5)):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"no Ray head answers at {address}: {error}; start one there, or correct "
                    "--address or RAY_ADDRESS"
                ) from None
            time.sleep(_POLL_S)


def _wait_for_nodes(num_nodes: int, deadline: float) -> None:
    while len(alive := _alive_nodes()) < num_nodes:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{len(alive)} of cluster.n_nodes={num_nodes} machines joined the Ray cluster in "
                f"time: {', '.join(alive)}"
            )
        time.sleep(_POLL_S)
    logger.info("Ray cluster of %d machines: %s", len(alive), ", ".join(alive))


def _alive_nodes() -> list[str]:
    return [f"{n['NodeName']} ({n['NodeManagerAddress']})" for n in ray.nodes() if n["Alive"]]
