"""One sbatch script that starts a Ray cluster inside a Slurm job and trains on it.

    #SBATCH lines      requested resources
    name=value lines   parameters of the run, quoted for the shell
    ray_in_slurm.sh    the same for every run: start Ray, wait, train, shut down

No value of a config becomes shell code: `shlex` quotes it, and the fixed part uses it in quotes.

`python -m areal.infra.launcher.slurm script.py --config FILE key=value...` submits a job that runs
the script: the same as `areal launch slurm --script`.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from areal.infra.launcher import exec_launch

_FIXED_PART = Path(__file__).with_name("ray_in_slurm.sh")
_WORD = re.compile(r"[A-Za-z0-9_.,:@%/+-]+")
_OPTION = re.compile(r"--[a-z][a-z-]*(=[^\x00-\x1f\"'\\]+)?")
_WARNING_S = 90  # SIGTERM comes this long before the time limit


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """Resources and parameters of the job."""

    name: str
    folder: Path  # working directory; the config's relative paths start here
    logs: Path
    arguments: tuple[str, ...]  # of `areal launch ray`: config file and overrides
    num_nodes: int
    gpus_per_node: int
    cpus_per_node: int | None = None  # None: whole machines
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    options: tuple[str, ...] = ()  # further ones of sbatch, such as --qos=high
    join_timeout_s: int = 600

    def __post_init__(self) -> None:
        for key in ("time", "partition", "account"):
            value = getattr(self, key)
            if value is not None and not _WORD.fullmatch(value):
                raise ValueError(f"--{key}: {value!r} is no {key} Slurm can have")
        for option in self.options:
            if not _OPTION.fullmatch(option):
                raise ValueError(
                    f"--sbatch: {option!r} is no option of sbatch; write it like --qos=high, "
                    "without quotes"
                )
        if re.search(r"[\x00-\x1f\"\\]", str(self.logs)):
            raise ValueError(
                f"cluster.fileroot: Slurm cannot write logs to {str(self.logs)!r}; choose a folder "
                "without double quotes, backslashes and line ends in its name"
            )


def write_script(job: SlurmJob) -> str:
    """The text of the script; it depends only on the run's files and this Python."""
    lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in _requests(job)), ""]
    lines += [f"{name}={shlex.quote(value)}" for name, value in _values(job).items()]
    lines.append(f"arguments=({' '.join(map(shlex.quote, job.arguments))})")
    return "\n".join([*lines, "", _FIXED_PART.read_text(encoding="utf-8")])


def submit(script: Path) -> str:
    """Submit the script; returns the job id."""
    if shutil.which("sbatch") is None:
        raise RuntimeError(
            "sbatch was not found: submit from a login node of the Slurm cluster, or look at the "
            "script with --dry-run"
        )
    done = subprocess.run(["sbatch", "--parsable", script], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"sbatch refused {script}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]  # id, or id;cluster


def _requests(job: SlurmJob) -> list[str]:
    log = str(job.logs / "slurm-").replace("%", "%%")
    cpus = (
        ["--exclusive"] if job.cpus_per_node is None else [f"--cpus-per-task={job.cpus_per_node}"]
    )
    words = {"time": job.time, "partition": job.partition, "account": job.account}
    return [
        f"--job-name={job.name}",
        f"--nodes={job.num_nodes}",
        "--ntasks-per-node=1",
        *cpus,
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        *(f"--{key}={value}" for key, value in words.items() if value is not None),
        f'--output="{log}%j.log"',
        f"--signal=B:TERM@{_WARNING_S}",
        *job.options,
    ]


def _values(job: SlurmJob) -> dict[str, str]:
    return {
        "python": sys.executable,
        "folder": str(job.folder),
        "logs": str(job.logs),
        "num_gpus": str(job.gpus_per_node),
        "join_timeout": str(job.join_timeout_s),
    }


if __name__ == "__main__":
    exec_launch("slurm")
