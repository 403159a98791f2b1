"""A Ray cluster of many nodes on one machine, for benchmark/fleet.py.

A node is a raylet and two agents: about 0.14 GB, and some three seconds of a core to start. Nodes
start one after the other, and nothing here takes slow for dead: a machine that is busy with other
work needs many times the time that Ray grants by default.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PATIENCE_S = 900.0
AT_ONCE = 8  # workers that start together
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # Dozens of nodes and workers start on few cores; what is slow is not dead.
    "RAY_raylet_start_wait_time_s": "900",
    "RAY_worker_register_timeout_seconds": "900",
    "RAY_agent_register_timeout_ms": "900000",
    # A killed node refuses the connection, which counts at once.
    "RAY_health_check_timeout_ms": "120000",
    # Statistics of dozens of nodes, which nobody reads here.
    "RAY_metrics_report_interval_ms": "120000",
    "RAY_event_stats": "0",
    "RAY_worker_niceness": "5",  # by default 15, which starves beside other programs
}


@contextmanager
def ray_cluster(num_nodes: int, per_node: int) -> Iterator[Any]:
    """A head without room for workers, and nodes with room for twice their share of them: what a
    killed node had finds another place."""
    os.environ.update(RAY_SETTINGS)
    import ray
    from ray.cluster_utils import Cluster

    each = {"object_store_memory": 80 << 20, "include_log_monitor": False}
    head = {"num_cpus": 0, "include_dashboard": False, "no_monitor": True, **each}
    cluster = Cluster()
    base = tempfile.mkdtemp(prefix="fleet", dir="/tmp")  # short: sockets are named below it
    # Ray also notes its address below this folder, and expects that there is one.
    os.environ["RAY_TMPDIR"] = base
    temp = Path(base, "ray")
    temp.mkdir()
    try:
        add_node(cluster, temp, **head)
        for number in range(num_nodes):
            add_node(cluster, temp, num_cpus=2 * per_node, num_gpus=0, **each)
            if (number + 1) % AT_ONCE == 0:
                say(f"{number + 1} of {num_nodes} nodes")
        cluster.wait_for_nodes(timeout=PATIENCE_S)
        os.environ["RAY_ADDRESS"] = cluster.address
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(base, ignore_errors=True)


class NodePorts:
    """A node of Ray ends if the agents it starts have not written their ports to files within 15 s,
    which a busy machine exceeds. Here the ports are chosen, and the file that is read anyway is
    there: `tell` writes it."""

    NAMES = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port")
    TOLD = "dashboard_agent_listen_port"

    def __init__(self) -> None:
        names = (*self.NAMES, self.TOLD)
        with ExitStack() as stack:
            probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
            self._ports = {
                name: probe.getsockname()[1] for name, probe in zip(names, probes, strict=True)
            }
        self._node_id = secrets.token_hex(28)

    @property
    def options(self) -> dict[str, Any]:
        env = {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": self._node_id}
        return {"env_vars": env, **self._ports}

    def tell(self, temp: Path) -> None:
        """Into the folder of Ray's session, which the head makes."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for session in temp.glob("session_2*"):
                (session / f"{self.TOLD}_{self._node_id}").write_text(str(self._ports[self.TOLD]))
                return
            time.sleep(0.01)


def add_node(cluster: Any, temp: Path, **options: Any) -> None:
    ports = NodePorts()
    telling = threading.Thread(target=ports.tell, args=(temp,), name="ports", daemon=True)
    telling.start()
    cluster.add_node(wait=False, temp_dir=str(temp), **ports.options, **options)
    telling.join()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
