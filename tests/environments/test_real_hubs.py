"""Environments of real hubs, where `areal env create` has made their Python."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from sandbox_support import needs_sandbox

from areal.environments.calls import Calls
from areal.environments.hubs.catalog import hub_interpreter
from areal.environments.interface import EnvError, checked_step
from areal.environments.load import environment_maker
from areal.utils.child_process import ChildProcess

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 900.0
CALLS = Calls("hub", WAIT_S, max_concurrent=8)

pytestmark = pytest.mark.slow


@pytest.fixture
def begin(monkeypatch):
    """Starts an episode: (environment, first observation)."""
    made = []
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples/hubs"))

    async def start(env: str, seed: int, **kwargs):
        hub = env.partition(":")[0]
        try:
            hub_interpreter(hub)
        except ValueError as error:
            pytest.skip(str(error))
        made.append(environment_maker(env, kwargs))
        environment = made[-1]()
        return environment, await CALLS.run("reset", environment.reset, {"seed": seed})

    yield start
    for one in made:
        one.close()


async def step(environment, action: str):
    return checked_step(await CALLS.run("step", environment.step, action), "step")


async def test_a_task_of_reasoning_gym(begin):
    environment, asked = await begin("reasoning-gym:count_bits", 3, max_n=15)
    number = int(asked.split()[-1].rstrip("?"))
    answer = number.bit_count()
    assert await step(environment, f"It is <answer>{answer}</answer>") == ([], 1.0, True)
    assert (await step(environment, f"{answer + 1}")).reward < 1.0


async def test_a_game_of_textarena(begin):
    environment, seen = await begin("textarena:GuessTheNumber-v0", 4, max_number=4, max_turns=9)
    assert "between 1 and 4" in seen
    first = await step(environment, "4")
    if not first.done:
        [message] = first.messages
        assert message["content"] == "The target number is lower."
    for guess in "321":
        if not first.done:
            first = await step(environment, guess)
    assert first.done and first.reward > 0


async def test_a_game_of_two_players_is_refused(begin):
    with pytest.raises(EnvError, match="only games of one player"):
        await begin("textarena:TicTacToe-v0", 1)


async def test_a_taskset_of_verifiers(begin):
    environment, chat = await begin("verifiers:reverse", 7)
    [message] = chat
    digits = message["content"].removesuffix("=")
    assert await step(environment, digits[::-1]) == ([], 1.0, True)
    assert (await step(environment, "9")).reward == 0.0


@needs_sandbox
async def test_a_task_folder_of_harbor(begin):
    environment, [message] = await begin(f"harbor:{ROOT}/examples/terminal/tasks", 0)
    assert message["content"] == "copy a to b\n# "
    assert (await step(environment, "cp a b")).reward == 0.0
    assert await step(environment, "exit") == ([], 1.0, True)
    await environment.close()
    with pytest.raises(EnvError, match="has no task.toml, and no folder in it has one"):
        await begin(f"harbor:{ROOT}/examples/hubs", 0)


async def test_an_openenv_server(begin):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        python = hub_interpreter("openenv")
    except ValueError as error:
        pytest.skip(str(error))
    script = str(ROOT / "examples/hubs/openenv_server.py")
    server = ChildProcess([python, script, str(port)], name="OpenEnv server")

    def is_up() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        await asyncio.to_thread(server.wait_until, is_up, timeout_s=WAIT_S)
        environment, seen = await begin(f"openenv:http://127.0.0.1:{port}", 3)
        larger = max(seen.removesuffix("=").split(","))
        assert await step(environment, larger) == ([], 1.0, True)
        await environment.close()
    finally:
        server.terminate()
