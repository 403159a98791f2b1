"""Serves a hub's environments over pipes. Run by the hub's own Python; imports nothing of areal.

    python bridge.py reasoning-gym       JSON-RPC 2.0 (rpc.py), a JSON text per line

    open  {name, kwargs}                 once, first: loads the environment; {} or an error
    tasks {start, count}                 {tasks}, of harbor alone, which has no episodes here
    reset {episode, row}                 {observation, tools}
    step  {episode, action}              {observation, reward, done}
    tool  {episode, name, arguments}     {text}
    close {episode}                      {}

Each hub is a class here with `open`, and all but harbor have episodes with `reset`, `step` and
`close`. Plain methods run one after another, with `random` in the state in which the episode left
it: hubs draw from the module's global generator, and episodes must not disturb each other's draws.
`async` methods overlap.

What a hub prints goes to stderr; the real stdout carries answers only. Ends when stdin does.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import random
import re
import sys
import traceback
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 8 << 20
MAX_TASKS = 100_000  # of a taskset without end
MAX_WAIT_S = 3600.0  # the deadline is set by who asks
FIRST_TEST_SEED = 1_000_000_000  # of the data set `seeds`
NO_RUNTIME = inspect.Parameter("runtime", inspect.Parameter.KEYWORD_ONLY, default=None)


class ReasoningGym:
    """One question, one answer. `kwargs` are those of the task's data set."""

    def open(self, name, kwargs):
        import reasoning_gym

        self.create = lambda seed: reasoning_gym.create_dataset(name, seed=seed, size=1, **kwargs)
        self.create(0)  # a wrong name or argument fails here

    def episode(self):
        return ReasoningGymEpisode(self)


class ReasoningGymEpisode:
    def __init__(self, hub):
        self.hub = hub

    def reset(self, row):
        self.tasks = self.hub.create(seed_of(row))
        self.entry = self.tasks[0]
        return self.entry["question"]

    def step(self, action):
        answers = re.findall(r"<answer>(.*?)</answer>", action, re.DOTALL)
        answer = (answers[-1] if answers else action).strip()
        return "", float(self.tasks.score_answer(answer=answer, entry=self.entry)), True


class TextArena:
    """Games of one player. `kwargs` are those of the game."""

    def open(self, name, kwargs):
        import textarena

        self.arena = textarena
        known = textarena.envs.registration.ENV_REGISTRY
        if name not in known:
            raise ValueError(f"textarena has no game {name!r}; games are {', '.join(named(known))}")
        raw = f"{name}-raw"  # the same game, which shows each message once
        self.make = lambda: textarena.wrappers.ActionFormattingWrapper(
            textarena.make(raw if raw in known else name, **kwargs)
        )
        self.make()

    def episode(self):
        return TextArenaEpisode(self)


class TextArenaEpisode:
    def __init__(self, hub):
        self.hub = hub

    def reset(self, row):
        self.game = self.hub.make()
        try:
            self.game.reset(num_players=1, seed=seed_of(row))
        except AssertionError as error:
            raise ValueError(f"only games of one player can be played: {error}") from error
        return self.seen()

    def step(self, action):
        done, _ = self.game.step(action)
        if not done:
            return self.seen(), 0.0, False
        rewards, _ = self.game.close()
        return "", float(rewards[0]), True

    def seen(self):
        """What is new; the player's own moves are in its transcript already."""
        own = self.hub.arena.ObservationType.PLAYER_ACTION
        _, messages = self.game.get_observation()
        if isinstance(messages, str):
            return messages
        return "\n".join(text for _, text, kind in messages if kind != own)


