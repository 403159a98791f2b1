"""`env: harbor:FOLDER`: Harbor's tasks, worked on in a sandbox session and graded in a second one.

    hub = HarborEnvs("harbor:tasks", {"command_s": 30})
    environment = hub()            one episode: reset, step, close, as of every environment

Harbor's own package, in its own Python, reads and validates the folders. They run without
containers: the model's session has the files of the task and the programs of this machine. The
model ends its work with `exit` (or, with tools, by a reply that calls none). Its folders are then
copied into a clean session, without links that lead out of them; the tests are written there for
the first time and run, and the reward is what they leave in /logs/verifier. Tests that leave none
fail the episode.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from areal.api.json_text import JsonError, loads
from areal.dataset.seeds import FIRST_TEST_SEED
from areal.environments.hubs.dockerfile import Copy, Unsupported
from areal.environments.hubs.harbor_tasks import REWARDS, Options, Task, task_of
from areal.environments.hubs.remote import Bridge, HubEnvs
from areal.environments.interface import EnvError, Messages
from areal.environments.per_loop import PerLoop
from areal.environments.sandbox_tools import sandbox_tools
from areal.environments.tools import Tool
from areal.sandbox.output import printable
from areal.sandbox.session import Session
from areal.utils import logging

logger = logging.getLogger("Environment")

PROMPT = "\n# "
_PAGE = 50  # tasks of one answer
# Links that lead out of the model's folders could lead to the tests, once these are there; and
# nothing of the model's may wait where the tests and their verdict go.
_CLEAN = """
cd / && find /workspace -type l -exec sh -c '
drop() { rm -f "$1" || { chmod u+w "${1%/*}" && rm -f "$1"; } || exit 1; }
for link; do
    case $(readlink "$link") in */proc/*|*/proc) drop "$link"; continue;; esac
    case $(readlink -f "$link")/ in
        /workspace/.root/tests/*|/workspace/.root/logs/*) drop "$link";;
        /workspace/*) ;;
        *) drop "$link";;
    esac
done' sh {} + &&
cd /workspace/.root && rm -rf tests logs &&
mkdir -p tests logs/verifier logs/agent logs/artifacts
"""
_RUN = 'mkdir -p "$0" && cd "$0" && exec "$@"'  # a WORKDIR that does not exist is made
_MAKE_LOGS = "mkdir -p /logs/verifier /logs/agent /logs/artifacts"


class TaskSource(Protocol):
    env: str  # its name, in errors
    options: Options

    async def task(self, row: Mapping[str, Any]) -> Task: ...


class HarborEnvs:
    """Makes the environments of one folder of tasks."""

    def __init__(self, env: str, kwargs: Mapping[str, Any]) -> None:
        self.env = env
        self.options = Options.of(kwargs)
        self._reader = HubEnvs(env, {})
        self._tasks = PerLoop(self._read, bool)

    def __call__(self) -> HarborEnv:
        return HarborEnv(self)

    def close(self) -> None:
        self._reader.close()

    async def task(self, row: Mapping[str, Any]) -> Task:
        """The one of the row's seed. The last tenth is for seeds of tests only."""
        seed = row.get("seed")
        if not isinstance(seed, int):
            raise EnvError(
                f"environment {self.env}: the row has no whole number 'seed', found {sorted(row)}: "
                "use path: seeds"
            )
        tasks = await self._tasks.get()
        held_out = tasks[len(tasks) - max(1, len(tasks) // 10) :]
        if seed >= FIRST_TEST_SEED or len(tasks) == 1:
            return held_out[seed % len(held_out)]
        return tasks[seed % (len(tasks) - len(held_out))]

    async def _read(self) -> list[Task]:
        bridge = await self._reader.bridge()
        try:
            return await self._read_all(bridge)
        finally:
            bridge.process.kill()  # alone: another event loop may be reading by its own

    async def _read_all(self, bridge: Bridge) -> list[Task]:
        tasks: list[Task] = []
        refused: list[str] = []
        start, given = 0, [{}]
        while given:
            given = (await bridge.call("tasks", start=start, count=_PAGE)).get("tasks")
            if not isinstance(given, list):
                raise EnvError(f"environment {self.env}: the hub listed {given!r:.200}")
            start += len(given)
            for one in given:
                try:
                    tasks.append(task_of(one, self.options))
                except Unsupported as error:
                    refused.append(f"{one['name']}: {error}")
        self._settle(len(tasks), refused)
        return tasks

    def _settle(self, num_tasks: int, refused: list[str]) -> None:
        if not refused:
            return
        first = "; ".join(refused[:3]) + ("; ..." if len(refused) > 3 else "")
        found = f"environment {self.env}: {len(refused)} of {num_tasks + len(refused)} tasks need "
        found += f"more than a sandbox has: {first}"
        if num_tasks and self.options.skip_unsupported:
            logger.warning("%s; they are left out", found)
            return
        advice = "; env_kwargs.skip_unsupported leaves them out" if num_tasks else ""
        raise EnvError(found + advice)


class HarborEnv:
    """One episode. `hub` knows the tasks."""

    def __init__(self, hub: TaskSource) -> None:
        self._hub = hub
        self._options = hub.options
        self._task: Task
        self._session: Session | None = None
        self._num_commands = 0
        self.tools: list[Tool] = []

    async def reset(self, row: dict[str, Any]) -> Messages:
        self._task = await self._hub.task(row)
        self._session = session = await Session.start(self._task.limits)
        await self._shell(session, _MAKE_LOGS)
        for action in self._task.actions:
            if isinstance(action, Copy):
                files = await asyncio.to_thread(self._task.copied, action)
                await session.write_tree("/", files)
            else:
                await self._shell(session, _RUN, action.workdir, *action.command)
        if self._options.interface == "tools":
            self.tools = sandbox_tools(session)
        told = self._task.instruction.strip()
        told += PROMPT if self._options.interface == "commands" else ""
        system = self._options.instructions
        first = [{"role": "system", "content": system}] if system else []
        return [*first, {"role": "user", "content": told}]

    async def step(self, action: str) -> tuple[str, float, bool]:
        assert self._session is not None  # `reset` comes first
        command = action.strip()
        if self._options.interface == "tools" or command == "exit":
            return "", await self._grade(self._session), True
        result = await self._session.shell(command)
        self._num_commands += 1
        if self._num_commands >= self._options.max_commands:
            return "", await self._grade(self._session), True
        return result.text + PROMPT, 0.0, False

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _grade(self, session: Session) -> float:
        task = self._task
        trees: dict[str, bytes] = {}
        for root in task.roots:
            with suppress(FileNotFoundError):  # the model has removed it
                trees[root] = await session.read_tree(root)
        async with await Session.start(task.grading) as clean:
            for root, tree in trees.items():
                await clean.write_tree(root, tree)
            await self._shell(clean, _CLEAN)
            await clean.write_tree("/", await asyncio.to_thread(task.tests))
            result = await clean.shell("chmod +x /tests/test.sh && exec /tests/test.sh")
            if result.limit:  # what they have left is no verdict
                raise self._fault(f"the tests did not end:\n{printable(result.text, 2000)}")
            return await self._reward(clean, result.text)

    async def _reward(self, clean: Session, said: str) -> float:
        for path in REWARDS:
            try:
                text = await clean.read_file(path)
            except OSError:
                continue
            return self._number(path, text)
        raise self._fault(f"the tests left no {REWARDS[1]}; they said:\n{printable(said, 2000)}")

    def _number(self, path: str, text: bytes) -> float:
        try:
            given = loads(text) if path.endswith(".json") else float(text.decode())
        except (JsonError, ValueError) as error:
            raise self._fault(f"{path} holds {text[:100]!r}: {error}") from error
        if isinstance(given, dict):
            given = given.get("reward", next(iter(given.values())) if len(given) == 1 else given)
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        if not is_number or not math.isfinite(given):
            raise self._fault(f"{path} holds {given!r:.200}, expected a number or 'reward'")
        return float(given)

    async def _shell(self, session: Session, script: str, *arguments: str) -> None:
        result = await session.run(["sh", "-c", script, *arguments])
        if result.exit_code != 0:
            shown = " ".join(arguments) or script
            raise self._fault(f"`{shown:.200}` failed in the sandbox: {result.text}")

    def _fault(self, what: str) -> EnvError:
        return EnvError(f"environment {self._hub.env}: task {self._task.name}: {what}")
