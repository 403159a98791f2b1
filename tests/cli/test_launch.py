"""`areal launch`: which run it starts, what it refuses, and the script it prints."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import query

from areal.api.cli_args import SchedulerConfig
from areal.cli.demo import make_model
from areal.cli.main import main
from areal.infra.scheduler import open_scheduler

SCRIPT = Path(__file__).parents[2] / "examples" / "sft" / "train_sft.py"
RECIPE = str(Path(__file__).parents[2] / "examples" / "sft" / "arithmetic_sft.yaml")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("launch here")
    make_model(root / "tiny_model")
    return root


def argv(root: Path, *more: str) -> list[str]:
    small = ["train_dataset.batch_size=4", "train_dataset.dataset_kwargs={num_rows: 16}"]
    small += ["valid_dataset=null", "evaluator={}", "total_train_steps=2"]
    return [RECIPE, f"cluster.fileroot={root}", f"actor.path={root / 'tiny_model'}", *small, *more]


def fails(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, str]:
    try:
        code = main(["launch", *command])
    except SystemExit as stop:  # argparse leaves this way
        code = stop.code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return code, err


def test_local_trains_here_whatever_the_file_says(root):
    command = argv(root, "trial_name=local", "scheduler.type=ray")
    assert main(["launch", "local", *command]) == 0
    assert len(query(root / "arithmetic" / "local", "SELECT step FROM steps WHERE step >= 0")) == 2


def test_dry_run_prints_the_script_and_does_nothing(root, capsys):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("the config of a Ray run is refused without the extra `ray`")
    options = ["--dry-run", "--nodes", "2", "--gpus-per-node", "4", "--time", "1:00:00"]
    options += ["--sbatch=--qos=high", "--sbatch=--mem=0"]
    command = argv(root, "trial_name=dry", "actor.backend=archon:d8")
    assert main(["launch", "slurm", *options, *command]) == 0
    script = capsys.readouterr().out
    for line in ("--nodes=2", "--gpus-per-node=4", "--time=1:00:00", "--qos=high", "--mem=0"):
        assert f"#SBATCH {line}\n" in script
    assert f'#SBATCH --output="{root}/arithmetic/dry/logs/slurm-%j.log"\n' in script
    assert f"'cluster.fileroot={root}'" in script and "cluster.n_nodes=2" in script
    assert f"python={sys.executable}\n" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert not (root / "arithmetic" / "dry").exists()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["slurm", "--nodes", "0"], "cluster.n_nodes must be at least 1, got 0"),
        (["slurm", "--gpus-per-node", "-1"], "n_gpus_per_node must be at least 0, got -1"),
        (["local", "cluster.n_nodes=2"], "scheduler.type must be ray or slurm when"),
    ],
)
def test_numbers_of_machines_are_checked(root, capsys, command, says):
    place, *rest = command
    options = [word for word in rest if "=" not in word]
    overrides = [word for word in rest if "=" in word]
    code, err = fails(capsys, place, *options, *argv(root, *overrides))
    assert code == 2 and says in err


def launcher(place: str, script: Path, *command: str, **env: str) -> subprocess.CompletedProcess:
    """`python -m areal.infra.launcher.PLACE script.py --config FILE key=value...`."""
    recipe, *overrides = command
    module = f"areal.infra.launcher.{place}"
    return subprocess.run(
        [sys.executable, "-m", module, str(script), "--config", recipe, *overrides],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=900,
    )


def steps_of(root: Path, trial: str) -> int:
    return len(query(root / "arithmetic" / trial, "SELECT step FROM steps WHERE step >= 0"))


@pytest.mark.slow
def test_the_local_launcher_runs_a_script(root):
    # The last override wins: it runs here.
    done = launcher("local", SCRIPT, *argv(root, "trial_name=script", "scheduler.type=ray"))
    assert done.returncode == 0, done.stderr
    assert steps_of(root, "script") == 2


def test_a_script_has_its_own_keys_and_arguments(root, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("import sys\nimport json\nprint(json.dumps([__name__, sys.argv[1:]]))\n")
    command = argv(root, "trial_name=mine", "+my_own_key=3")
    done = launcher("local", script, *command)
    assert done.returncode == 0, done.stderr
    expected = ["--config", *command, "scheduler.type=local"]
    assert json.loads(done.stdout) == ["__main__", expected]


def test_the_slurm_launcher_submits_a_job_that_runs_a_script(root, tmp_path):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\n[ "$1" = --parsable ] && [ -f "$2" ] && echo 42\n')
    sbatch.chmod(0o755)
    done = launcher(
        "slurm",
        SCRIPT,
        *argv(root, "trial_name=job", "cluster.n_nodes=2"),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("submitted job 42; its logs: ")
    script = (root / "arithmetic" / "job" / "logs" / "slurm.sh").read_text()
    assert "#SBATCH --nodes=2\n" in script and f"--script {SCRIPT}" in script


def test_train_submits_a_file_that_asks_for_slurm(root, tmp_path, monkeypatch, capsys):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("the config of a Ray run is refused without the extra `ray`")
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\n[ "$1" = --parsable ] && [ -f "$2" ] && echo 43\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command = argv(root, "trial_name=by_slurm", "scheduler.type=slurm", "cluster.n_nodes=2")
    assert main(["train", *command]) == 0
    assert capsys.readouterr().out.startswith("submitted job 43; its logs: ")
    script = (root / "arithmetic" / "by_slurm" / "logs" / "slurm.sh").read_text()
    assert "#SBATCH --nodes=2\n" in script and "scheduler.type=slurm" in script


def test_a_script_that_asks_for_slurm_says_how_to_submit_it(tmp_path):
    with pytest.raises(ValueError, match="areal launch slurm --script"):
        open_scheduler(SchedulerConfig(type="slurm"), [], logs=tmp_path)


@pytest.mark.slow
def test_the_ray_launcher_runs_a_script(root):
    pytest.importorskip("ray", reason="it needs the extra `ray`")
    done = launcher("ray", SCRIPT, *argv(root, "trial_name=ray"))
    assert done.returncode == 0, done.stderr
    assert steps_of(root, "ray") == 2


@pytest.mark.parametrize(
    ("place", "script", "says"),
    [
        ("local", "missing.py", "--script: 'missing.py' is no file"),
        ("ray", str(SCRIPT), "no Ray head answers at 127.0.0.1:1"),
    ],
)
def test_what_a_launcher_cannot_run(root, place, script, says):
    if place == "ray":
        pytest.importorskip("ray", reason="it needs the extra `ray`")
    command = ["launch", place, *(["--join-timeout", "1"] if place == "ray" else [])]
    command += ["--script", script, *argv(root)]
    done = subprocess.run(
        [sys.executable, "-m", "areal.cli.main", *command],
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode in (1, 2) and says in done.stderr and "Traceback" not in done.stderr


def test_no_place(capsys):
    code, err = fails(capsys)
    assert code == 2 and "WHERE" in err


def test_overrides_may_stand_after_options(root, capsys):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("the config of a Ray run is refused without the extra `ray`")
    assert main(["launch", "slurm", *argv(root), "--dry-run", "seed=7"]) == 0
    assert " seed=7" in capsys.readouterr().out


def test_weights_between_machines_go_by_disk(root, capsys):
    grpo = str(Path(RECIPE).parents[1] / "math" / "arithmetic_grpo.yaml")
    overrides = [f"actor.path={root / 'tiny_model'}", "actor.weight_update_mode=shm"]
    code, err = fails(capsys, "slurm", "--nodes", "2", grpo, *overrides)
    assert (
        code == 2
        and "actor.weight_update_mode must be disk, delta or xccl when cluster.n_nodes is 2" in err
    )


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
@pytest.mark.parametrize("place", ["ray", "slurm"])
def test_ray_is_an_extra(root, capsys, place):
    code, err = fails(capsys, place, *argv(root))
    assert code == 2 and "pip install 'areal[ray]'" in err


def test_machines_without_a_cluster(root, capsys, monkeypatch):
    pytest.importorskip("ray", reason="`areal launch ray` needs the extra `ray`")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    code, err = fails(capsys, "ray", *argv(root, "cluster.n_nodes=2"))
    assert code == 2 and "cluster.n_nodes: 2 machines need a Ray cluster" in err


def test_a_head_that_is_not_there(root, capsys, monkeypatch):
    pytest.importorskip("ray", reason="`areal launch ray` needs the extra `ray`")
    monkeypatch.setenv("RAY_ADDRESS", "")  # put back afterwards: the command sets it
    options = ["--address", "127.0.0.1:1", "--join-timeout", "1"]
    code, err = fails(capsys, "ray", *options, *argv(root))
    assert code == 1 and "no Ray head answers at 127.0.0.1:1" in err
