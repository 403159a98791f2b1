"""Inference servers by Ray on two machines: one is killed, then the worker of the other one, then
a whole machine, and the run goes on with every prompt accounted for and no server left behind."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import sglang_server
from cli_process import Program
from processes import parent_of
from ray_cluster import ray_cluster
from sglang_server import sglang_python
from tiny_run import PATIENCE_S, overrides, query, wait_until

from areal.api.engine_api import EngineLostError
from areal.api.scheduler_api import Job
from areal.cli.demo import make_model, recipe_path
from areal.engine.remote.native import launch_native_server
from areal.engine.remote.server_control import ControlClient
from areal.engine.remote.server_process import HostedServer, ServerProcess
from areal.rollout.ledger import Ledger
from areal.run.database import RunDatabase
from areal.run.recover import newest_step
from areal.sandbox.watch import descendants

pytestmark = pytest.mark.slow

# A run ends when the test has seen what it waits for. It would keep a core busy until then, which
# what it waits for needs to start, if its rewards came at once.
ENDLESS = ["total_train_steps=100000", "reward_fn=sample_rewards.slow_digit_share"]
ROLLOUT_WORKER = b"ray::_OverlappingRayWorker"


@pytest.fixture
def cluster_of():
    """Machines with so many CPUs each."""
    with ray_cluster() as cluster:

        def add(*nums_cpus: int):
            for num_cpus in nums_cpus:
                cluster.add_node(num_cpus=num_cpus, num_gpus=0)
            return cluster

        yield add


def servers_on(node) -> list[int]:
    return processes_on(node, "-m", "areal.cli.main", "serve")


def processes_on(node, *words: str) -> list[int]:
    """Those of one machine of the cluster, below its own Ray, whose command goes on like this."""
    (raylet,) = node.all_processes["raylet"]
    wanted = [word.encode() for word in words]
    found = {pid: words_of(pid)[1 : 1 + len(words)] for pid in descendants(raylet.process.pid)}
    return [pid for pid, begin in found.items() if begin == wanted]


def actors_on(node, title: bytes) -> list[int]:
    """Ray's workers of one machine whose title begins like this."""
    (raylet,) = node.all_processes["raylet"]
    below = descendants(raylet.process.pid)
    return [pid for pid in below if words_of(pid)[0].startswith(title)]


def words_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def wait_for_steps(run, folder: Path, count: int) -> None:
    wait_until(run, lambda: num_steps(folder) >= count)


def wait_for_last(run, folder: Path, condition: Callable[[dict], bool]) -> None:
    """Until the statistics of the newest step are such."""
    wait_until(run, lambda: condition(last_stats(folder)))


def num_steps(folder: Path) -> int:
    try:
        return query(folder, "SELECT count(*) FROM steps")[0][0]
    except sqlite3.OperationalError:  # the file or its tables are still to be made
        return 0


def last_stats(folder: Path) -> dict:
    ((row,),) = query(folder, "SELECT stats FROM steps ORDER BY step DESC LIMIT 1")
    return json.loads(row)


def stop(run) -> str:
    """What the run has written, when a signal has ended it in order."""
    run.terminate()
    _, err = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 130, err
    return err


def check_ledger(folder: Path) -> None:
    """Every step that was recorded has its whole batch, and no prompt has failed."""
    with RunDatabase(folder / "run.db") as database:
        balance = Ledger(database).balance()
    # A run that is stopped may have trained a batch whose step is not recorded yet.
    assert balance["trained"] // 8 - num_steps(folder) in (0, 1)
    assert balance["trained"] + balance["issued"] + balance["finished"] == balance["total"]


