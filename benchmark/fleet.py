"""A fleet on a Ray cluster: what a sample costs the controller with 1 to 64 servers, and a run that
loses machines.

    python benchmark/fleet.py --nodes 32 --servers 1 8 64 --ranks 16 --episodes 20000
    python benchmark/fleet.py --nodes 4 --servers 1 8 --ranks 2 --episodes 2000

Real: Ray with many nodes on this machine (resources are only numbers there), its scheduler of
areal, servers as children of its workers and their replacement, the client with its router, and
the rollout side of benchmark/controller.py: executor, gate, ledger, run database. Stand-ins: the
model (generation_stand_in.py waits in place of it) and training: the first rank tells the servers
of a new version by its copy of the client, as that of a run does, the others answer and sleep.

After the largest fleet was measured, a tenth of the nodes, at least one, is killed at random. The
run goes on until `--after` more batches are trained; then the ledger must balance: every prompt has
one state, and none has failed.

`cpu` is what one sample costs the event loop's thread, which other programs on the machine change
little; `flat` is that of the largest fleet over that of the smallest.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from controller import GROUP_SIZE, Controller, Load
from fleet_parts import launch_stand_in
from fleet_ranks import meta_of
from report import Row, print_table, write_json

from areal.api.scheduler_api import Job, SchedulingSpec
from areal.api.scratch import ScratchFolder
from areal.engine.remote.native import NativeRemoteEngine
from areal.engine.remote.server_process import HostedServer, ServerProcess
from areal.utils.fs import raise_file_limit
from areal.utils.hosted_object import HostedObject
from areal.utils.stacks import descendants

PATIENCE_S = 900.0
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
}
GROUP_S = 5.0  # how long a group lasts, in the mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=20_000, help="in flight")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured part, per fleet")
    parser.add_argument("--after", type=int, default=5, help="batches after the kill")
    parser.add_argument("--seed", type=int, default=0, help="which nodes are killed")
    parser.add_argument("--json", help="also write the report to this file")
    args = parser.parse_args()
    raise_file_limit()
    rows = [Row("nodes", args.nodes, "of Ray, on this machine"), Row("ranks", args.ranks, "")]
    with ray_cluster(args) as cluster:
        for number in sorted(args.servers):
            is_last = number == max(args.servers)
            rows += measure(number, args, cluster if is_last else None)
    costs = [row.value for row in rows if row.name.endswith("_cpu")]
    rows.append(Row("flat", costs[-1] / costs[0], "cpu, largest over smallest fleet"))
    rows.append(Row("load_average", os.getloadavg()[0], "of the last minute"))
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


@contextmanager
def ray_cluster(args: argparse.Namespace) -> Iterator[Any]:
    """A head without room for workers, and nodes with room for twice their share of them: what a
    killed node had finds another place."""
    os.environ.update(RAY_SETTINGS)
    import ray
    from ray.cluster_utils import Cluster

    share = -(-(max(args.servers) + args.ranks) // args.nodes)
    each = {"object_store_memory": 80 << 20, "include_log_monitor": False}
    head = {"num_cpus": 0, "include_dashboard": False, "no_monitor": True, **each}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(args.nodes):
            cluster.add_node(num_cpus=2 * share, num_gpus=0, wait=False, **each)
        cluster.wait_for_nodes(timeout=PATIENCE_S)
        os.environ["RAY_ADDRESS"] = cluster.address
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def measure(num_servers: int, args: argparse.Namespace, cluster: Any | None) -> list[Row]:
    """With a `cluster` some of its nodes are killed in the end."""
    load = Load(f"{num_servers}_servers", args.episodes, GROUP_S)
    with ExitStack() as stack:
        fleet = Fleet(num_servers, args.ranks, load, stack)
        controller = Controller(load, 0, stack, fleet.engine, fleet.publish)
        controller.train(until=time.monotonic() + 1.2 * load.group_s)
        probe = controller.start_probe()
        cpu_began, began = controller.loop_cpu_s(), time.monotonic()
        before = controller.num_samples
        controller.train(until=began + args.seconds)
        wall_s = time.monotonic() - began
        samples = controller.num_samples - before
        cpu_s = controller.loop_cpu_s() - cpu_began
        in_flight = GROUP_SIZE * sum(probe.running) / max(1, len(probe.running))
        below = [os.getpid(), *descendants(os.getpid())]
        rows = {
            "processes": (len(below), "of Ray, servers, ranks and this one"),
            "memory": (sum(map(own_bytes, below)) / 2**30, "GiB of them all, shared pages once"),
            "samples": (samples / wall_s, "samples/s"),
            "episodes": (in_flight, "in groups that run, mean"),
            "cpu": (1e6 * cpu_s / max(1, samples), "us of the loop's thread per sample"),
        }
        if cluster is not None:
            rows |= survive(controller, fleet, cluster, args)
    return [Row(f"{load.name}_{name}", value, unit) for name, (value, unit) in rows.items()]


def own_bytes(pid: int) -> int:
    """Memory of a process; what several share counts in part for each. 0 if it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def survive(
    controller: Controller, fleet: Fleet, cluster: Any, args: argparse.Namespace
) -> dict[str, tuple[float, str]]:
    """Kill nodes, go on, and check the ledger. RuntimeError if it does not balance."""
    nodes = list(cluster.worker_nodes)
    doomed = random.Random(args.seed).sample(nodes, max(1, len(nodes) // 10))
    for node in doomed:
        cluster.remove_node(node, allow_graceful=False)
    before, began = controller.num_steps, time.monotonic()
    while controller.num_steps < before + args.after:
        controller.train(until=time.monotonic())
    back_s = time.monotonic() - began
    stats = fleet.engine.take_counts()
    controller.close()
    counts = controller.ledger.balance()
    if counts["failed"]:
        raise RuntimeError(f"prompts have failed: {counts}")
    return {
        "nodes_killed": (len(doomed), f"of {len(nodes)}"),
        "servers_after": (len(fleet.engine.servers), "that serve"),
        "requests_resent": (stats.get("requests_resent", 0), "lost with their server, sent again"),
        "batches_after": (args.after, f"trained in {back_s:.1f} s"),
        "prompts": (counts["total"], "in the ledger, which balances"),
        "failed": (counts["failed"], "prompts"),
    }


class Fleet:
    """Servers and ranks in Ray's workers, and the client of the servers."""

    def __init__(self, num_servers: int, num_ranks: int, load: Load, stack: ExitStack) -> None:
        from areal.infra.scheduler.ray import RayScheduler

        self._scheduler = RayScheduler(placement="SPREAD")
        stack.callback(self._scheduler.delete_workers)
        folder = stack.enter_context(ScratchFolder("fleet"))
        processes = self._start_servers(num_servers, load, stack)
        addresses = [process.address for process in processes]
        self.engine = NativeRemoteEngine(
            addresses,
            "none",
            processes=processes,
            max_restarts=2 * num_servers,
            setup_timeout_s=PATIENCE_S,
            address_file=Path(folder) / "servers.json",
        )
        self.engine.initialize()
        self._ranks = self._start_ranks(num_ranks)

    def publish(self, version: int) -> None:
        """As a trainer does: the first rank sends, the others take part, the owner notes it."""
        self.engine.expect_weights(version)
        for rank in self._ranks:
            while rank.ask("update_weights", version) is None:  # its node was killed
                rank.start("start")
        self.engine.note_weights(meta_of(version))

    def _start_servers(self, count: int, load: Load, stack: ExitStack) -> list[ServerProcess]:
        options = {"token": "none", "mean_s": load.mean_s, "setup_timeout_s": PATIENCE_S}

        def start(worker) -> ServerProcess:
            hosted = HostedServer(
                self._scheduler, worker, launch_stand_in, options, setup_timeout_s=PATIENCE_S
            )
            process = ServerProcess(hosted.launch)
            stack.callback(process.close)
            return process

        with ThreadPoolExecutor(min(count, 16)) as pool:
            return list(pool.map(start, self._workers("rollout", count)))

    def _start_ranks(self, count: int) -> list[HostedObject]:
        ranks = [
            HostedObject(
                self._scheduler,
                worker,
                "fleet_ranks.Rank",
                lambda worker, index=index: {"client": None if index else self.engine},
                setup_timeout_s=PATIENCE_S,
            )
            for index, worker in enumerate(self._workers("actor", count))
        ]
        with ThreadPoolExecutor(min(count, 16)) as pool:
            list(pool.map(lambda rank: rank.start("start"), ranks))
        return ranks

    def _workers(self, role: str, count: int):
        self._scheduler.create_workers(Job(role, count, [SchedulingSpec(cpu=1, gpu=0)]))
        return self._scheduler.get_workers(role, PATIENCE_S)


if __name__ == "__main__":
    main()
