"""An OpenEnv server with a small game: write the larger of two digits. Run by the hub's Python:

~/.cache/areal/envs/openenv/bin/python examples/hubs/openenv_server.py 8000
"""

from __future__ import annotations

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    text: str


class Seen(Observation):
    text: str


class Larger(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.digits = random.Random(seed).sample("123456789", 2)
        return Seen(text=f"{self.digits[0]},{self.digits[1]}=")

    def step(self, action, timeout_s=None, **_):
        return Seen(text="", done=True, reward=float(action.text.strip() == max(self.digits)))

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Larger, Say, Seen, max_concurrent_envs=512)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
