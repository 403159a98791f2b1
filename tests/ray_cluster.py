"""Ray clusters of several machines on this one, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest


@contextmanager
def ray_cluster() -> Iterator:
    """A cluster without machines yet, that of no one else: `add_node(num_cpus=2, num_gpus=0)`.

    Without Ray's dashboard, autoscaler and reader of logs, which no test asks for anything.
    """
    pytest.importorskip("ray", reason="scheduler.type=ray needs the extra `ray`")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
        # Processes that Ray starts ahead have no environment of ours, so none of them is ever used.
        patch.setenv("RAY_enable_worker_prestart", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        patch.setenv("RAY_ADDRESS", "")  # put back afterwards: `areal launch ray` sets it
        patch.delenv("RAY_ADDRESS")
        cluster = Cluster()
        quiet = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
        cluster.add_node = partial(cluster.add_node, **quiet)
        try:
            yield cluster
        finally:
            cluster.shutdown()