class Verifiers:
    """Tasksets whose tasks are one question, scored without a container or tools.

    `kwargs` are those of the taskset's config. The last tenth of the tasks is for tests.
    """

    def open(self, name, kwargs):
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.utils import loaders

        config = loaders.taskset_config_type(name)(id=name, **kwargs)
        taskset = loaders.load_taskset(config)
        self.agent = AgentConfig()
        self.tasks = list(itertools.islice(taskset, MAX_TASKS))
        if len(self.tasks) < 2:
            raise ValueError(f"{name} has {len(self.tasks)} tasks; training and tests need two")
        self.refuse(self.tasks[0], name)

    def refuse(self, task, name):
        """ValueError if scoring needs more than the chat."""
        runtime = [
            hook.__name__
            for hook in task.hooks("reward")
            if inspect.signature(hook).parameters.get("runtime", NO_RUNTIME).default
            is inspect.Parameter.empty
        ]
        if task.NEEDS_CONTAINER or task.toolsets(task.config) or runtime:
            raise ValueError(
                f"the tasks of {name} need a container or tools of verifiers; only tasksets that "
                "are scored by the reply alone can be run"
            )

    def task_of(self, seed):
        first_test = len(self.tasks) - max(1, len(self.tasks) // 10)
        if seed >= FIRST_TEST_SEED:
            return self.tasks[first_test + seed % (len(self.tasks) - first_test)]
        return self.tasks[seed % first_test]

    def episode(self):
        return VerifiersEpisode(self)


class VerifiersEpisode:
    def __init__(self, hub):
        self.hub = hub

    async def reset(self, row):
        from verifiers.v1.types import SystemMessage, UserMessage

        self.task = self.hub.task_of(seed_of(row))
        prompt = self.task.data.prompt
        if not prompt:
            raise ValueError("the task has no prompt: its user opens the chat, which is not run")
        self.chat = [UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
        if self.task.data.system_prompt:
            self.chat.insert(0, SystemMessage(content=self.task.data.system_prompt))
        return [{"role": one.role, "content": one.content} for one in self.chat]

    async def step(self, action):
        from verifiers.v1.graph import MessageNode
        from verifiers.v1.state import state_cls
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask
        from verifiers.v1.types import AssistantMessage

        task = self.task
        trace = Trace(
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(),
            agent=AgentInfo(config=self.hub.agent),
        )
        for number, message in enumerate([*self.chat, AssistantMessage(content=action)]):
            parent, sampled = (number - 1 if number else None), number == len(self.chat)
            trace.nodes.append(MessageNode(parent=parent, message=message, sampled=sampled))
        trace.is_completed = trace.ok = True
        await task.score(trace)
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing or not trace.rewards:
            raise ValueError(f"the task gave no reward {', '.join(missing)}")
        return "", float(trace.reward), True


class OpenEnv:
    """A server that runs elsewhere; `kwargs` name the texts in its actions and observations."""

    async def open(self, name, kwargs):
        from openenv.core.generic_client import GenericEnvClient

        self.action, self.observation = kwargs.pop("action", None), kwargs.pop("observation", None)
        if kwargs:
            raise ValueError(f"env_kwargs may be action and observation, got {', '.join(kwargs)}")
        self.connect = lambda: GenericEnvClient(base_url=name, message_timeout_s=MAX_WAIT_S)
        if self.action is None:
            self.action = await asyncio.to_thread(self.find_action, name)

    def find_action(self, url):
        import httpx

        schema = httpx.get(f"{url.rstrip('/')}/schema", timeout=60).raise_for_status().json()
        fields = schema["action"].get("properties", {})
        texts = [key for key, field in fields.items() if field.get("type") == "string"]
        if len(texts) != 1:
            raise ValueError(
                f"an action of {url} has the fields {', '.join(fields)}: name the one that is the "
                "reply's text in env_kwargs.action"
            )
        return texts[0]

    def episode(self):
        return OpenEnvEpisode(self)


class OpenEnvEpisode:
    def __init__(self, hub):
        self.hub = hub
        self.client: Any = None
        self.is_rewarded = False

    async def reset(self, row):
        self.client = self.hub.connect()
        await self.client.connect()
        result = await self.client.reset(seed=seed_of(row) % 2**31)
        return self.text(result.observation)

    async def step(self, action):
        result = await self.client.step({self.hub.action: action})
        self.is_rewarded = self.is_rewarded or result.reward is not None
        if result.done and not self.is_rewarded:
            raise ValueError("the environment is done and gave no reward in any step")
        return self.text(result.observation), float(result.reward or 0.0), bool(result.done)

    async def close(self):
        if self.client is not None:
            await self.client.close()

    def text(self, observation):
        shown = {key: value for key, value in observation.items() if isinstance(value, str)}
        key = self.hub.observation or (next(iter(shown)) if len(shown) == 1 else None)
        if key not in shown:
            raise ValueError(
                f"an observation has the fields {', '.join(observation)}: name the one that is a "
                "text in env_kwargs.observation"
            )
        return shown[key]


class Harbor:
    """Task folders: read and validated here, run by areal in its own sandbox."""

    def open(self, name, kwargs):
        from harbor.models.task.task import Task

        root = Path(name).absolute()
        is_task = (root / "task.toml").is_file()
        self.folders = [root] if is_task else sorted(f.parent for f in root.glob("*/task.toml"))
        if not self.folders:
            raise ValueError(f"{root} has no task.toml, and no folder in it has one")
        self.task = Task

    def tasks(self, start, count):
        return [self.plain(folder) for folder in self.folders[start : start + count]]

    def plain(self, folder):
        try:
            task = self.task(folder)
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} is no task of Harbor: {error}") from error
        config = task.config.model_dump(mode="json", exclude_defaults=True)
        told = task.instruction
        return {"name": task.name, "folder": str(folder), "instruction": told, "config": config}


HUBS = {
    "harbor": Harbor,
    "openenv": OpenEnv,
    "reasoning-gym": ReasoningGym,
    "textarena": TextArena,
    "verifiers": Verifiers,
}


def seed_of(row):
    """Every row of the data set `seeds` has one."""
    seed = row.get("seed")
    if not isinstance(seed, int):
        raise ValueError(
            f"the row has no whole number 'seed', found {sorted(row)}: use path: seeds"
        )
    return seed


def named(names, count=40):
    shown = sorted(names)
    return [*shown[:count], "..."] if len(shown) > count else shown


class Bridge:
    def __init__(self, hub, output):
        self.hub = hub
        self.output = output
        self.episodes = {}
        self.random = {}  # state of `random` by episode

    async def serve(self):
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
        tasks = set()
        while line := await reader.readline():
            task = loop.create_task(self.answer(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def answer(self, request):
        try:
            reply = {"result": await getattr(self, "do_" + request["method"])(**request["params"])}
            text = json.dumps(reply, allow_nan=False)
        except Exception as error:  # the hub's code: its failure is the answer
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"[:2000]
            text = json.dumps({"error": {"code": -32000, "message": message}})
        self.output.write(f'{{"jsonrpc":"2.0","id":{request["id"]},{text[1:]}\n'.encode())
        self.output.flush()

    async def do_open(self, name, kwargs):
        await self.run(None, self.hub.open, name, kwargs)
        return {}

    async def do_tasks(self, start, count):
        return {"tasks": self.hub.tasks(start, count)}

    async def do_reset(self, episode, row):
        self.episodes[episode] = current = self.hub.episode()
        observation = await self.run(episode, current.reset, row)
        return {"observation": observation, "tools": getattr(current, "tools", [])}

    async def do_step(self, episode, action):
        step = await self.run(episode, self.episodes[episode].step, action)
        observation, reward, done = step
        return {"observation": observation, "reward": reward, "done": done}

    async def do_tool(self, episode, name, arguments):
        return {"text": await self.run(episode, self.episodes[episode].tool, name, arguments)}

    async def do_close(self, episode):
        current = self.episodes.pop(episode, None)
        if hasattr(current, "close"):
            await self.run(episode, current.close)
        self.random.pop(episode, None)
        return {}

    async def run(self, episode, function, *args):
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        if episode in self.random:
            random.setstate(self.random[episode])
        result = function(*args)
        if episode is not None:
            self.random[episode] = random.getstate()
        return result


def main():
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    asyncio.run(Bridge(HUBS[sys.argv[1]](), output).serve())


if __name__ == "__main__":
    main()
