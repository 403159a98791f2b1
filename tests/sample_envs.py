"""Environments for tests: each a few lines, one way to behave or to fail."""

from __future__ import annotations

import asyncio

from areal.environments.tools import ToolError


class Count:
    """Wants the numbers 1, 2, 3 in turn; each right one earns 1, the last a bonus of 10."""

    closed = 0

    def __init__(self, last: int = 3):
        self.last, self.turn = last, 0

    async def reset(self, row):
        return f"seed {row['seed']}: 1"

    async def step(self, action):
        self.turn += 1
        done = self.turn == self.last
        reward = float(action == str(self.turn)) + 10 * done
        return "" if done else f" next {self.turn + 1}", reward, done

    async def close(self):
        Count.closed += 1


class Blocking:
    """As plain functions, with a chat as first observation."""

    def reset(self, row):
        return [{"role": "system", "content": "be brief."}, {"role": "user", "content": "go"}]

    def step(self, action):
        return None, 1, True


class Shop:
    """Tools, and a step for the final answer."""

    def __init__(self):
        self.tools = [self.price, self.stock, self.broken]

    async def reset(self, row):
        return "how much are two apples?"

    async def price(self, item: str, count: int = 1) -> str:
        """The price of some pieces of an item."""
        return str(3 * count)

    def stock(self, item: str) -> dict:
        raise ToolError(f"no {item} here")

    def broken(self) -> str:
        raise OSError("the shop burnt down")

    async def step(self, action):
        return "", float("6" in action), True


class Misbehaving(Count):
    """Fails in the way of row["fault"]."""

    async def reset(self, row):
        self.fault = row["fault"]
        if self.fault == "reset":
            raise KeyError("level")
        return "" if self.fault == "silent" else "go"

    async def step(self, action):
        match self.fault:
            case "raises":
                raise TimeoutError("its own database")
            case "hangs":
                await asyncio.sleep(60)
            case "two values":
                return "x", 1.0
            case "nan":
                return "x", float("nan"), True
            case "huge":
                return "x", 10**999, True
            case "done":
                return "x", 1.0, None
            case "observation":
                return 7, 1.0, False


class Text:
    """Stands for gymnasium.spaces.Text, which is recognised by its name."""


class Gym:
    """In the shape of gymnasium.Env."""

    action_space = Text()

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return f"seed {seed}", {}

    def step(self, action):
        return "bye", 0.5, False, action == "stop", {"info": 1}

    def close(self):
        self.seed = None


class Skyrl:
    """In the shape of skyrl_gym.envs.base_text_env.BaseTextEnv."""

    def __init__(self, env_config, extras):
        self.config, self.truth = env_config, extras["truth"]

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        done = action == self.truth
        hint = [] if done else [{"role": "user", "content": self.config["hint"]}]
        return {"observations": hint, "reward": float(done), "done": done, "metadata": {}}
