"""AsyncRewardWrapper against real processes: every way a reward function can fail, and its cost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
import sample_rewards

from areal.sandbox.pool import (
    AsyncRewardWrapper,
    RewardCrashError,
    RewardError,
    RewardTimeoutError,
)


@asynccontextmanager
async def counted_ticks():
    """How often the event loop ran meanwhile, as the one item of a list."""
    ticks = [0]

    async def tick():
        while True:
            await asyncio.sleep(0.001)
            ticks[0] += 1

    ticker = asyncio.create_task(tick(), name="ticker")
    try:
        yield ticks
    finally:
        ticker.cancel()


def child_environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


async def attempt(how, *, timeout_seconds=5.0, max_retries=1, limits=None, **kwargs):
    """The outcome of one bad call, and the wrapper's counts."""
    wrapper = AsyncRewardWrapper(
        sample_rewards.misbehave,
        timeout_seconds,
        max_workers=1,
        max_retries=max_retries,
        limits=limits or {},
    )
    with closing(wrapper):
        return await wrapper(how, **kwargs), wrapper.counts


@pytest.mark.parametrize(
    "reward_fn", [sample_rewards.exact_match, "sample_rewards.exact_match"], ids=["object", "path"]
)
async def test_value_of_the_function(reward_fn):
    with closing(AsyncRewardWrapper(reward_fn)) as reward:
        assert await reward("2+2=", "4", [1, 2], [3], answer="4") == 1.0
        assert await reward("2+2=", "5", [1, 2], [3], answer="4") == 0.0


async def test_many_calls_keep_their_own_results():
    with closing(AsyncRewardWrapper(sample_rewards.add, max_workers=2)) as reward:
        assert await asyncio.gather(*(reward(i, b=0.5) for i in range(300))) == [
            i + 0.5 for i in range(300)
        ]
        assert not reward.counts


async def test_large_arguments_pass():
    with closing(AsyncRewardWrapper(sample_rewards.exact_match, max_workers=1)) as reward:
        text = "x" * 1_000_000
        calls = [reward("p", text, list(range(50_000)), [], answer=text) for _ in range(8)]
        assert await asyncio.gather(*calls) == [1.0] * 8


async def test_slow_calls_spread_over_the_workers(tmp_path):
    wrapper = AsyncRewardWrapper(
        sample_rewards.meet, 120, max_workers=4, limits={"writable": [str(tmp_path)]}
    )
    with closing(wrapper) as reward:
        met = await asyncio.gather(*(reward(str(tmp_path), 4) for _ in range(4)))
    assert met == [1.0] * 4


@pytest.mark.parametrize(
    "how, error, text, kind",
    [
        ("hang", RewardTimeoutError, "did not return within 0.2 s", "timeout"),
        ("orphan", RewardTimeoutError, "did not return within 0.2 s", "timeout"),
        ("exit", RewardCrashError, "ended with exit code 3", "crash"),
        ("segfault", RewardCrashError, "ended by signal SIGSEGV", "crash"),
        ("garbage", RewardCrashError, "not JSON", "crash"),
        ("raise", RewardError, "misbehave raised ZeroDivisionError: the reward divides", "error"),
        ("sys.exit", RewardError, "misbehave raised SystemExit", "error"),
    ],
)
async def test_a_fault_is_raised_after_retries_and_never_becomes_a_reward(how, error, text, kind):
    timeout_seconds = 0.2 if kind == "timeout" else 10.0
    wrapper = AsyncRewardWrapper(
        sample_rewards.misbehave,
        timeout_seconds,
        max_workers=1,
        max_retries=1,
        limits={"max_processes": 4},
    )
    with closing(wrapper):
        async with counted_ticks() as ticks:
            with pytest.raises(error, match=text):
                await wrapper(how)
        assert wrapper.counts == {kind: 2}
        assert await wrapper("return", 0.25) == 0.25  # the wrapper lives on
    assert ticks[0] > 0  # the call did not block the loop


