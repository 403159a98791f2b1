"""Episodes for other programs: OpenEnv's training traces, chats for SFT, preference pairs.

    trace   an episode per line: OpenEnv's TrainingTrace, version 1
    sft     a dialogue per line: messages, tools, reward, task_id, sample
    pairs   two replies to one chat per line: prompt, chosen, rejected, tools, task_id, rewards

A trace has the tokens as they were sampled, each completion once. In `sft` every reply that the
model sampled is to be learned in one line only: the others, and what a client wrote in its name,
have `weight: 0`, as OpenAI spells it; so have replies that were cut off, for an end that they do
not have would be learned. A pair are the best and the worst episode of a prompt, where their first
dialogues part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from areal.agents.episode_log import Episode, Turn
from areal.api.interaction import Message, is_message_prefix

Line = dict[str, Any]


def traces(episodes: Sequence[Episode]) -> Iterator[Line]:
    for episode in episodes:
        yield {"schema_version": 1, "turns": [_traced(episode, turn) for turn in episode.turns]}


def _traced(episode: Episode, turn: Turn) -> Line:
    choice = {"index": 0, "message": turn.reply, "finish_reason": turn.stop_reason}
    return {
        "node_id": turn.id,
        "prompt_token_ids": turn.prompt_ids,
        "completion_token_ids": turn.output_ids,
        # A log-probability is rounded, and that of a certain token may come out above 0.
        "per_token_logps": [min(logprob, 0.0) for logprob in turn.logprobs],
        "loss_mask": [0] * len(turn.prompt_ids) + [1] * len(turn.output_ids),
        "request": {"messages": turn.messages, "tools": turn.tools},
        "response": {"choices": [choice]},
        "metadata": {
            "parent": turn.parent,
            "task_id": episode.task_id,
            "sample": episode.sample,
            "reward": turn.reward,
            "episode_reward": episode.reward,
            "versions": turn.versions,
        },
    }


def chats(episodes: Sequence[Episode]) -> Iterator[Line]:
    for episode in episodes:
        turns = {turn.id: turn for turn in episode.turns}
        learned: set[str] = set()
        for leaf in reversed(episode.leaves()):  # as in training, the newest learns what is shared
            if not leaf.is_chat:
                continue
            path = _path(leaf, turns)
            whole = [turn for turn in path if turn.id not in learned and not turn.is_cut]
            learned.update(turn.id for turn in path)
            if not whole:
                continue
            fresh = {len(turn.messages) for turn in whole}
            messages = [*leaf.messages, leaf.reply]
            yield {
                "messages": [_weighed(m, place in fresh) for place, m in enumerate(messages)],
                **_about(leaf, task_id=episode.task_id, sample=episode.sample),
                "reward": episode.reward,
            }


def _path(turn: Turn, turns: dict[str, Turn]) -> list[Turn]:
    path = [turn]
    while (parent := path[-1].parent) is not None:
        path.append(turns[parent])
    return path


def _weighed(message: Message, is_learned: bool) -> Message:
    shown = _plain(message)
    return {**shown, "weight": int(is_learned)} if shown["role"] == "assistant" else shown


def pairs(episodes: Sequence[Episode]) -> Iterator[Line]:
    for task_id, group in groupby(episodes, key=lambda episode: episode.task_id):
        ordered = sorted(group, key=lambda episode: episode.reward)
        worst, best = ordered[0], ordered[-1]
        parted = _parted(best, worst) if best.reward > worst.reward else None
        if parted is not None:
            chosen, rejected = parted
            yield {
                "prompt": [_plain(message) for message in chosen.messages],
                "chosen": [_plain(chosen.reply)],
                "rejected": [_plain(rejected.reply)],
                **_about(chosen, task_id=task_id),
                "chosen_reward": best.reward,
                "rejected_reward": worst.reward,
            }


def _parted(best: Episode, worst: Episode) -> tuple[Turn, Turn] | None:
    """The first turns in which the main dialogues of two episodes answer the same differently."""
    for one, other in zip(_main(best), _main(worst), strict=False):
        if len(one.messages) != len(other.messages) or one.tools != other.tools:
            return None
        if not is_message_prefix(one.messages, other.messages):
            return None
        if not is_message_prefix([one.reply], [other.reply]):
            return None if one.is_cut else (one, other)
    return None


def _main(episode: Episode) -> list[Turn]:
    """The turns of the dialogue that an episode begins with."""
    turns = {turn.id: turn for turn in episode.turns}
    paths = [_path(leaf, turns)[::-1] for leaf in episode.leaves()]
    first = episode.turns[0]
    own = [path for path in paths if path[0] is first and first.is_chat]
    return own[-1] if own else []


def _about(turn: Turn, **place: int) -> Line:
    return {**({"tools": turn.tools} if turn.tools else {}), **place}


def _plain(message: Message) -> Message:
    """Without the fields that are null."""
    shown = {name: value for name, value in message.items() if value is not None}
    return {**shown, "content": shown.get("content", "")}


FORMATS: dict[str, Callable[[Sequence[Episode]], Iterator[Line]]] = {
    "trace": traces,
    "sft": chats,
    "pairs": pairs,
}
