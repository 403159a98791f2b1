"""Serves a hub's environments over pipes. Run by the hub's own Python; imports nothing of areal.

    python bridge.py reasoning-gym       JSON-RPC 2.0 (rpc.py), a JSON text per line

    open  {name, kwargs}                 once, first: loads the environment; {} or an error
    reset {episode, row}                 {observation, tools}
    step  {episode, action}              {observation, reward, done}
    tool  {episode, name, arguments}     {text}
    close {episode}                      {}

Each hub is a class here with `open`, and episodes with `reset`, `step` and `close`. Plain methods
run one after another, with `random` in the state in which the episode left it: hubs draw from the
module's global generator, and episodes must not disturb each other's draws. `async` methods
overlap.

What a hub prints goes to stderr; the real stdout carries answers only. Ends when stdin does.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import re
import sys
import traceback

MAX_LINE_BYTES = 8 << 20


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


HUBS = {"reasoning-gym": ReasoningGym, "textarena": TextArena}


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
