"""Notices a run whose agents have tools that the model never calls.

Calls in a format that is not recognised stay in the text, agents go on without them, and rewards
may even be good. So many episodes in a row with tools and without one call are worth a warning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from areal.utils import logging

if TYPE_CHECKING:
    from areal.api.interaction import InteractionWithTokenLogpReward

logger = logging.getLogger("Agents")

PATIENCE = 200  # episodes
_SHOWN = 200  # characters of a reply


class SilentTools:
    """Warns once, in every process that runs episodes: each counts its own."""

    def __init__(self, tool_format: str) -> None:
        self._tool_format = tool_format
        self._num_silent = 0  # episodes in a row

    def note(self, episode: Iterable[InteractionWithTokenLogpReward]) -> None:
        asked = [item for item in episode if item.tools]
        if not asked or self._num_silent >= PATIENCE:
            return
        replies = [message for item in asked for message in item.output_message_list]
        if any(message.get("tool_calls") for message in replies):
            self._num_silent = 0
            return
        self._num_silent += 1
        if self._num_silent == PATIENCE:
            self._warn(str(replies[-1].get("content") or ""))

    def _warn(self, text: str) -> None:
        logger.warning(
            "THE TOOLS OF THE AGENT ARE NEVER CALLED: %d episodes in a row of this process had "
            "tools, and none of their replies had a call. Calls are read in the format %r "
            "(rollout.agent.tool_call_parser); the last reply was %r. If it has a call in another "
            "format, set that parser; if not, see that the chat template shows tools to the model "
            "and that the model was trained to use it; rollout.dump_to_file=true keeps whole "
            "episodes to look at",
            PATIENCE,
            self._tool_format,
            text[:_SHOWN],
        )
