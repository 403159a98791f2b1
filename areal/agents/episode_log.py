"""The agents' episodes that a run keeps: written as they end, read by `areal export`.

    {logs}/episodes/{host}-{pid}.jsonl      one line per training episode, one file per process

An episode is a tree of turns, one per completion. A turn holds what its parent does not: the
messages and prompt tokens after it, so a file grows with what was said and not with its square.
`read_episodes` puts them together again. An episode that was run again (a retry, a resumed run) is
there twice; the newest counts. A last line that a killed process left half-written is skipped.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.interaction import InteractionWithTokenLogpReward, Message
from areal.api.json_text import dumps
from areal.utils.fs import open_private, private_folder

FOLDER = "episodes"  # below the logs of a run


@dataclass(slots=True)
class Turn:
    """One completion."""

    id: str
    parent: str | None  # the turn whose tokens or messages it continues
    messages: list[Message]  # the whole chat before the reply
    reply: Message
    tools: list[dict[str, Any]]
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: str
    reward: float

    @property
    def is_chat(self) -> bool:
        """False for a completion of a text or of tokens."""
        return all(message["role"] != "prompt" for message in self.messages)

    @property
    def is_cut(self) -> bool:
        """It was ended by a limit, in the midst of what the model would have said."""
        return self.stop_reason == "length"


@dataclass(slots=True)
class Episode:
    task_id: int
    sample: int
    reward: float  # of its last completion
    time: float  # of its end, in Unix seconds
    turns: list[Turn]  # in the order of their requests, so a parent comes first

    def leaves(self) -> list[Turn]:
        """The ends of its dialogues."""
        parents = {turn.parent for turn in self.turns}
        return [turn for turn in self.turns if turn.id not in parents]


class EpisodeLog:
    """Appends to the file of this process. Thread-safe."""

    def __init__(self, logs: Path) -> None:
        self._path = logs / FOLDER / f"{platform.node() or 'host'}-{os.getpid()}.jsonl"
        self._lock = threading.Lock()

    def write(
        self,
        interactions: Mapping[str, InteractionWithTokenLogpReward],
        *,
        task_id: int,
        sample: int,
        reward: float,
    ) -> None:
        names = {id(item): name for name, item in interactions.items()}
        turns = [_turn(name, item, names) for name, item in interactions.items()]
        record = {"task_id": task_id, "sample": sample, "reward": reward, "time": time.time()}
        line = dumps({**record, "turns": turns})
        with self._lock:
            private_folder(self._path.parent)
            with open_private(self._path, "a", encoding="utf-8") as file:
                file.write(line + "\n")


def _turn(
    name: str, item: InteractionWithTokenLogpReward, names: Mapping[int, str]
) -> dict[str, Any]:
    """The turn as stored; `known_*` count what it has from its parent."""
    reply, parent = item.model_response, item.parent
    known_messages = known_tokens = 0
    if parent is not None and id(parent) in names:
        before = [*parent.model_response.input_tokens, *parent.model_response.output_tokens]
        if reply.input_tokens[: len(before)] == before:
            known_tokens = len(before)
        if item.messages and item.messages[0]["role"] != "prompt":
            # All of them, but where this call goes on with the text of the parent's reply.
            known_messages = min(len(parent.whole_chat()), len(item.messages))
    return {
        "id": name,
        "parent": None if parent is None else names.get(id(parent)),
        "known_messages": known_messages,
        "known_tokens": known_tokens,
        "messages": item.messages[known_messages:],
        "reply": item.output_message_list[0],
        "tools": None if known_messages else item.tools,
        "prompt_ids": reply.input_tokens[known_tokens:],
        "output_ids": reply.output_tokens,
        "logprobs": reply.output_logprobs,
        "versions": reply.output_versions,
        "stop_reason": reply.stop_reason,
        "reward": item.reward,
    }


def read_episodes(logs: Path) -> list[Episode]:
    """By prompt and sample, the newest of each."""
    newest: dict[tuple[int, int], dict[str, Any]] = {}
    for file in sorted((logs / FOLDER).glob("*.jsonl")):
        for record in _records(file):
            key = record["task_id"], record["sample"]
            if key not in newest or newest[key]["time"] <= record["time"]:
                newest[key] = record
    return [episode_of(newest[key]) for key in sorted(newest)]


def _records(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                if line.endswith("\n"):
                    raise ValueError(f"{file}, line {number}: not JSON ({error})") from error


def episode_of(record: dict[str, Any]) -> Episode:
    """An episode from its line in the log; empties `record`."""
    turns: dict[str, Turn] = {}
    for stored in record.pop("turns"):
        num_messages, num_tokens = stored.pop("known_messages"), stored.pop("known_tokens")
        turn = Turn(**{**stored, "tools": stored["tools"] or []})
        if turn.parent is not None:
            parent = turns[turn.parent]
            chat = [*parent.messages, parent.reply]
            turn.messages = [*chat[:num_messages], *turn.messages]
            turn.prompt_ids = [*parent.prompt_ids, *parent.output_ids][
                :num_tokens
            ] + turn.prompt_ids
            turn.tools = turn.tools or parent.tools
        turns[turn.id] = turn
    return Episode(**record, turns=list(turns.values()))
