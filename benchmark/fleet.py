"""A fleet on a Ray cluster: what a sample costs the controller with 1 to 64 servers, and a run that
loses machines.

    python benchmark/fleet.py --nodes 32 --servers 1 8 64 --ranks 16 --episodes 20000
    python benchmark/fleet.py --nodes 4 --servers 1 8 --ranks 2 --episodes 2000

Real: Ray with many nodes on this machine (resources are only numbers there), its scheduler of
areal, servers in its workers and their replacement, the client with its router, and the rollout
side of benchmark/controller.py: executor, gate, ledger, run database. Stand-ins: the model
(generation_stand_in.py waits in place of it, in a thread of its worker) and training: the first
rank tells the servers of a new version by its copy of the client, as that of a run does, the others
answer and sleep. All servers start once; the smaller fleets use some of them.

A node takes 0.14 GB and a worker 0.07, so the first line about 11 GB with the controller; each
takes some three seconds of a core to start, and they start a few at a time.

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from controller import GROUP_SIZE, Controller, Load
from fleet_cluster import AT_ONCE, PATIENCE_S, ray_cluster, say
from fleet_parts import launch_stand_in
from fleet_ranks import meta_of
from report import Row, print_table, write_json

from areal.api.scheduler_api import Job, SchedulingSpec, Worker
from areal.api.scratch import ScratchFolder
from areal.engine.remote.native import NativeRemoteEngine
from areal.engine.remote.server_control import ControlClient
from areal.engine.remote.server_process import Child, HostedServer, ServerProcess
from areal.utils.fs import raise_file_limit
from areal.utils.hosted_object import HostedObject
from areal.utils.stacks import descendants

# How long a group lasts, in the mean: 500 samples a second, which every fleet reaches on two cores.
# A rate that one does not reach compares a loop at rest with one that fights for its core.
GROUP_S = 40.0
MEAN_S = Load("", 0, GROUP_S).mean_s

T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=20_000, help="in flight")
    parser.add_argument("--seconds", type=float, default=40.0, help="measured part, per fleet")
    parser.add_argument("--after", type=int, default=5, help="batches after the kill")
    parser.add_argument("--seed", type=int, default=0, help="which nodes are killed")
    parser.add_argument("--json", help="also write the report to this file")
    args = parser.parse_args()
    raise_file_limit()
    per_node = -(-(max(args.servers) + args.ranks) // args.nodes)
    rows = [Row("nodes", args.nodes, "of Ray, on this machine"), Row("ranks", args.ranks, "")]
    with ray_cluster(args.nodes, per_node) as cluster, ExitStack() as stack:
        fleet = Fleet(max(args.servers), args.ranks, stack)
        for number in sorted(args.servers):
            is_last = number == max(args.servers)
            rows += measure(number, args, fleet, cluster if is_last else None)
    costs = [row.value for row in rows if row.name.endswith("_cpu")]
    rows.append(Row("flat", costs[-1] / costs[0], "cpu, largest over smallest fleet"))
    rows.append(Row("load_average", os.getloadavg()[0], "of the last minute"))
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def measure(
    num_servers: int, args: argparse.Namespace, fleet: Fleet, cluster: Any | None
) -> list[Row]:
    """With a `cluster` some of its nodes are killed in the end."""
    load = Load(f"{num_servers}_servers", args.episodes, GROUP_S)
    with ExitStack() as stack:
        say(f"{num_servers} servers")
        fleet.use(num_servers, stack)
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
    """Servers and ranks in Ray's workers, and a client of some of the servers.

    All of them are started once, a few at a time: on one machine the start of a worker costs
    seconds of a core. Those that no client uses do nothing.
    """

    engine: NativeRemoteEngine

    def __init__(self, num_servers: int, num_ranks: int, stack: ExitStack) -> None:
        from areal.infra.scheduler.ray import RayScheduler

        self._scheduler = RayScheduler(placement="SPREAD")
        stack.callback(self._scheduler.delete_workers)
        self._folder = Path(stack.enter_context(ScratchFolder("fleet")))
        self._servers = self._start_servers(num_servers)
        for server in self._servers:
            stack.callback(server.terminate)
        self._ranks = self._start_ranks(num_ranks)

    def use(self, num_servers: int, stack: ExitStack) -> None:
        """Make `engine` the client of the first servers."""
        processes = [server.lend() for server in self._servers[:num_servers]]
        for process in processes:
            stack.callback(process.close)
        self.engine = NativeRemoteEngine(
            [process.address for process in processes],
            "none",
            processes=processes,
            setup_timeout_s=PATIENCE_S,
            address_file=self._folder / f"servers{num_servers}.json",
        )
        for process in processes:  # as new servers: without the weights of the fleet before
            ControlClient(process.address, "none", timeout_s=PATIENCE_S).post(
                "/update_weights", version=0
            )
        self.engine.initialize()
        self._ranks[0].call("use", self.engine)

    def publish(self, version: int) -> None:
        """As a trainer does: the first rank sends, the others take part, the owner notes it."""
        self.engine.expect_weights(version)
        for rank in self._ranks:
            while rank.ask("update_weights", version) is None:  # its node was killed
                rank.start("start")
        self.engine.note_weights(meta_of(version))

    def _start_servers(self, count: int) -> list[LentServer]:
        options = {"token": "none", "mean_s": MEAN_S, "setup_timeout_s": PATIENCE_S}

        def start(worker: Worker) -> LentServer:
            return LentServer(
                HostedServer(
                    self._scheduler, worker, launch_stand_in, options, setup_timeout_s=PATIENCE_S
                )
            )

        return self._start_in_workers("rollout", count, start)

    def _start_ranks(self, count: int) -> list[HostedObject]:
        def start(worker: Worker) -> HostedObject:
            is_first = worker.id == "actor0/0"
            rank = HostedObject(
                self._scheduler,
                worker,
                "fleet_ranks.Rank",
                # One that is started again sends to the fleet of that time.
                lambda worker: {"client": getattr(self, "engine", None) if is_first else None},
                setup_timeout_s=PATIENCE_S,
            )
            rank.start("start")
            return rank

        return self._start_in_workers("actor", count, start)

    def _start_in_workers(self, role: str, count: int, start: Callable[[Worker], T]) -> list[T]:
        made: list[T] = []
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for number, first in enumerate(range(0, count, AT_ONCE)):
                some = min(AT_ONCE, count - first)
                part = f"{role}{number}"
                self._scheduler.create_workers(Job(part, some, [SchedulingSpec(cpu=1, gpu=0)]))
                made += pool.map(start, self._scheduler.get_workers(part, PATIENCE_S))
                say(f"{len(made)} of {count} workers of {role}")
        return made


class Loan:
    """A running server as a child process that stays when its client ends."""

    def __init__(self, hosted: HostedServer) -> None:
        self.poll, self.wait = hosted.poll, hosted.wait
        self.describe_end = hosted.describe_end

    def terminate(self) -> None: ...


class LentServer:
    """A server that outlives the clients it is lent to, one after the other."""

    def __init__(self, hosted: HostedServer) -> None:
        self._hosted = hosted
        _, self._address = hosted.launch()
        self.terminate = hosted.terminate

    def lend(self) -> ServerProcess:
        """Closing it ends the loan, not the server; one that has ended is started anew."""
        running: list[tuple[Child, str]] = [(Loan(self._hosted), self._address)]
        return ServerProcess(lambda: running.pop() if running else self._hosted.launch())


if __name__ == "__main__":
    main()