@pytest.mark.parametrize(
    "value, text",
    [
        (float("nan"), "returned nan; a reward must be finite"),
        (float("inf"), "returned inf"),
        ("1.0", r"must be a number, got '1.0' \(str\)"),
        (None, r"got None \(NoneType\)"),
        ([1.0], r"returned \[1.0\] \(list\); it is called once per answer"),
    ],
)
async def test_what_is_not_a_finite_number_is_an_error(value, text):
    with pytest.raises(RewardError, match=text):
        await attempt("return", value=value)


@pytest.mark.parametrize("value", [1, True, 0.5])
async def test_ints_and_bools_are_numbers(value):
    assert (await attempt("return", value=value))[0] == float(value)


async def test_a_value_that_comes_after_the_timeout_is_not_used():
    wrapper = AsyncRewardWrapper(sample_rewards.slow, 0.1, max_workers=1, max_retries=0)
    with closing(wrapper):
        with pytest.raises(RewardTimeoutError):
            await wrapper(0.3, 1.0)
        assert await wrapper(0.0, 0.5) == 0.5  # not the late 1.0


@pytest.mark.parametrize("how", ["hang", "exit", "segfault", "raise"])
async def test_a_fault_that_passes_is_retried(how, tmp_path):
    value, counts = await attempt(
        how,
        timeout_seconds=0.2 if how == "hang" else 10,
        limits={"writable": [str(tmp_path)]},
        marker=str(tmp_path / "once"),
    )
    assert value == 1.0
    assert sum(counts.values()) == 1


async def test_calls_queued_behind_a_hung_or_dead_one_do_not_pay_for_it():
    wrapper = AsyncRewardWrapper(sample_rewards.misbehave, 0.3, max_workers=1, max_retries=0)
    with closing(wrapper):
        await asyncio.gather(*(wrapper("return", 1.0) for _ in range(100)))  # learns: it is fast
        calls = [wrapper({10: "hang", 20: "exit"}.get(i, "return"), float(i)) for i in range(40)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[10], RewardTimeoutError)
        assert isinstance(results[20], RewardCrashError)
        assert [r for i, r in enumerate(results) if i not in (10, 20)] == [
            float(i) for i in range(40) if i not in (10, 20)
        ]
        assert wrapper.counts == {"timeout": 1, "crash": 1}


async def test_the_timeout_counts_from_the_start_of_the_call_not_from_the_queue():
    with closing(AsyncRewardWrapper(sample_rewards.slow, 0.4, max_workers=1)) as reward:
        assert await asyncio.gather(*(reward(0.1) for _ in range(8))) == [1.0] * 8
        assert not reward.counts


async def test_a_cancelled_call_lets_the_others_go_on():
    with closing(AsyncRewardWrapper(sample_rewards.slow, 5, max_workers=1)) as reward:
        first, second = (asyncio.ensure_future(reward(0.05, v)) for v in (1.0, 2.0))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == 2.0


async def test_a_killed_idle_worker_is_replaced_without_penalty():
    with closing(AsyncRewardWrapper(sample_rewards.pid, max_workers=1, max_retries=0)) as reward:
        first = int(await reward())
        os.kill(first, 9)
        await asyncio.sleep(0.1)
        assert int(await reward()) != first
        assert not reward.counts


async def test_a_function_that_does_not_import_is_an_error_at_once():
    reward = AsyncRewardWrapper("sample_rewards.no_such_function")
    with closing(reward), pytest.raises(RewardError, match="cannot load .*no_such_function"):
        await reward("p", "c")


