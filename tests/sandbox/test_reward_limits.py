"""What a reward function cannot do, tried for real; and what it still can."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
import sample_attacks

from areal.api.config.inference import ProcessLimits
from areal.sandbox import process
from areal.sandbox.pool import (
    AsyncRewardWrapper,
    RewardCrashError,
    RewardError,
    RewardTimeoutError,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="the limits tried here are kept by Linux",
)
SECRET = "s3cret-of-the-run-0123456789"


@asynccontextmanager
async def attacker(timeout_seconds=30.0, **limits):
    wrapper = AsyncRewardWrapper(
        sample_attacks.attack, timeout_seconds, max_workers=1, max_retries=0, limits=limits
    )
    with closing(wrapper):
        yield wrapper


async def refused(reward, *attack):
    """The error of an attack that the kernel stopped."""
    with pytest.raises(RewardError) as caught:
        await reward(*attack)
    return str(caught.value)


def landlock_abi():
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1)


async def test_no_process_is_started_and_threads_are():
    async with attacker() as reward:
        for attack in ("fork_bomb", "spawn"):
            error = await refused(reward, attack)
            assert "Operation not permitted" in error and "limits: max_processes=0" in error
        assert await reward("vfork_by_number") == 0.0
        assert await reward("thread") == 1.0
        assert not reward.counts["crash"]


async def test_what_was_started_ends_with_the_worker_even_in_sessions_of_its_own():
    before = num_workers()
    async with attacker(1.0, max_processes=50) as reward:
        with pytest.raises(RewardTimeoutError):
            await reward("fork", 6)
    deadline = time.monotonic() + 300
    while num_workers() > before:
        assert time.monotonic() < deadline, "an orphan lives on"
        time.sleep(0.05)


def num_workers():
    """Live processes that run the worker's file."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_worker = b"sandbox/worker.py" in (folder / "cmdline").read_bytes()
            count += is_worker and ") Z " not in (folder / "stat").read_text()
        except OSError:
            continue
    return count


@pytest.mark.skipif(os.geteuid() == 0, reason="the kernel does not count root's processes")
async def test_a_fork_bomb_meets_the_number_of_processes():
    async with attacker(20.0, max_processes=20) as reward:
        error = await refused(reward, "fork_bomb")
        assert "Resource temporarily unavailable" in error or "did not return" in error


async def test_memory_files_and_cpu_are_bounded_and_bounds_stay():
    async with attacker(file_size_mb=1) as reward:
        for attack in ("memory", "mapping"):
            assert "annot allocate" in (error := await refused(reward, attack, 10 << 30)) or (
                "MemoryError" in error and "limits.memory_gb is 8" in error
            )
        assert await reward("memory", 64 << 20) == 64 << 20
        assert "limits.file_size_mb is 1" in await refused(reward, "temporary", 2 << 20)
        assert await reward("temporary", 1 << 19) == 1.0
        await refused(reward, "raise_limits")
    async with attacker(60.0, cpu_seconds=1) as reward:
        with pytest.raises(RewardCrashError, match="more CPU time than limits.cpu_seconds"):
            await reward("endless_loop")


async def test_the_limit_of_cpu_time_is_for_each_call():
    wrapper = AsyncRewardWrapper(
        burn, timeout_seconds=30, max_workers=1, max_retries=0, limits={"cpu_seconds": 1.5}
    )
    with closing(wrapper):
        assert [await wrapper() for _ in range(5)] == [1.0] * 5  # 2 s in all


def burn():
    end = time.process_time() + 0.4
    while time.process_time() < end:
        pass
    return 1.0


async def test_secrets_of_the_run_are_out_of_reach(monkeypatch):
    monkeypatch.setenv("AREAL_SERVER_TOKEN", SECRET)
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    for name in ("OPENAI_KEY", "GH_PAT", "DB_PASS", "PGPASSWORD", "NOBODY_THOUGHT_OF_THIS"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{SECRET}@proxy:1")
    monkeypatch.setenv("PYTHONSTARTUP_TOKEN", SECRET)
    # The server of a run has its token in its environment too.
    server = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={**os.environ, "AREAL_SERVER_TOKEN": SECRET},
    )
    try:
        async with attacker() as reward:
            assert await reward("own_environment", SECRET) == 0.0
            for attack in (
                ("parent_environment", SECRET),
                ("read_bytes", f"/proc/{server.pid}/environ", SECRET),
                ("parent_memory",),
                ("trace_parent",),
            ):
                assert "ermi" in await refused(reward, *attack)  # Permission, not permitted
            if landlock_abi() >= 6:
                assert "not permitted" in await refused(reward, "signal_parent")
        for name in ("JUDGE_API_KEY", "NOBODY_THOUGHT_OF_THIS"):
            async with attacker(env=[name]) as reward:
                assert await reward("own_environment", SECRET) == 1.0
    finally:
        server.kill()
        server.wait()


