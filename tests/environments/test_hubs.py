"""Hubs: environments in a Python of their own, and what a hub can do wrong.

The package of the hub is tests/data/hubs/reasoning_gym.py; real ones are in test_real_hubs.py.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from areal.environments.calls import Calls
from areal.environments.hubs.catalog import HUBS, check_env, hub_interpreter
from areal.environments.hubs.remote import HubEnvs
from areal.environments.interface import EnvError, checked_step
from areal.environments.load import environment_maker

WAIT_S = 900.0


@pytest.fixture(autouse=True)
def hub_python(monkeypatch):
    folder = Path(__file__).parents[1] / "data" / "hubs"
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("AREAL_REASONING_GYM_PYTHON", sys.executable)


@pytest.fixture
def hub():
    """Makes environments of a task, and ends their processes."""
    made = []

    def make(task: str, **kwargs) -> HubEnvs:
        made.append(environment_maker(f"reasoning-gym:{task}", kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def calls(timeout_s: float = WAIT_S) -> Calls:
    return Calls("hub", timeout_s, max_concurrent=8)


async def begin(envs, seed: int = 7):
    environment = envs()
    return environment, await calls().run("reset", environment.reset, {"seed": seed})


async def step(environment, action: str, timeout_s: float = WAIT_S):
    return checked_step(await calls(timeout_s).run("step", environment.step, action), "step")


async def test_an_episode(hub):
    envs = hub("plain", biggest=99)
    environment, asked = await begin(envs)
    other, _ = await begin(envs, seed=8)
    again, asked_again = await begin(envs)
    assert asked == asked_again and asked.startswith("say ")
    number = asked.removeprefix("say ")
    assert await step(environment, f"I say <answer>{number}</answer>") == ([], 1.0, True)
    assert (await step(again, number)).reward == 1.0
    assert (await step(other, "no")).reward == 0.0
    for one in (environment, other, again):
        await one.close()


async def test_episodes_do_not_disturb_each_others_draws(hub):
    envs = hub("draws")
    alone, _ = await begin(envs, seed=3)
    expected = (await step(alone, "fault")).reward
    first, _ = await begin(envs, seed=3)
    second, _ = await begin(envs, seed=4)
    await step(second, "fault")
    assert (await step(first, "fault")).reward == expected


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("raises", 'KeyError: "the hub\'s own fault"'),
        ("nan", "ValueError: Out of range float"),
        ("text", "ValueError: could not convert"),
        ("dies", "signal SIGKILL; its last output:\n.*out of memory, or so"),
    ],
)
async def test_a_fault_of_the_hub_fails_the_episode(hub, fault, says):
    environment, _ = await begin(hub(fault))
    with pytest.raises(EnvError, match=f"(?s){says}"):
        await step(environment, "fault")


async def test_a_process_that_hangs_or_dies_is_replaced(hub):
    for fault in ("hangs", "dies"):
        envs = hub(fault)
        environment, _ = await begin(envs)
        with pytest.raises(EnvError):
            await step(environment, "fault", timeout_s=0.5)
        await environment.close()
        environment, asked = await begin(envs)
        assert (await step(environment, asked.removeprefix("say "))).reward == 1.0
        await environment.close()


async def test_an_unknown_task_and_a_row_without_a_seed(hub):
    with pytest.raises(EnvError, match="open failed: ValueError: Dataset 'unknown'"):
        await begin(hub("unknown"))
    with pytest.raises(EnvError, match="no whole number 'seed', found .*'question'.*path: seeds"):
        await calls().run("reset", hub("plain")().reset, {"question": "?"})


async def test_processes_end_with_the_workflow(hub):
    envs = hub("plain")
    environment, _ = await begin(envs)
    envs.close()
    with pytest.raises(EnvError, match="signal SIGKILL"):
        while True:  # the kill is asynchronous
            await step(environment, "1")
            await asyncio.sleep(0.01)


def test_a_hub_that_is_not_installed_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_ENVS", str(tmp_path))
    for hub in HUBS:
        monkeypatch.delenv(f"AREAL_{hub.upper().replace('-', '_')}_PYTHON", raising=False)
        with pytest.raises(ValueError, match=f"areal env create {hub}"):
            check_env(f"{hub}:anything")
    monkeypatch.setenv("AREAL_TEXTARENA_PYTHON", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="AREAL_TEXTARENA_PYTHON is .*nothing.*no program"):
        hub_interpreter("textarena")


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (
            "reasoning_gym:chain_sum",
            "names no known hub; hubs are harbor, openenv, reasoning-gym, ",
        ),
        ("reasoning-gym:", "lacks a TASK, as in reasoning-gym:chain_sum"),
    ],
)
def test_names_that_cannot_be_meant(env, says):
    with pytest.raises(ValueError, match=says):
        environment_maker(env, {})
    assert not check_env("my.module.Env")
