"""Joins the Ray cluster of a run and returns when it is whole and large enough.

    RAY_ADDRESS -> that cluster, once `num_nodes` machines are alive; none -> one on this machine

A run that starts before its machines are there, or that needs more than they have, would wait for
workers nobody can start; here it is answered at once, or after a deadline, with numbers.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import ray

from areal.infra.scheduler.ray import check_fits, join_cluster, resources_of
from areal.utils import logging

if TYPE_CHECKING:
    from areal.api.config.experiment import BaseExperimentConfig
    from areal.api.scheduler_api import Job

logger = logging.getLogger("RayLauncher")

_POLL_S = 0.5


def open_cluster(config: BaseExperimentConfig, *, timeout_s: float) -> None:
    """This process is a driver of the cluster afterwards, and stays one."""
    address, num_nodes = os.environ.get("RAY_ADDRESS"), config.cluster.n_nodes
    if address is None and num_nodes > 1:
        raise ValueError(
            f"cluster.n_nodes: {num_nodes} machines need a Ray cluster: name one by --address "
            "HOST:PORT or RAY_ADDRESS, or set cluster.n_nodes=1"
        )
    deadline = time.monotonic() + timeout_s
    if address is not None:
        _wait_for_port(address, deadline)
    jobs = config.jobs()
    join_cluster(jobs)
    _wait_for_nodes(num_nodes, deadline)
    check_resources(jobs)


def check_resources(jobs: Sequence[Job]) -> None:
    """The workers of all roles together find room on the cluster."""
    bundles = [resources_of(job, index) for job in jobs for index in range(job.replicas)]
    check_fits(" and ".join(job.role for job in jobs), bundles)


def _wait_for_port(address: str, deadline: float) -> None:
    """Ray gives up on a head that is not there yet."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:  # "auto", "ray://...": Ray's own business
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