@pytest.mark.skipif(landlock_abi() < 3, reason="this kernel has no Landlock")
async def test_files_outside_its_folders_stay_as_they_are(tmp_path):
    kept, open_folder = tmp_path / "kept", tmp_path / "open"
    kept.write_text("as it was")
    open_folder.mkdir()
    async with attacker(writable=[str(open_folder)]) as reward:
        for attack in (
            ("write", str(kept)),
            ("write", str(tmp_path / "new")),
            ("write", "/dev/shm/areal-attack"),
            ("remove", str(kept)),
            ("truncate", str(kept)),
            ("move", str(kept), str(open_folder / "stolen")),
        ):
            assert "limits.writable" in await refused(reward, *attack), attack
        assert await reward("write", str(open_folder / "mine")) == 1.0
        assert await reward("temporary") == 1.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "open"]
    assert kept.read_text() == "as it was"


async def test_network_is_there_unless_it_is_switched_off():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        async with attacker() as reward:
            assert await reward("connect", port) == 1.0
        async with attacker(network=False) as reward:
            for attack in (("connect", port), ("socket",)):
                assert "network=False" in await refused(reward, *attack)


async def test_a_patched_grader_is_nobody_elses():
    """Two functions never share a process, and neither shares one with the run."""
    with (
        closing(AsyncRewardWrapper(sample_attacks.patch_the_graders, max_workers=1)) as bad,
        closing(AsyncRewardWrapper("areal.reward.gsm8k.gsm8k_reward_fn", max_workers=1)) as good,
    ):
        row = ("q", "#### 5", [1], [2])
        assert await good(*row, answer="#### 4") == 0.0
        with contextlib.suppress(RewardError):  # it may break its own process as well
            await bad("x")
        assert await good(*row, answer="#### 4") == 0.0
        assert await good(*row, answer="#### 5") == 1.0
        assert float("0.25") == 0.25 and not isinstance(1, str)


async def test_the_folder_of_a_worker_goes_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with attacker() as reward:
        await reward("temporary")
        assert len(list(tmp_path.glob("areal-rewards.*/*/file"))) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "limits, message",
    [
        ({"memory_gb": 0}, "memory_gb must be above 0, got 0"),
        ({"max_processes": -1}, "max_processes must be at least 0"),
        ({"memory": 3}, "limits: expected memory_gb, cpu_seconds"),
        ({"writable": ["$NO_SUCH_VARIABLE_9"]}, "writable uses"),
    ],
)
def test_wrong_limits_are_refused_by_name(limits, message):
    with pytest.raises(ValueError, match=message):
        AsyncRewardWrapper(sample_attacks.attack, limits=limits)


async def test_a_folder_that_does_not_exist_is_named():
    async with attacker(writable=["/no/such/folder"]) as reward:
        assert "limits.writable: /no/such/folder: No such file" in await refused(reward, "thread")


async def test_what_programs_need_of_the_environment_is_there(monkeypatch):
    for name, value in (("LC_TIME", "C.UTF-8"), ("OMP_NUM_THREADS", "3"), ("HF_HOME", "/hub")):
        monkeypatch.setenv(name, value)
    async with attacker() as reward:
        for name in ("PATH", "LC_TIME", "OMP_NUM_THREADS", "HF_HOME"):
            assert await reward("own_environment", f"{name!r}: {os.environ[name]!r}") == 1.0


def test_the_variables_are_documented():
    page = (Path(__file__).parents[2] / "docs" / "howto" / "reward.md").read_text()
    for name in process._NAMES:
        assert f"`{name}`" in page or name.upper().endswith("_PROXY"), name
    for prefix in process._PREFIXES:
        assert f"`{prefix}*`" in page


async def test_without_limits_there_are_none(monkeypatch):
    monkeypatch.setenv("OPENAI_KEY", SECRET)
    wrapper = AsyncRewardWrapper(sample_attacks.attack, max_workers=1, max_retries=0, limits=None)
    with closing(wrapper):
        assert await wrapper("spawn") == 1.0
        assert await wrapper("own_environment", SECRET) == 1.0
    monkeypatch.delenv("OPENAI_KEY")
    monkeypatch.setenv("AREAL_SERVER_TOKEN", SECRET)
    with closing(AsyncRewardWrapper(sample_attacks.attack, limits=None)) as wrapper:
        assert await wrapper("own_environment", SECRET) == 0.0
    assert ProcessLimits().network