async def test_a_module_that_kills_its_process_at_import_is_a_crash(tmp_path, monkeypatch):
    (tmp_path / "deadly_module.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    wrapper = AsyncRewardWrapper("deadly_module.fn", max_workers=1, max_retries=1)
    with closing(wrapper), pytest.raises(RewardCrashError, match="exit code 7 while loading"):
        await asyncio.wait_for(wrapper("p"), timeout=10)


async def test_workers_do_not_import_torch():
    import torch  # noqa: F401  the parent has it

    with closing(AsyncRewardWrapper(sample_rewards.has_torch)) as reward:
        assert await reward() == 0.0


@pytest.mark.parametrize("bad", [lambda *_: 1.0, "gsm8k"], ids=["lambda", "bare name"])
def test_functions_that_cannot_travel_are_refused_at_once(bad):
    with pytest.raises(ValueError, match="reward_fn: "):
        AsyncRewardWrapper(bad)


@pytest.mark.parametrize("name, value", [("max_workers", 0), ("max_retries", -1)])
def test_bad_options_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be at least .* got {value}"):
        AsyncRewardWrapper(sample_rewards.add, **{name: value})


async def test_an_argument_that_does_not_pickle_is_named():
    reward = AsyncRewardWrapper(sample_rewards.add)
    with closing(reward), pytest.raises(TypeError, match="argument of add does not pickle"):
        await reward(1, b=threading.Lock())


def test_too_few_file_descriptors_mean_fewer_workers_not_failed_calls():
    script = """
import asyncio, resource
from areal.sandbox.pool import AsyncRewardWrapper
from sample_rewards import slow

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
    reward = AsyncRewardWrapper(slow, max_workers=64)
    assert await asyncio.gather(*(reward(0.01) for _ in range(100))) == [1.0] * 100
    assert 1 <= reward.max_workers < 20
    reward.close()

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=900, env=child_environment())


async def test_close_fails_open_calls_and_ends_the_processes():
    reward = AsyncRewardWrapper(sample_rewards.misbehave, 60, max_workers=1)
    pid = int(await reward("pid"))
    call = asyncio.ensure_future(reward("hang"))
    await asyncio.sleep(0.1)
    reward.close()
    reward.close()
    with pytest.raises(RewardError, match="was closed"):
        await call
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_close_from_another_thread_while_the_loop_runs():
    reward = AsyncRewardWrapper(sample_rewards.slow, 60, max_workers=1)

    async def main():
        call = asyncio.ensure_future(reward(30.0))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(reward.close)
        with pytest.raises(RewardError, match="was closed"):
            await call

    asyncio.run(main())


def test_one_wrapper_serves_one_event_loop_after_another():
    reward = AsyncRewardWrapper(sample_rewards.add)
    for value in (1.0, 2.0):

        async def call(value=value):
            return await reward(value)

        assert asyncio.run(call()) == value
    reward.close()


def test_a_function_of_the_users_script_works_and_its_prints_go_to_stderr(tmp_path):
    script = tmp_path / "train_script.py"
    script.write_text(
        textwrap.dedent("""
        import asyncio
        from areal.sandbox.pool import AsyncRewardWrapper

        def my_reward(x):
            print("noise")
            return x / 2

        if __name__ == "__main__":
            async def main():
                reward = AsyncRewardWrapper(my_reward)
                print(await reward(5))
                reward.close()
            asyncio.run(main())
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env=child_environment(),
    )
    assert done.stdout == "2.5\n", done.stderr
    assert "noise" in done.stderr


def test_a_hung_worker_dies_with_its_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import asyncio, os, signal
        from areal.sandbox.pool import AsyncRewardWrapper

        async def main():
            reward = AsyncRewardWrapper("sample_rewards.misbehave", 60)
            print(int(await reward("pid")), flush=True)
            call = asyncio.ensure_future(reward("hang"))
            await asyncio.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env=child_environment(),
    )
    stat = Path(f"/proc/{int(done.stdout)}/stat")
    deadline = time.monotonic() + 300
    while stat.exists() and ") Z " not in stat.read_text():  # a zombie is dead too
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_a_function_that_never_returns_fails_all_that_wait():
    """300 calls of 0.1 s each with three retries would take two minutes."""
    wrapper = AsyncRewardWrapper("sample_rewards.loop_forever", timeout_seconds=0.1, max_workers=1)
    began = time.monotonic()
    results = await asyncio.gather(*(wrapper() for _ in range(300)), return_exceptions=True)
    wrapper.close()
    assert all(isinstance(result, RewardTimeoutError) for result in results)
    assert time.monotonic() - began < 80


@pytest.mark.parametrize("options", ["path", ["path"], {1: "path"}])
def test_options_are_names_and_values(options):
    with pytest.raises(ValueError, match="options must be names and values, got"):
        AsyncRewardWrapper("math.fsum", options=options)
