"""Faults around a reward function: of the kernel, of the pool, from outside, in what it says."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import sample_faults
import sample_rewards

from areal.api.redact import hide_secrets
from areal.sandbox.pool import AsyncRewardWrapper, RewardCrashError, RewardError

on_linux = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="for Linux"
)
ROW = ("2+2=", "4", [1, 2], [3])


def run_script(text, **env):
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}", **env},
        capture_output=True,
        text=True,
        timeout=900,
        errors="backslashreplace",
    )


# -- kernels


@on_linux
@pytest.mark.parametrize("lacking, named", [("landlock", "writing files"), ("seccomp", "shared")])
def test_a_kernel_that_lacks_something_is_told_once_and_calls_return(lacking, named):
    done = run_script(f"""
import asyncio, old_kernel
from areal.sandbox.pool import AsyncRewardWrapper
old_kernel.lack({lacking!r})

async def main():
    reward = AsyncRewardWrapper("sample_rewards.add", max_workers=2)
    print(await asyncio.wait_for(asyncio.gather(*(reward(i) for i in range(8))), 60))
    reward.close()

asyncio.run(main())
""")
    assert "[0.0, 1.0, 2.0" in done.stdout, done.stderr
    assert done.stderr.count("this system cannot limit") == 1
    assert named in done.stderr and "sample_rewards.add" in done.stderr


@on_linux
def test_no_network_is_insisted_on():
    done = run_script("""
import asyncio, old_kernel
from areal.sandbox.pool import AsyncRewardWrapper
old_kernel.lack("seccomp")
asyncio.run(AsyncRewardWrapper("sample_rewards.add", limits={"network": False})(1))
""")
    assert "limits.network=false cannot be kept on" in done.stderr


# -- the pool


class NoWriters(asyncio.SelectorEventLoop):
    """An event loop whose system has no room left, for the first time in a callback."""

    def add_writer(self, *args):
        raise OSError(28, "No space left on device")


def test_a_fault_in_a_callback_fails_the_calls_and_strands_none():
    async def main():
        with closing(AsyncRewardWrapper(sample_rewards.exact_match, max_workers=1)) as reward:
            text = "x" * 4_000_000  # more than a socket takes at once
            calls = [reward("p", text, [], [], answer=text) for _ in range(4)]
            return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)

    with asyncio.Runner(loop_factory=NoWriters) as runner:
        for found in runner.run(main()):
            assert isinstance(found, RewardError)
            assert "No space left on device" in str(found)


# -- kills from outside


def workers():
    """The processes that this one has started for rewards."""
    found = []
    for file in Path("/proc/self/task").glob("*/children"):
        for pid in file.read_text().split():
            try:
                if b"sandbox/worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
            except OSError:
                continue
    return found


async def kill_workers(times, every_s):
    for _ in range(times):
        await asyncio.sleep(every_s)
        for pid in workers():
            os.kill(pid, signal.SIGKILL)


@on_linux
async def test_calls_survive_kills_of_their_workers(tmp_path):
    wrapper = AsyncRewardWrapper(
        sample_faults.slow_and_marked, 60, max_workers=2, limits={"writable": [str(tmp_path)]}
    )
    with closing(wrapper):
        calls = [wrapper(str(tmp_path), 0.3, float(value)) for value in range(24)]
        killing = asyncio.create_task(kill_workers(8, 0.8))
        assert await asyncio.gather(*calls) == [float(value) for value in range(24)]
        await killing
        assert wrapper.counts["killed"] >= 1
        assert set(wrapper.counts) == {"killed"}


@on_linux
async def test_kills_while_it_loads_fail_nobody(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text(
        "import time\ntime.sleep(0.7)\ndef fn(x):\n    return x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with closing(AsyncRewardWrapper("slow_module.fn", max_workers=1, max_retries=1)) as wrapper:
        killing = asyncio.create_task(kill_workers(6, 0.3))
        calls = [wrapper(float(value)) for value in range(24)]
        assert await asyncio.gather(*calls) == [float(value) for value in range(24)]
        await killing


@on_linux
async def test_a_call_whose_worker_is_always_killed_fails_alone_and_in_bounded_time():
    with closing(AsyncRewardWrapper(sample_faults.kill_itself, 60, max_retries=1)) as wrapper:
        began = time.monotonic()
        with pytest.raises(RewardCrashError, match="ended by signal SIGKILL from outside"):
            await wrapper()
        assert wrapper.counts == {"killed": 6}
        assert time.monotonic() - began < 60


@on_linux
async def test_without_retries_nothing_runs_twice(tmp_path):
    """An agent's episode cannot be begun again from the middle."""
    wrapper = AsyncRewardWrapper(
        sample_faults.slow_and_marked, 60, max_retries=0, limits={"writable": [str(tmp_path)]}
    )
    with closing(wrapper):
        call = asyncio.create_task(wrapper(str(tmp_path), 30.0, 1.0))
        while not list(tmp_path.iterdir()):
            await asyncio.sleep(0.02)
        await kill_workers(1, 0)
        with pytest.raises(RewardCrashError, match="from outside"):
            await call
        assert len(list(tmp_path.iterdir())) == 1