def launch(root: Path, address: str, *more: str):
    tests = str(Path(__file__).parents[1])
    env = {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    more = ("rollout.backend=native:d2", "scheduler.placement=SPREAD", "cluster.n_nodes=2", *more)
    options = ["launch", "ray", "--address", address]
    argv = (recipe_path("arithmetic_grpo.yaml"), *overrides(root, *more))
    return Program(*options, *argv, env=env)


def test_servers_workers_and_a_machine_are_replaced(tmp_path, cluster_of):
    """One server, a rollout worker, the worker of the other server, and then a whole machine, when
    another one with room has joined. Where Ray has put the trained model there, too, the run begins
    again from its recover point."""
    cluster = cluster_of(3, 3)
    more = ["actor.weight_update_mode=disk", "trial_name=two", *ENDLESS]
    more += ["rollout.max_head_offpolicyness=1", "rollout.workers=2"]
    run = launch(tmp_path, cluster.address, *more)
    folder = tmp_path / "arithmetic" / "two"
    wait_for_steps(run, folder, 2)
    nodes = cluster.list_all_nodes()
    (first,), (second,) = (servers_on(node) for node in nodes)
    (worker,), (_,) = (actors_on(node, ROLLOUT_WORKER) for node in nodes)
    os.kill(first, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    wait_for_steps(run, folder, num_steps(folder) + 2)
    os.kill(parent_of(second), signal.SIGKILL)  # takes its server with it
    wait_for_last(run, folder, lambda stats: has_replaced(stats, servers=2, workers=1))
    wait_for_steps(run, folder, num_steps(folder) + 2)
    last = last_stats(folder)
    assert has_replaced(last, servers=2, workers=1) and last["server/servers"] == 2
    logs = {file.name for file in (folder / "logs").glob("server*.log")}
    assert logs == {"server0.log", "server1.log"}
    lose_a_machine(cluster, run, folder)
    err = stop(run)
    assert f"(pid {first}) was ended by signal SIGKILL" in err
    assert f"(pid {worker}) has ended; its " in err
    assert "worker is gone: rollout/" in err
    assert not any(servers_on(node) for node in cluster.list_all_nodes())
    check_ledger(folder)


def lose_a_machine(cluster, run, folder: Path) -> None:
    """One with a rollout worker, and perhaps a server; the run goes on."""
    wait_until(run, lambda: newest_step(folder / "recover") is not None)
    cluster.add_node(num_cpus=3, num_gpus=0)
    node = next(node for node in cluster.worker_nodes if actors_on(node, ROLLOUT_WORKER))
    had_the_model = has_idle_host(node)
    cluster.remove_node(node, allow_graceful=False)
    if had_the_model:
        wait_until(run, lambda: ("resumed",) in query(folder, "SELECT kind FROM events"))
    else:
        wait_for_last(run, folder, lambda stats: stats["rollout/workers_replaced"] == 2)
    wait_for_steps(run, folder, num_steps(folder) + 2)


def test_stock_servers_with_two_ranks_and_rollout_workers(tmp_path, cluster_of):
    """One is lost with its worker; above a server alone is, and trainer/test_stock_fleet_run.py has
    a stock server that is."""
    cluster = cluster_of(3, 3)
    more = ["actor.weight_update_mode=disk", "trial_name=stock", *ENDLESS]
    more += ["rollout.max_head_offpolicyness=1", "rollout.workers=2", "actor.backend=fsdp:d2"]
    more += ["rollout.backend=sglang:d2", f"sglang.python={sglang_python(tmp_path)}"]
    run = launch(tmp_path, cluster.address, *more)
    folder = tmp_path / "arithmetic" / "stock"
    wait_for_steps(run, folder, 2)
    servers = [pid for node in cluster.list_all_nodes() for pid in stock_servers_on(node)]
    assert len(servers) == 2
    os.kill(parent_of(servers[1]), signal.SIGKILL)  # takes its server with it
    wait_for_last(run, folder, lambda stats: stats["server/restarts"] == 1)
    wait_for_steps(run, folder, num_steps(folder) + 2)
    stop(run)
    assert not any(stock_servers_on(node) for node in cluster.list_all_nodes())
    assert last_stats(folder)["server/servers"] == 2
    check_ledger(folder)


def stock_servers_on(node) -> list[int]:
    return processes_on(node, sglang_server.__file__)


def has_replaced(stats: dict, *, servers: int, workers: int) -> bool:
    replaced = (stats["server/restarts"], stats["rollout/workers_replaced"])
    return replaced == (servers, workers)


def has_idle_host(node) -> bool:
    """Whether a worker of Ray there has started no program of its own: that of a training rank."""
    return any(not list(descendants(host)) for host in actors_on(node, b"ray::_RayWorker"))


def test_a_server_whose_machine_is_gone(tmp_path, cluster_of):
    """The only machine with room goes; the next `launch` finds none, until another one joins."""
    import ray

    from areal.infra.scheduler.ray import RayScheduler

    cluster = cluster_of(0, 1)
    ray.init(cluster.address)
    try:
        scheduler = RayScheduler()
        scheduler.create_workers(Job(role="rollout", replicas=1))
        (worker,) = scheduler.get_workers("rollout", PATIENCE_S)
        make_model(tmp_path / "model")
        options = {"model_path": tmp_path / "model", "token": "secret", "num_pages": 64}
        server = HostedServer(
            scheduler, worker, launch_native_server, options, setup_timeout_s=PATIENCE_S
        )
        process = ServerProcess(server.launch)
        cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)
        assert process.wait_end()
        assert "worker is gone: rollout/0: " in process.describe_end()
        with pytest.raises(EngineLostError, match="no machine of the Ray cluster has room for it"):
            process.start_again()
        cluster.add_node(num_cpus=1, num_gpus=0)
        address = process.start_again()
        ControlClient(address, "secret", timeout_s=PATIENCE_S).wait_until_healthy(PATIENCE_S)
        scheduler.delete_workers()
    finally:
        ray.shutdown()
