"""Control groups around reward workers, on systems that let this user make one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import closing

import pytest
import sample_attacks

from areal.api.config.inference import ProcessLimits
from areal.sandbox.pool import AsyncRewardWrapper, RewardCrashError
from areal.sandbox.watch import open_group

FORKS = "import os, time\nfor _ in range(3):\n    os.fork()\ntime.sleep(600)\n"


@pytest.fixture
def group():
    found = open_group(ProcessLimits(memory_gb=0.25)) if sys.platform == "linux" else None
    if found is None:
        pytest.skip("no control groups for this user")
    yield found
    found.close()


def test_a_group_ends_all_its_processes_and_goes(group):
    with subprocess.Popen([sys.executable, "-c", "input()\n" + FORKS], stdin=-1) as process:
        group.add(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        deadline = time.monotonic() + 300
        procs = group.folders[0] / "cgroup.procs"
        while len(procs.read_text().split()) < 8:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        group.kill()
        assert process.wait(timeout=300) < 0
    assert not group.was_out_of_memory()
    group.close()
    assert not any(folder.exists() for folder in group.folders)


async def test_files_in_memory_count_as_memory(group):
    """No limit of the process itself sees them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        limits = {"memory_gb": 0.25, "writable": [folder]}
        reward = AsyncRewardWrapper(sample_attacks.attack, 60, max_retries=0, limits=limits)
        with closing(reward):
            assert await reward("write", f"{folder}/small", 64 << 20) == 1.0
            with pytest.raises(RewardCrashError, match="more memory than limits.memory_gb allows"):
                for number in range(6):
                    await reward("write", f"{folder}/{number}", 64 << 20)
