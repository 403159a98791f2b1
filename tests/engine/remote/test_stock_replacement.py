"""A killed stock server is replaced: with its weights, without losing a request, within a bound."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from server_checks import ServerWorld, check_replacement, request
from sglang_server import sglang_python
from tiny import write_tiny_model

from areal.api.engine_api import EngineLostError
from areal.engine.remote.engine import RemoteEngine
from areal.engine.remote.server_process import ServerProcess
from areal.engine.remote.sglang import SGLangProtocol, launch_sglang_server
from areal.weight_sync.transports import PublicationRoot

TOKEN = "token-of-this-run"


class Launches:
    """Starts real servers and remembers their processes."""

    def __init__(self, model: Path, python: Path, log: Path) -> None:
        self._model, self._python, self._log = model, python, log
        self.children = []

    def __call__(self):
        child, address = launch_sglang_server(
            self._model,
            python=self._python,
            token=TOKEN,
            dtype="float32",
            log_path=self._log,
            setup_timeout_s=900,
        )
        self.children.append(child)
        return child, address

    def kill(self) -> None:
        os.killpg(self.children[-1].pid, signal.SIGKILL)


@pytest.fixture
async def launched(tmp_path):
    folders = [write_tiny_model(tmp_path / f"weights{seed}", seed=seed) for seed in (0, 7)]
    launches = Launches(folders[0], sglang_python(tmp_path), tmp_path / "server.log")
    process = await asyncio.to_thread(ServerProcess, launches)
    engine = RemoteEngine(
        SGLangProtocol(folders[0]),
        [process.address],
        TOKEN,
        processes=[process],
        max_restarts=1,
        request_timeout_s=120,
        request_retries=0,
    )
    await asyncio.to_thread(engine.initialize)
    yield ServerWorld(engine, folders, "replaced-test", tolerance=1e-4), launches
    await asyncio.to_thread(engine.destroy)
    process.close()


@pytest.mark.slow
async def test_a_killed_server_is_replaced(launched, tmp_path):
    world, launches = launched
    assert TOKEN not in Path(f"/proc/{launches.children[0].pid}/cmdline").read_text()
    with PublicationRoot("disk", run_name="test", disk_root=tmp_path / "published") as root:
        await check_replacement(world, root, launches.kill)
        assert len(launches.children) == 2

        # The next death meets a request, from the weights that serve. No update came since the one
        # before: a third server is one too many, and everybody is told how the last one ended.
        launches.kill()
        reply = await world.engine.agenerate(request())
        assert set(reply.output_versions) == {await asyncio.to_thread(world.engine.get_version)}
        world.check_logprobs([reply])
        launches.kill()
        for call in (asyncio.to_thread(world.engine.stats), world.engine.agenerate(request())):
            with pytest.raises(EngineLostError, match="SGLang server .*by signal SIGKILL"):
                await call
        assert len(launches.children) == 3
