"""What is started again after which end, with real processes that end in every way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Each child takes the next word of the script: an exit code, a signal's name, "point" (write a
# recover point first), "down" or "again" (`forbid_restart` or `request_restart` first), or "sleep".
CHILD = """
import os, signal, sys, time
from pathlib import Path
from areal.cli.train import supervise
from areal.run.recover import newest_step
from areal.run.restart import request_restart, forbid_restart

folder, words = Path(sys.argv[1]), sys.argv[3:]
code = supervise(retries=int(sys.argv[2]), newest_point=lambda: newest_step(folder / "recover"),
                 stacks_file=folder / "stacks.txt")
if code is not None:
    sys.exit(code)
starts = folder / "starts"
with open(starts, "a") as file:
    file.write(f"{os.getpid()}\\n")
number = len(starts.read_text().split()) - 1
word = words[min(number, len(words) - 1)]
if word.startswith("point-"):
    (folder / "recover" / f"step_{number}").mkdir(parents=True)
    word = word.removeprefix("point-")
if word.startswith("down-"):
    forbid_restart()
    word = word.removeprefix("down-")
if word.startswith("again-"):
    request_restart()
    word = word.removeprefix("again-")
if word == "sleep":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(130)
if word.isdigit():
    sys.exit(int(word))
os.kill(os.getpid(), getattr(signal, word))
"""


def start(folder: Path, retries: int, *words: str) -> subprocess.Popen:
    argv = [sys.executable, "-c", CHILD, str(folder), str(retries), *words]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)


def pids(folder: Path) -> list[int]:
    starts = folder / "starts"
    return [int(pid) for pid in starts.read_text().split()] if starts.exists() else []


@pytest.mark.parametrize(
    ("words", "code", "num_starts"),
    [
        (["0"], 0, 1),
        (["2"], 2, 1),
        (["130"], 130, 1),
        (["1"], 1, 1),  # it would end the same way again
        (["SIGKILL", "0"], 0, 2),
        (["SIGSEGV", "2"], 2, 2),
        (["SIGKILL"], 1, 3),  # the first and two more
        (["point-1", "0"], 0, 2),
        (["point-1", "1"], 1, 2),
        (["point-down-1", "0"], 1, 1),
        (["again-1", "0"], 0, 2),
        (["again-1"], 1, 3),
        (["SIGKILL", "SIGKILL", "point-SIGKILL", "SIGKILL", "0"], 0, 5),
    ],
)
def test_who_is_started_again(tmp_path, words, code, num_starts):
    process = start(tmp_path, 2, *words)
    err = process.communicate(timeout=900)[1]
    assert process.returncode == code, err
    assert len(pids(tmp_path)) == num_starts
    assert err.count("areal: the training process") == num_starts - 1
    if words == ["SIGKILL"]:
        assert err.splitlines()[-1] == (
            "areal: error: the training process was ended by signal SIGKILL, "
            "3 times without a new recover point"
        )


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_ends_the_child_in_order(tmp_path, signum):
    process = start(tmp_path, 2, "sleep")
    wait_until(lambda: pids(tmp_path))
    time.sleep(0.2)  # until its handler is there
    process.send_signal(signum)
    assert process.communicate(timeout=900)[1] == ""
    assert process.returncode == 130 and len(pids(tmp_path)) == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the death signal is Linux's")
def test_the_child_dies_with_a_killed_parent(tmp_path):
    process = start(tmp_path, 2, "sleep")
    wait_until(lambda: pids(tmp_path))
    process.kill()
    process.communicate()
    (pid,) = pids(tmp_path)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def wait_until(condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_to_ask_for_stacks_ends_neither_parent_nor_child(tmp_path):
    parent = start(tmp_path, 0, "sleep")
    wait_until(lambda: pids(tmp_path))
    for pid in (parent.pid, *pids(tmp_path)):
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    assert parent.poll() is None
    parent.send_signal(signal.SIGTERM)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 130 and len(pids(tmp_path)) == 1
    assert errors.count("Current thread") == 2


def test_stacks_go_to_standard_error_where_the_folder_of_a_run_is_gone(tmp_path):
    code = (
        "import os, signal\nfrom areal.utils import stacks\n"
        "stacks.listen()\nos.kill(os.getpid(), signal.SIGUSR1)"
    )
    env = os.environ | {"AREAL_STACKS": str(tmp_path / "gone" / "stacks.txt")}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert "Current thread" in done.stderr
