"""The folder of a run: nobody else can look into it, and a kill leaves nothing outside of it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tiny_run import overrides
from trainer.test_kill_and_resume import finish, steps_done
from trainer.test_recovery import open_trainer, sft

from areal.cli.demo import make_model, recipe_path

TESTS = Path(__file__).resolve().parents[1]
# Everything a run may write.
OPTIONS = (
    "trial_name=private",
    "actor.weight_update_mode=disk",
    "rollout.dump_to_file=true",
    "rollout.workers=1",
    "perf_tracer={enabled: true, save_interval: 1}",
    "saver.freq_steps=2",
    "recover.freq_steps=1",
)


def start(root: Path, temporary: Path, num_steps: int) -> subprocess.Popen:
    """With a umask that hides nothing."""
    command = [sys.executable, "-m", "areal.cli.main", "train", recipe_path("arithmetic_grpo.yaml")]
    return subprocess.Popen(
        [*command, *overrides(root, *OPTIONS, f"total_train_steps={num_steps}")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=TESTS,
        umask=0,
        env={**os.environ, "TMPDIR": str(temporary)},
    )


def readable_by_others(run_dir: Path) -> list[str]:
    found = []
    for path in run_dir.rglob("*"):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:  # a weight update that was replaced
            continue
        # What is still being written is guarded by its folder, which is looked at here too.
        being_written = stat.S_ISREG(mode) and ".tmp-" in path.parent.name
        if not stat.S_ISLNK(mode) and not being_written and mode & 0o077:
            found.append(str(path.relative_to(run_dir)))
    # Models are for others once they are moved out; until then the folder guards them.
    return [name for name in found if not name.startswith(("checkpoints", "model"))]


@pytest.mark.slow
def test_a_killed_run_is_private_and_leaves_nothing_elsewhere(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    run_dir = tmp_path / "arithmetic" / "private"
    process = start(tmp_path, temporary, num_steps=1000)
    deadline = time.monotonic() + 300
    while steps_done(run_dir) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run does not move"
        time.sleep(0.02)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert readable_by_others(run_dir) == []
    assert list((run_dir / "tmp").glob("areal-rewards*"))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    killed = {path.name for path in (run_dir / "tmp").iterdir()}
    assert killed  # nobody was there any more to remove them
    assert [path.name for path in temporary.iterdir() if "areal" in path.name] == []

    finish(start(tmp_path, temporary, num_steps=steps_done(run_dir) + 2))
    assert not (run_dir / "tmp").exists()
    assert readable_by_others(run_dir) == []
    written = {path.name for path in run_dir.iterdir()}
    assert {"run.db", "run.db.lock", "config.yaml", "recover", "logs", "traces"} <= written
    assert [path.name for path in temporary.iterdir() if "areal" in path.name] == []
    assert stat.S_IMODE((run_dir / "model" / "config.json").stat().st_mode) == 0o666


def test_another_run_sweeps_what_a_killed_process_without_a_run_left(tmp_path, monkeypatch):
    """A server with two ranks, rewards in a script: they have no run's folder to use."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    make_model(tmp_path / "tiny_model")
    hold = (
        "import os\nfrom areal.api.scratch import ScratchFolder\n"
        "scratch = ScratchFolder('ranks'); os.kill(os.getpid(), 9)"
    )
    env = {**os.environ, "TMPDIR": str(temporary)}
    assert subprocess.run([sys.executable, "-c", hold], env=env).returncode == -signal.SIGKILL
    (left,) = temporary.iterdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with open_trainer(sft(tmp_path, "sweeping")):
        assert not left.exists()
