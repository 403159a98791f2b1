"""An agent's model calls as trainable token sequences.

In: every completion of one session. Out: the session's samples, each a row of tensors (keys in
`api/io_struct.py`), in the order of the requests; the order of completion would depend on the
lengths of the replies.

A chat grows: the next request repeats the messages so far including the reply, and may end with it.
So the parent of an interaction is the one whose messages and reply are the longest prefix of its
own messages, and a session is a forest. Exported `individual`, every interaction is one sample;
exported `concat`, every path from a root to a leaf is one sample of the tokens actually sampled.

The choices of one request (`n` above 1) are interactions of one turn: they have one parent and one
`created`. What is said of a turn (the newest, or by its number) is said of all its choices.

Invariant: a sampled token is trained on in at most one sample. `individual` samples learn their own
reply; of `concat` samples that share turns, the newest learns them. Elsewhere they are context.

    cache = InteractionCache()
    parent = cache.find_parent(messages)
    cache.add("chatcmpl-1", InteractionWithTokenLogpReward(model_response, parent=parent, ...))
    cache.set_last_reward(1.0)
    cache.apply_reward_discount(0.9)
    rows = [item.to_tensor_dict() for item in cache.export_interactions("individual").values()]
"""

from __future__ import annotations

import itertools
import json
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from areal.api.image_references import MULTI_MODAL_KEY, ShownImage, references
from areal.api.io_struct import ModelResponse
from areal.api.json_text import Json, loads_written
from areal.api.routed_experts import ROUTED_KEY, experts_of_tokens

Message = dict[str, Any]
ExportStyle = Literal["individual", "concat"]
# `matcher(prefix, messages)`: whether the first messages are a prefix of the second.
PrefixMatcher = Callable[[Sequence[Message], Sequence[Message]], bool]


_created = itertools.count()


def next_created() -> int:
    """Sequence number of a request within this process; taken when the request arrives."""
    return next(_created)


@dataclass(slots=True, eq=False)
class InteractionWithTokenLogpReward:
    """One completion: the request as messages, the reply as tokens, and its reward.

    With `chat_template_type` `concat` the reply's input begins with the parent's input and output,
    token by token, and the tensors hold the whole path; with `hf` they hold this turn alone.
    """

    model_response: ModelResponse
    messages: list[Message] = field(default_factory=list)
    output_message_list: list[Message] = field(default_factory=list)  # the reply, as messages
    reward: float | None = None
    original_reward: float | None = None  # before a group's rewards are normalised
    parent: InteractionWithTokenLogpReward | None = None
    chat_template_type: Literal["hf", "concat"] = "hf"
    tools: list[dict[str, Any]] | None = None  # part of the prompt, like the messages
    completion: dict[str, Any] | None = None  # the response as sent, in its route's format
    response: dict[str, Any] | None = None
    input_data: Any = None  # the request's own input, where that is not messages
    images: list[ShownImage] = field(default_factory=list)  # of the whole prompt, in its order
    # Order of arrival, see next_created; equal for the choices of one request.
    created: int = field(default_factory=next_created)
    learned: int | None = None  # the last turns of the path to learn; None: all. Set by the export

    def to_tensor_dict(self) -> dict[str, Any]:
        """A batch of one row: tensors, and the images by reference if there are any. `seq_no_eos`
        is that of the last reply."""
        import torch

        if self.reward is None:
            raise ValueError("an interaction without a reward is not a sample: set one first")
        ids, logprobs, versions, turn_ids = self._tokens()
        original = self.reward if self.original_reward is None else self.original_reward
        turns = torch.tensor([turn_ids], dtype=torch.int32)
        routed = experts_of_tokens([one.model_response for one in self.path()], len(ids))
        return {
            **({} if routed is None else {ROUTED_KEY: torch.tensor(routed[None])}),
            **({MULTI_MODAL_KEY: [references(self.images)]} if self.images else {}),
            "input_ids": torch.tensor([ids], dtype=torch.int32),
            "attention_mask": torch.ones(turns.shape, dtype=torch.bool),
            "loss_mask": (turns >= 0).int(),
            "logprobs": torch.tensor([logprobs], dtype=torch.float32),
            "versions": torch.tensor([versions], dtype=torch.int32),
            "turn_ids": turns,
            "rewards": torch.tensor([self.reward], dtype=torch.float32),
            "original_rewards": torch.tensor([original], dtype=torch.float32),
            "seq_no_eos": torch.tensor([self.model_response.stop_reason == "length"]),
        }

    def _tokens(self) -> tuple[list[int], list[float], list[int], list[int]]:
        """ids, logprobs, versions, turn_ids of the path that ends here."""
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        turn_ids: list[int] = []
        path = self.path()
        first = 0 if self.learned is None else len(path) - self.learned
        for turn, interaction in enumerate(path):
            reply = interaction.model_response
            if reply.input_tokens[: len(ids)] != ids:
                raise ValueError(
                    f"turn {turn} does not continue the tokens of the previous turn, so they are "
                    "not one sequence; export with style 'individual'"
                )
            read = reply.input_tokens[len(ids) :]  # text the model did not write
            if turn < first:
                read = [*read, *reply.output_tokens]  # learned in another sample
            ids += read
            logprobs += [0.0] * len(read)
            versions += [-1] * len(read)
            turn_ids += [-1] * len(read)
            if turn >= first:
                ids += reply.output_tokens
                logprobs += reply.output_logprobs
                versions += reply.output_versions
                turn_ids += [turn - first] * reply.output_len
        return ids, logprobs, versions, turn_ids

    def path(self) -> list[InteractionWithTokenLogpReward]:
        """The turns whose tokens this one continues, oldest first; ends with itself."""
        path: list[InteractionWithTokenLogpReward] = [self]
        while path[-1].chat_template_type == "concat" and path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]

    def whole_chat(self) -> list[Message]:
        return [*self.messages, *self.output_message_list]


