"""Environments of other libraries, recognised by their shape; none of them is imported.

| shape                                          | library   | built                            |
|------------------------------------------------|-----------|----------------------------------|
| `init(prompt)`, `step` returns a mapping       | skyrl-gym | class(env_config=..., extras=row)|
| `action_space`, `step` returns 5 values        | gymnasium | class(**env_kwargs)              |
| `reset(row)`, `step` returns 3 values          | ours      | class(**env_kwargs)              |

gymnasium: observations are texts and actions spaces.Text; `seed` of the row seeds the reset, whose
`options` are the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areal.environments.interface import EnvError


def is_skyrl(kind: Any) -> bool:
    return callable(getattr(kind, "init", None)) and callable(getattr(kind, "step", None))


def adapted(environment: Any, name: str) -> Any:
    """`environment` with our interface."""
    if hasattr(environment, "action_space"):
        return GymnasiumEnv(environment, name)
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise ValueError(
                f"env: {name} made {environment!r:.200}, which has no `{method}`; expected a class "
                "with `async def reset(self, row)` and `async def step(self, action)`, or one of "
                "gymnasium or skyrl-gym"
            )
    return environment


class GymnasiumEnv:
    def __init__(self, environment: Any, name: str) -> None:
        self._env = environment
        self._name = name
        if type(environment.action_space).__name__ != "Text":
            raise ValueError(
                f"env: {name} has the action space {environment.action_space!r:.100}, expected "
                "gymnasium.spaces.Text: the model writes text; wrap the environment so that its "
                "`step` takes one"
            )

    def reset(self, row: dict[str, Any]) -> str:
        observation, _ = self._env.reset(seed=row.get("seed"), options=dict(row))
        return self._text(observation)

    def step(self, action: str) -> tuple[str, float, bool]:
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return self._text(observation), float(reward), bool(terminated or truncated)

    def close(self) -> None:
        self._env.close()

    def _text(self, observation: Any) -> str:
        if not isinstance(observation, str):
            raise EnvError(
                f"{self._name} observed {observation!r:.100}, expected a text: wrap the "
                "environment so that its observations are texts"
            )
        return observation


class SkyRLEnv:
    """Built when its row is known: the class takes it as `extras`."""

    def __init__(self, kind: Callable[..., Any], config: Mapping[str, Any], name: str) -> None:
        self._kind = kind
        self._config = dict(config)
        self._name = name
        self._env: Any = None

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        prompt = row.get("messages", row.get("prompt"))
        if not isinstance(prompt, list):
            raise EnvError(
                f"{self._name} needs a chat in the row's 'messages' or 'prompt', found "
                f"{', '.join(row)}"
            )
        self._env = self._kind(env_config=self._config, extras=dict(row))
        messages, _ = self._env.init(prompt)
        return messages

    def step(self, action: str) -> tuple[list[dict[str, Any]], float, bool]:
        result = self._env.step(action)
        missing = [key for key in ("observations", "reward", "done") if key not in result]
        if missing:
            raise EnvError(f"{self._name}.step returned no {missing[0]!r}: {result!r:.200}")
        return list(result["observations"]), float(result["reward"]), bool(result["done"])

    def close(self) -> None:
        if self._env is not None and callable(getattr(self._env, "close", None)):
            self._env.close()
