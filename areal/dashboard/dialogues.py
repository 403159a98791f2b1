"""The dialogues of agents' episodes, found by prompt and sample without reading the whole log.

    index = DialogueIndex(paths.logs)
    index.read(task_id=12, sample=0)     # Episode as a tree of turns, None if not kept
    index.newest(50)                     # records as stored, newest first

Each line of the log begins with its prompt and sample, so only wanted lines are parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal.agents.episode_log import FOLDER, Episode, episode_of

_HEAD = re.compile(rb'\{"task_id": ?(\d+), ?"sample": ?(\d+)')
_TAIL_BYTES = 1 << 22  # of each file that `newest` reads


class DialogueIndex:
    def __init__(self, logs: Path) -> None:
        self._files = sorted((logs / FOLDER).glob("*.jsonl"))

    def read(self, task_id: int, sample: int) -> Episode | None:
        """The newest episode of this sample."""
        wanted = (task_id, sample)
        found = [
            record
            for file in self._files
            for line in _lines(file)
            if (head := _HEAD.match(line)) and (int(head[1]), int(head[2])) == wanted
            if (record := _parse(line)) is not None
        ]
        return episode_of(max(found, key=lambda one: one["time"])) if found else None

    def newest(self, count: int) -> list[dict[str, Any]]:
        records = [record for file in self._files for record in _tail(file)]
        return sorted(records, key=lambda one: -one["time"])[:count]


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as lines:
        yield from lines


def _tail(file: Path) -> list[dict[str, Any]]:
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        begin = max(0, size - _TAIL_BYTES)
        stream.seek(begin)
        lines = stream.read().splitlines(keepends=True)
    whole = lines[1:] if begin else lines
    return [record for line in whole if (record := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    """None for a line that a killed process left half-written."""
    try:
        return json.loads(line)
    except ValueError:
        return None
