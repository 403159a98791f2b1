"""The sbatch script: what it asks for, that it is valid bash, and that values stay values."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.infra.launcher.slurm import SlurmJob, submit, write_script


def job(**changes) -> SlurmJob:
    given = {
        "name": "math-first",
        "folder": Path("/home/me/work"),
        "logs": Path("/shared/runs/math/first/logs"),
        "arguments": ("grpo.yaml", "seed=2"),
        "num_nodes": 4,
        "gpus_per_node": 8,
    }
    return SlurmJob(**{**given, **changes})


def requests(script: str) -> list[str]:
    prefix = "#SBATCH "
    return [line.removeprefix(prefix) for line in script.splitlines() if line.startswith(prefix)]


def read_back(script: str) -> list[str]:
    """What bash makes of the lines above the fixed part: folder, logs and arguments."""
    values, _, _ = script.partition("\n# From here on")
    shown = values + '\nprintf "%s\\0" "$folder" "$logs" "${arguments[@]}"\n'
    done = subprocess.run(["bash"], input=shown.encode(), capture_output=True, check=True)
    assert done.stderr == b""
    return done.stdout.decode().split("\0")[:-1]


def test_the_job_asks_for_its_machines():
    asked = requests(
        write_script(
            job(time="8:00:00", partition="a100,h200", account="lab-1", options=("--qos=high",))
        )
    )
    assert asked == [
        "--job-name=math-first",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--exclusive",
        "--gpus-per-node=8",
        "--time=8:00:00",
        "--partition=a100,h200",
        "--account=lab-1",
        '--output="/shared/runs/math/first/logs/slurm-%j.log"',
        "--signal=B:TERM@90",
        "--qos=high",
    ]


def test_what_is_not_asked_for_is_not_there():
    asked = requests(write_script(job(gpus_per_node=0, cpus_per_node=4)))
    assert "--cpus-per-task=4" in asked
    words = ("--exclusive", "--gpus", "--time", "--partition", "--account")
    assert not [line for line in asked if line.startswith(words)]


def test_requests_stand_before_the_first_command():
    """sbatch stops reading them there."""
    lines = write_script(job()).splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert lines[0] == "#!/bin/bash"
    assert all(line.startswith("#") for line in lines[: last + 1])


def test_the_script_is_valid_bash_and_holds_no_secret():
    text = write_script(job())
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert text == write_script(job())  # token and port are made when the job runs


NASTY = "a b'c\"d$(touch evil)`touch evil`;&|\\ #\n*~{x,y}!"


def test_values_stay_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = write_script(
        job(
            folder=Path(f"/home/{NASTY}"),
            logs=Path("/runs/it's 100% $HOME/logs"),
            arguments=(NASTY, f"reward_fn={NASTY}", ""),
        )
    )
    assert read_back(script) == [
        f"/home/{NASTY}",
        "/runs/it's 100% $HOME/logs",
        NASTY,
        f"reward_fn={NASTY}",
        "",
    ]
    assert list(tmp_path.iterdir()) == []
    assert '--output="/runs/it\'s 100%% $HOME/logs/slurm-%j.log"' in requests(script)
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


@settings(max_examples=40)  # one bash each
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_any_argument_survives_the_shell(arguments):
    assert read_back(write_script(job(arguments=tuple(arguments))))[2:] == arguments


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"partition": "gpu\n#SBATCH --uid=0"}, "--partition: 'gpu"),
        ({"time": "8 hours"}, "--time: '8 hours' is no time"),
        ({"account": ""}, "--account"),
        ({"options": ("qos=high",)}, "write it like --qos=high"),
        ({"options": ("--comment=a\nrm -rf x",)}, "--sbatch"),
        ({"logs": Path('/runs/"x"/logs')}, "cluster.fileroot"),
    ],
)
def test_what_slurm_would_misread_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        job(**changes)


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """A program of that name: the real one is in test_slurm_run.py."""

    def install(body: str) -> None:
        program = tmp_path / "bin" / "sbatch"
        program.parent.mkdir()
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    return install


def test_submit_gives_the_id(sbatch, tmp_path):
    sbatch('[[ $1 == --parsable && -f $2 ]] && echo "41;cluster2"')
    script = tmp_path / "slurm.sh"
    script.write_text(write_script(job()))
    assert submit(script) == "41"


def test_a_refusal_is_told_in_slurms_words(sbatch, tmp_path):
    sbatch("echo 'invalid partition specified: nope' >&2; exit 1")
    with pytest.raises(RuntimeError, match="slurm.sh: invalid partition specified: nope"):
        submit(tmp_path / "slurm.sh")


def test_no_slurm_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="sbatch was not found"):
        submit(tmp_path / "slurm.sh")
