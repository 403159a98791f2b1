"""Checks an agent's options before the first episode. Loads no torch: `areal check` asks it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from areal.openai.parsing.formats import TOOL_FORMATS
from areal.openai.parsing.parser import REASONING_PARSERS

if TYPE_CHECKING:
    from areal.api.config.inference import AgentConfig

ADMIN_KEY = "AREAL_ADMIN_API_KEY"  # environment variable with the key that starts sessions
_MIN_ADMIN_KEY = 16


def check_agent_options(config: AgentConfig) -> None:
    """ValueError for an unknown name, a missing folder or, with `mode: online`, a missing admin
    key."""
    _check_name("tool_call_parser", config.tool_call_parser, ["auto", *TOOL_FORMATS])
    _check_name("reasoning_parser", config.reasoning_parser, [*REASONING_PARSERS])
    for folder in config.image_folders:
        if not os.path.isdir(folder):
            raise ValueError(f"rollout.agent.image_folders: {folder!r} is no folder")
    if config.mode == "online":
        admin_key()


def _check_name(key: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise ValueError(
            f"rollout.agent.{key}: unknown name {name!r}; expected one of {', '.join(known)}"
        )


def admin_key() -> str:
    key = os.environ.get(ADMIN_KEY, "")
    if len(key) < _MIN_ADMIN_KEY:
        raise ValueError(
            f"rollout.agent.mode=online: set the environment variable {ADMIN_KEY} to a secret of "
            f"at least {_MIN_ADMIN_KEY} characters; clients start sessions with it"
        )
    return key