# -- functions of another kind


@pytest.mark.parametrize(
    "function, texts",
    [
        (
            sample_faults.trl_style,
            ["takes (prompts, completions, **kwargs)", "too many positional"],
        ),
        (sample_faults.without_data, ["takes (prompt,", "'answer'", "data here: answer"]),
        (sample_faults.coroutine, ["is `async def`", "a plain function"]),
        (sample_faults.returns_list, ["returned [1.0] (list)", "one number, not a list as in TRL"]),
    ],
)
async def test_a_function_that_cannot_be_a_reward_is_told_what_is_expected(function, texts):
    with closing(AsyncRewardWrapper(function, max_workers=1)) as reward:
        with pytest.raises(RewardError) as caught:
            await reward(*ROW, answer="4")
        text = str(caught.value)
        assert "fn(prompt, completions, prompt_ids, completion_ids, **data) -> float" in text
        assert text.startswith(function.__name__) and "\n" not in text
        for expected in texts:
            assert expected in text
        assert reward.counts == {"error": 1}  # it was not tried again


async def test_a_type_error_inside_is_an_ordinary_one():
    with closing(AsyncRewardWrapper(sample_faults.wrong_inside, max_retries=1)) as reward:
        with pytest.raises(RewardError, match="raised TypeError: without_data\\(\\) missing 3"):
            await reward(*ROW)
        assert reward.counts == {"error": 2}


# -- what it returns and says


@pytest.mark.parametrize(
    "what, value",
    [
        *(("decimal", 0.25), ("fraction", 0.25), ("rude", 0.25), ("huge", 0.25)),
        *(("numpy float", 0.25), ("numpy int", 1.0), ("numpy bool", 1.0)),
        ("numpy scalar array", 0.25),
    ],
)
async def test_numbers_of_many_kinds(what, value):
    with closing(AsyncRewardWrapper(sample_faults.give, max_workers=1)) as reward:
        assert await reward(what) == value


@pytest.mark.parametrize(
    "what, text",
    [
        ("huge int", "must be finite, got 1000"),
        ("unshowable int", "must be finite, got <int>"),
        ("huge decimal", "returned inf; a reward must be finite"),
        ("not a float", "raised TypeError"),
        ("silent", r"must be a number, got <Silent> \(Silent\)"),
        ("complex", r"must be a number, got \(1\+2j\)"),
        ("text", r"must be a number, got '\\ud83d'"),
        ("numpy array", "one number, not a list"),
        ("numpy text", "must be a number"),
    ],
)
async def test_what_is_no_reward_is_named(what, text):
    with closing(AsyncRewardWrapper(sample_faults.give, max_workers=1, max_retries=0)) as reward:
        with pytest.raises(RewardError, match=text):
            await reward(what)
        assert not reward.counts["crash"]


@pytest.mark.parametrize(
    "what, text",
    [
        ("surrogate", "ValueError: half a \\ud83d smile"),
        ("escape", "\\x1b[2J\\x00\\x07 cleared \\u2028 line"),
        ("unshowable", "UnshowableError, which cannot be shown"),
        ("huge", "HugeError: yyyy"),
        ("many lines", "ValueError: line"),
    ],
)
async def test_an_error_is_fit_for_logs_databases_and_terminals(what, text):
    with closing(AsyncRewardWrapper(sample_faults.fail, max_workers=1, max_retries=0)) as reward:
        with pytest.raises(RewardError) as caught:
            await reward(what)
        found = str(caught.value)
        assert text in found and len(found) < 20_000
        assert not any(ord(character) < 32 and character not in "\n\t" for character in found)
        database = sqlite3.connect(":memory:")
        assert database.execute("SELECT ?", (found,)).fetchone() == (found,)
        assert not reward.counts["crash"]


def test_any_text_that_is_logged_can_be_stored():
    """Errors of workflows and of inline agents come without a reward process between."""
    text = hide_secrets("half a \ud83d smile, 中文, \U0001f600")
    assert text == "half a \ufffd smile, 中文, \U0001f600"


async def test_a_missing_variable_names_the_key():
    reward = AsyncRewardWrapper(sample_faults.reads_environment, max_retries=0)
    expected = "MY_SERVICE_URL.*limits.env names the variables"
    with closing(reward), pytest.raises(RewardError, match=expected):
        await reward()