class InteractionCache(Mapping[str, InteractionWithTokenLogpReward]):
    """The interactions of one session by id, in the order of their requests."""

    def __init__(self, matcher: PrefixMatcher | None = None) -> None:
        self._matches = matcher or is_message_prefix
        self._items: dict[str, InteractionWithTokenLogpReward] = {}
        self._is_discounted = False

    def __getitem__(self, interaction_id: str) -> InteractionWithTokenLogpReward:
        return self._items[interaction_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, interaction_id: str, interaction: InteractionWithTokenLogpReward) -> None:
        if interaction_id in self._items:
            raise ValueError(f"the interaction {interaction_id!r} is recorded already")
        overtook = self._items and interaction.created < self._items[self._last_id()].created
        self._items[interaction_id] = interaction
        if overtook:
            ordered = sorted(self._items.items(), key=lambda entry: entry[1].created)
            self._items = dict(ordered)

    def find_parent(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
    ) -> InteractionWithTokenLogpReward | None:
        """The longest chat that `messages` continue, the newest of equals; None for a new chat.

        Tools are part of the prompt, so a chat with different tools is not continued.
        """
        candidates = [
            item
            for item in self._items.values()
            if len(item.whole_chat()) <= len(messages) and (item.tools or None) == (tools or None)
        ]
        # Longest first, so that the common case, the previous turn, costs one comparison.
        for item in sorted(reversed(candidates), key=lambda item: -len(item.whole_chat())):
            if self._matches(item.whole_chat(), messages):
                return item
        return None

    def find_parent_of_tokens(self, prompt: list[int]) -> InteractionWithTokenLogpReward | None:
        """The longest completion whose prompt and output `prompt` begins with, the newest of
        equals."""
        found, longest = None, 0
        for item in self._items.values():
            tokens = [*item.model_response.input_tokens, *item.model_response.output_tokens]
            if longest <= len(tokens) <= len(prompt) and prompt[: len(tokens)] == tokens:
                found, longest = item, len(tokens)
        return found

    def set_reward(self, interaction_id: str | int, reward: float) -> None:
        """`interaction_id`: a completion's id, or a turn's number, in the order of requests; the
        reward of a turn is that of all its choices."""
        number, found = str(interaction_id), self._items.get(str(interaction_id))
        if found is not None:
            items = [found]
        elif number.isdecimal() and len(number) < 10:
            items = dict(enumerate(self._turns())).get(int(number), [])
        else:
            items = []
        if not items:
            known = ", ".join(self._items) or "none"
            raise ValueError(
                f"no completion {interaction_id!r:.60} in this session; it has {known}"
            )
        for item in items:
            item.reward = checked_reward(reward)

    def set_last_reward(self, reward: float) -> None:
        """The reward of the newest turn: of its completion, or of all its choices."""
        if not self._items:
            raise ValueError("no completion to reward: this session sent no request to the model")
        for item in self._turns()[-1]:
            item.reward = checked_reward(reward)

    def apply_reward_discount(self, discount: float) -> None:
        """Once, from last to first turn: r_i += discount * r_{i+1}. A missing reward counts as 0;
        of a turn with several choices the mean is passed on."""
        if self._is_discounted:
            raise RuntimeError("the rewards of this session are discounted already")
        if all(item.reward is None for item in self._items.values()):
            raise ValueError("no completion of this session has a reward, so the episode has none")
        self._is_discounted = True
        later = 0.0
        for turn in reversed(self._turns()):
            for item in turn:
                item.reward = (item.reward or 0.0) + discount * later
            later = sum(item.reward or 0.0 for item in turn) / len(turn)

    def drop_retry_orphans(self) -> list[str]:
        """Drop replies that never arrived: requested again with the same chat, and not continued.

        Of equal requests the latest is kept, whichever reply was complete first. A reply with its
        own reward is kept. Returns the dropped ids.
        """
        parents = {id(item.parent) for item in self._items.values()}
        ids = list(self._items)
        orphans = [
            name
            for place, name in enumerate(ids)
            if self._items[name].reward is None
            and id(self._items[name]) not in parents
            and any(self._is_again(self._items[name], self._items[n]) for n in ids[place + 1 :])
        ]
        for name in orphans:
            del self._items[name]
        return orphans

    def export_interactions(self, style: ExportStyle) -> dict[str, InteractionWithTokenLogpReward]:
        """The session's samples: all interactions, or with `concat` the leaves."""
        if style == "individual":
            for item in self._items.values():
                item.learned = 1
            return dict(self._items)
        if style != "concat":
            raise ValueError(f"style must be 'individual' or 'concat', got {style!r}")
        if any(item.chat_template_type != "concat" for item in self._items.values()):
            raise ValueError(
                "style 'concat' joins the tokens of turns, which chat_template_type 'hf' renders "
                "anew for each: set chat_template_type to 'concat'"
            )
        leaves = self.leaves()
        learned: set[int] = set()
        for leaf in reversed(leaves.values()):
            path = leaf.path()
            fresh = [item for item in path if id(item) not in learned]  # the path's end: a tree
            leaf.learned = len(fresh)
            learned.update(map(id, fresh))
        return leaves

    def leaves(self) -> dict[str, InteractionWithTokenLogpReward]:
        """Interactions that no other one continues."""
        parents = {id(item.parent) for item in self._items.values()}
        return {name: item for name, item in self._items.items() if id(item) not in parents}

    def _last_id(self) -> str:
        return next(reversed(self._items))

    def _turns(self) -> list[list[InteractionWithTokenLogpReward]]:
        """The choices of each request, in the order of requests."""
        by_turn = itertools.groupby(self._items.values(), key=lambda item: item.created)
        return [list(items) for _, items in by_turn]

    def _is_again(
        self, one: InteractionWithTokenLogpReward, other: InteractionWithTokenLogpReward
    ) -> bool:
        """Whether the request of `one` was sent again, as that of `other`."""
        return (
            one.created != other.created
            and len(one.messages) == len(other.messages)
            and (one.tools or None) == (other.tools or None)
            and self._matches(one.messages, other.messages)
        )


