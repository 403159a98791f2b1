"""A real Slurm runs the script of `areal launch slurm`: two machines, Ray over both, training."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from slurm_world import slurm_cluster
from tiny_run import areal, query

from areal.cli.demo import make_model

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "examples" / "sft" / "arithmetic_sft.yaml"
DONE = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    pytest.importorskip("ray", reason="`areal launch slurm` needs the extra `ray`")
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), cpus_per_node=2) as env:
        yield env


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("it's a run")  # a quote and spaces go all the way
    make_model(root / "tiny_model")
    return root


def launch(root: Path, env: dict[str, str], trial: str, *more: str) -> str:
    """The id of the job."""
    argv = ["launch", "slurm", "--nodes", "2", "--time", "10", "--join-timeout", "200", RECIPE]
    argv += [f"cluster.fileroot={root}", f"actor.path={root / 'tiny_model'}", f"trial_name={trial}"]
    argv += ["train_dataset.batch_size=8", "train_dataset.dataset_kwargs={num_rows: 64}"]
    argv += ["valid_dataset=null", "evaluator={}", *more]
    paths = [str(RECIPE.parents[2]), os.environ.get("PYTHONPATH", "")]
    command = areal(*argv, env={**env, "PYTHONPATH": os.pathsep.join(paths)}, cwd=root)
    out, err = command.communicate(timeout=900)
    assert command.returncode == 0, err
    assert out.startswith("submitted job ")
    return out.split()[2].rstrip(";")


def state(job: str, env: dict[str, str]) -> str:
    done = scontrol("show", "job", "--oneliner", job, env=env)
    return done.partition("JobState=")[2].split()[0]


def scontrol(*argv: str, env: dict[str, str]) -> str:
    return slurm_command("scontrol", *argv, env=env)


def slurm_command(*argv: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=900, check=True
    )
    return done.stdout


def wait_until(is_true, timeout_s: float, logs: Path) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, said(logs)
        time.sleep(0.5)


def said(logs: Path) -> str:
    return "\n".join(f"== {file}\n{file.read_text()[-3000:]}" for file in logs.glob("*.log"))


def ray_processes(job: str) -> list[str]:
    """Command lines that name the job's own folder of Ray."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode().replace("\0", " ")
        except OSError:
            continue
        if f"/tmp/areal-{job}/" in line:
            found.append(line)
    return found


def test_two_machines_train_and_leave_nothing_behind(slurm, root):
    more = ["actor.backend=archon:d2", "scheduler.placement=SPREAD", "total_train_steps=2"]
    job = launch(root, slurm, "two", *more, "actor.scheduling_spec=[{cpu: 1}]")
    run, logs = root / "arithmetic" / "two", root / "arithmetic" / "two" / "logs"
    wait_until(lambda: state(job, slurm) in DONE, 240, logs)
    assert state(job, slurm) == "COMPLETED", said(logs)
    assert len(query(run, "SELECT step FROM steps WHERE step >= 0")) == 2
    assert (run / "model" / "model.safetensors").is_file()
    assert "Ray cluster of 2 machines" in (logs / f"slurm-{job}.log").read_text()
    assert (logs / "ray-node1.log").is_file() and (logs / "ray-node2.log").is_file()
    assert ray_processes(job) == [] and not Path(f"/tmp/areal-{job}").exists()


def test_a_cancelled_job_ends_in_order(slurm, root):
    job = launch(root, slurm, "cancelled", "total_train_steps=5000", "total_train_epochs=5000")
    run, logs = root / "arithmetic" / "cancelled", root / "arithmetic" / "cancelled" / "logs"
    wait_until(lambda: steps_of(run) > 2 or state(job, slurm) in DONE, 200, logs)
    assert state(job, slurm) == "RUNNING", said(logs)
    assert ray_processes(job)
    slurm_command("scancel", job, env=slurm)
    wait_until(lambda: state(job, slurm) in DONE and not ray_processes(job), 100, logs)
    assert state(job, slurm) == "CANCELLED"
    wait_until(lambda: not Path(f"/tmp/areal-{job}").exists(), 60, logs)


def steps_of(run: Path) -> int:
    if not (run / "run.db").exists():
        return 0
    return len(query(run, "SELECT step FROM steps"))
