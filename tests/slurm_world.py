"""A Slurm cluster of one's own, for tests: munged, slurmctld and two slurmd on this machine.

    with slurm_cluster(folder) as env:      # skips, with the reason, where there is no Slurm
        subprocess.run(["sbatch", ...], env={**os.environ, **env})

Each slurmd stands for a machine; all of them are 127.0.0.1. Needs root, no systemd and no cgroups.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
NODES = ("node1", "node2")
START_S = 900


@contextmanager
def slurm_cluster(folder: Path, *, cpus_per_node: int) -> Iterator[dict[str, str]]:
    """Yields the environment in which sbatch, squeue and the rest find this cluster."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"no Slurm here (apt-get install slurm-wlm munge): {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("only root may start a Slurm cluster")
    env = {"SLURM_CONF": str(write_conf(folder, cpus_per_node))}
    with ExitStack() as stack:
        start = lambda *argv: stack.enter_context(daemon(argv, folder, env))  # noqa: E731
        start(*munged(folder))
        wait_for(lambda: (folder / "munge.socket").exists(), "munged")
        start("slurmctld", "-D")
        for node in NODES:
            start("slurmd", "-D", "-N", node)
        wait_for(lambda: sinfo(env).split() == ["idle"] * len(NODES), "two idle machines")
        yield env


def munged(folder: Path) -> list[str]:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    files = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
    return [
        "munged",
        "--foreground",
        "--force",  # a folder of the test may be open to others
        f"--key-file={key}",
        f"--socket={files['socket']}",
        f"--pid-file={files['pid']}",
        f"--log-file={files['log']}",
        f"--seed-file={files['seed']}",
    ]


def write_conf(folder: Path, cpus_per_node: int) -> Path:
    control, *ports = (free_port() for _ in range(1 + len(NODES)))
    host = socket.gethostname()
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={control}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge.socket",
        "CredType=cred/munge",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "MpiDefault=none",
        "AccountingStorageType=accounting_storage/none",
        "JobAcctGatherType=jobacct_gather/none",
        "ReturnToService=2",
        "KillWait=60",
        "SlurmdParameters=config_overrides",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log",
        f"SlurmdLogFile={folder}/slurmd-%n.log",
        *(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={cpus_per_node} RealMemory=1024"
            for node, port in zip(NODES, ports, strict=True)
        ),
        "PartitionName=main Nodes=ALL Default=YES MaxTime=30 State=UP",
    ]
    (folder / "state").mkdir()
    for node in NODES:
        (folder / f"spool-{node}").mkdir()
    conf = folder / "slurm.conf"
    conf.write_text("\n".join(lines) + "\n")
    return conf


@contextmanager
def daemon(argv: tuple[str, ...], folder: Path, env: dict[str, str]) -> Iterator[None]:
    with open(folder / f"{argv[0]}.out", "ab") as out:
        process = subprocess.Popen(argv, env={**os.environ, **env}, stdout=out, stderr=out)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def sinfo(env: dict[str, str]) -> str:
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=30
    ).stdout


def wait_for(is_true, what: str) -> None:
    deadline = time.monotonic() + START_S
    while not is_true():
        assert time.monotonic() < deadline, f"{what}: not there within {START_S} s"
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
