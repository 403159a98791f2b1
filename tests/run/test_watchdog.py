"""The watchdog by itself, around a script without torch: what it says of each kind of hang.

trainer/test_watchdog.py has whole runs that hang.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from cli_process import Ended

from areal.utils.stacks import descendants

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = """
import sys, time
from pathlib import Path
from areal.run.watchdog import watched
from areal.utils.waits import waiting
from broken_parts import endless_filter

how, folder = sys.argv[1], Path(sys.argv[2])
with watched(2.0, stacks_file=folder / "stacks.txt"), waiting("the last trump"):
    print("watched", flush=True)
    if how == "holds the interpreter":
        endless_filter(None)
    else:
        time.sleep(1e6)
"""


def start(how: str, folder: Path) -> subprocess.Popen:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def end(process: subprocess.Popen) -> Ended:
    try:
        out, err = process.communicate(timeout=900)
    finally:
        process.kill()
    return Ended(process.returncode, out, err)


def last_line(ended: Ended) -> str:
    assert ended.code != 0
    line = ended.err.splitlines()[-1]
    assert line.startswith("areal: error: no progress for "), ended.err
    return line


def test_what_waits_is_named_and_ended_also_when_the_watcher_was_killed(tmp_path):
    process = start("waits", tmp_path)
    assert process.stdout.readline() == "watched\n"
    (watcher,) = descendants(process.pid)
    os.kill(watcher, signal.SIGKILL)
    ended = end(process)
    assert ended.code == 1
    assert "the trainer waits for the last trump since" in last_line(ended)
    assert "was ended by signal SIGKILL: starting a new one" in ended.err
    assert 'File "<string>"' in (tmp_path / "stacks.txt").read_text(), "where it waits"


def test_what_holds_the_interpreter_is_named_and_ended_from_outside(tmp_path):
    ended = end(start("holds the interpreter", tmp_path))
    assert ended.code == -signal.SIGKILL
    line = last_line(ended)
    assert "does not respond" in line and "endless_filter (" in line and "broken_parts.py:" in line
    assert "in endless_filter" in (tmp_path / "stacks.txt").read_text()