def checked_reward(reward: Any) -> float:
    """`reward` as a float; raises for a missing or invalid value."""
    try:
        value = float(reward) if isinstance(reward, numbers.Real) else math.nan
    except OverflowError:
        raise ValueError(
            "a reward must be a finite number, got an integer too large for one"
        ) from None
    if not math.isfinite(value):
        raise ValueError(f"a reward must be a finite number, got {reward!r:.200}")
    return value


def is_message_prefix(prefix: Sequence[Message], messages: Sequence[Message]) -> bool:
    """The default matcher: equal in role, text and tool calls.

    Clients send a reply back in other forms: fields left out or null, text in parts or stripped,
    different ids. These do not change the content.
    """
    return len(prefix) <= len(messages) and all(
        _said(one) == _said(other) for one, other in zip(prefix, messages, strict=False)
    )


def _said(message: Message) -> tuple[Any, ...]:
    calls: list[dict[str, Any]]
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return (
        message.get("role"),
        message.get("name"),
        _text(message.get("content")).strip(),
        [(call.get("name"), _arguments(call.get("arguments"))) for call in calls],
    )


def _text(content: Json) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return json.dumps(content, sort_keys=True, default=repr)
    return "".join(
        str(part.get("text"))
        if isinstance(part, dict) and part.get("type") == "text"
        else json.dumps(part, sort_keys=True, default=repr)
        for part in content
    )


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return loads_written(arguments)
    except ValueError:
        return arguments
