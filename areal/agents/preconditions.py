"""Checks an agent's options before the first episode. Loads no torch: `areal check` asks it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from areal.openai.tool_calls import TOOL_PARSERS

if TYPE_CHECKING:
    from areal.api.config.inference import AgentConfig

ADMIN_KEY = "AREAL_ADMIN_API_KEY"  # environment variable with the key that starts sessions
_MIN_ADMIN_KEY = 16


def check_agent_options(config: AgentConfig) -> None:
    """ValueError for an unknown name or, with `mode: online`, a missing admin key."""
    if config.tool_call_parser not in TOOL_PARSERS:
        known = ", ".join(sorted(TOOL_PARSERS))
        raise ValueError(
            f"rollout.agent.tool_call_parser: unknown name {config.tool_call_parser!r}; expected "
            f"one of {known}"
        )
    if config.mode == "online":
        admin_key()


def admin_key() -> str:
    key = os.environ.get(ADMIN_KEY, "")
    if len(key) < _MIN_ADMIN_KEY:
        raise ValueError(
            f"rollout.agent.mode=online: set the environment variable {ADMIN_KEY} to a secret of "
            f"at least {_MIN_ADMIN_KEY} characters; clients start sessions with it"
        )
    return key
