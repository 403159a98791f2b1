"""An agent that does to its history, at random, what agents do; and the model it talks to.

A dialogue is kept as the messages of a chat and sent through any of the three APIs, whole or
streamed, so one may begin in one API and go on in another. Between two requests its history is
continued, edited, compacted, cut, or left for a subagent's; requests are repeated, raced and
abandoned. Everything follows from the seed in the data row, but for the time a client waits before
it leaves.

The model is tiny and random, with tokens for whole calls, marks of reasoning and pieces of words:
it calls tools and thinks often, and its text tokenises to other tokens than it sampled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from agent_world import AgentWorld, build_chat_tokenizer, world_of
from folded_streams import FOLDS, events_of
from tiny import tiny_config, tiny_model

from areal.models.hf_io import save_hf

CALLS = [
    f'<tool_call>{{"name": "{name}", "arguments": {{"a": {a}}}}}</tool_call>'
    for name in ("add", "look")
    for a in (1, 22)
]
WORDS = [*CALLS, "<think>", "</think>", "</think>\n\n", "ab", "abc", "bc", "  ", "\n\n", "\t "]
LIKELY = 2.5  # log of how much likelier than a letter the words and the end of a turn are

APIS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "look")
]
TEXTS = ["ab", "abc?", " go on ", "a b\n\nc", "<think>", "2+2=", "", "again"]

Message = dict[str, Any]


@dataclass
class Dialogue:
    turns: list[Message]
    tools: list[Message] = field(default_factory=list)
    system: str = ""
    response_id: str = ""  # of the last reply, if it came from the responses API
    num_known: int = 0  # turns up to and including that reply

    def touched(self) -> None:
        """The history is no longer the one that the server has recorded."""
        self.response_id = ""


class RandomClient:
    """`run` is one episode; with `only_goes_on` the client leaves its histories as they are.

    `left`: seeds of episodes in which it did not wait for a reply, which may have been there."""

    def __init__(self, *, only_goes_on: bool = False) -> None:
        self._changes = [_Episode._goes_on] if only_goes_on else _CHANGES
        self.left: set[int] = set()

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        one = _Episode(random.Random(data["seed"]), extra, self._changes)
        await one.ask(Dialogue([_user("2+2=")]))  # an episode without a completion has no reward
        await one.talk(depth=0)
        if one.has_left:
            self.left.add(data["seed"])
        return 1.0


class _Episode:
    def __init__(self, rng: random.Random, extra: dict[str, Any], changes: list[Any]) -> None:
        self.rng = rng
        self.changes = changes
        self.http = extra["http_client"]
        self.url = extra["base_url"].removesuffix("/v1")
        self.key = extra["api_key"]
        self.open: Counter[str] = Counter()  # requests without an answer yet, by what they ask
        self.overlapped: set[str] = set()  # what two requests asked at the same time
        self.has_left = False

    async def talk(self, depth: int) -> str:
        """One dialogue; returns the last thing said in it."""
        rng, said = self.rng, ""
        dialogue = Dialogue(
            [_user(rng.choice(TEXTS))],
            tools=rng.choice([[], TOOLS[:1], TOOLS]),
            system=rng.choice(["", "Be brief.", f"You are {depth}."]),
        )
        for _ in range(rng.randrange(1, 5)):
            reply = await self.ask(dialogue)
            if reply is None:
                return said
            said = reply["content"] or "nothing"
            self._answer(dialogue, reply)
            await rng.choice(self.changes)(self, dialogue, depth)
        return said

    # Between two requests.

    def _answer(self, dialogue: Dialogue, reply: Message) -> None:
        """The reply as clients keep it, and what comes after it."""
        rng = self.rng
        reply = dict(reply)
        if rng.random() < 0.5:
            reply.pop("reasoning_content", None)
        if rng.random() < 0.2:
            reply["content"] = (reply["content"] or "").strip()
        dialogue.turns.append(reply)
        dialogue.num_known = len(dialogue.turns)
        for call in reply.get("tool_calls", ()):
            result = {"role": "tool", "tool_call_id": call["id"], "content": rng.choice(TEXTS)}
            dialogue.turns.append(result)
        if not reply.get("tool_calls") or rng.random() < 0.3:
            dialogue.turns.append(_user(rng.choice(TEXTS)))

    async def _goes_on(self, dialogue: Dialogue, depth: int) -> None:
        pass

    async def _edits(self, dialogue: Dialogue, depth: int) -> None:
        place = self.rng.randrange(len(dialogue.turns))
        dialogue.turns[place] = {**dialogue.turns[place], "content": self.rng.choice(TEXTS)}
        dialogue.touched()

    async def _compacts(self, dialogue: Dialogue, depth: int) -> None:
        summary = _user("so far: " + self.rng.choice(TEXTS))
        dialogue.turns = [summary, *_from_a_user(dialogue.turns[-2:])]
        dialogue.touched()

    async def _forgets(self, dialogue: Dialogue, depth: int) -> None:
        first = self.rng.randrange(len(dialogue.turns))
        dialogue.turns = _from_a_user(dialogue.turns[first:]) or [_user("again")]
        dialogue.touched()

    async def _strips_thinking(self, dialogue: Dialogue, depth: int) -> None:
        for place, turn in enumerate(dialogue.turns):
            thoughtless = {k: v for k, v in turn.items() if k != "reasoning_content"}
            dialogue.turns[place] = thoughtless
        dialogue.touched()

    async def _changes_tools(self, dialogue: Dialogue, depth: int) -> None:
        dialogue.tools = self.rng.choice([TOOLS[:1], TOOLS])

    async def _sends_for_help(self, dialogue: Dialogue, depth: int) -> None:
        """Subagents, one or two at a time, with dialogues of their own."""
        if depth < 1:
            for said in await asyncio.gather(
                *(self.talk(depth + 1) for _ in range(self.rng.randrange(1, 3)))
            ):
                dialogue.turns.append(_user(said))

    async def _asks_twice(self, dialogue: Dialogue, depth: int) -> None:
        """Two requests at once: equal ones, or of histories that fork here."""
        other = dataclasses.replace(dialogue, turns=[*dialogue.turns])
        if self.rng.random() < 0.7:
            other.turns.append(_user("or else"))
        replies = await asyncio.gather(self.ask(dialogue), self.ask(other))
        chosen = self.rng.randrange(2)
        if replies[chosen] is not None:
            dialogue.turns = (dialogue, other)[chosen].turns
            dialogue.touched()
            self._answer(dialogue, replies[chosen])

    async def _samples_again(self, dialogue: Dialogue, depth: int) -> None:
        """The same request once more, as best-of-n does; the second is gone on with."""
        api = self.rng.choice(list(APIS))
        first = await self.ask(dialogue, api)
        second = await self.ask(dialogue, api)
        if first is not None and second is not None:
            self._answer(dialogue, second)

    async def _prefills(self, dialogue: Dialogue, depth: int) -> None:
        begun = self.rng.choice(["ab", "a", "The answer"])
        dialogue.touched()
        dialogue.turns.append({"role": "assistant", "content": begun})
        reply = await self.ask(dialogue)
        dialogue.turns.pop()
        if reply is not None:
            whole = begun + (reply["content"] or "")
            self._answer(dialogue, {**reply, "content": whole})

    async def _leaves(self, dialogue: Dialogue, depth: int) -> None:
        """Before the reply is there. SDKs then try again, agents go on."""
        api, path, body = self._request(dialogue, None)
        patience = self.rng.choice([0.002, 0.005, 0.01, 0.02])
        try:
            async with asyncio.timeout(patience):
                await self._post(path, body, _attempt(0))
        except TimeoutError:
            self.has_left = True
        if self.rng.random() < 0.5:
            answer = await self._post(path, body, _attempt(1))
            if (reply := self._read(api, path, body, answer)) is not None:
                dialogue.touched()
                self._answer(dialogue, reply)

    async def _asks_too_much(self, dialogue: Dialogue, depth: int) -> None:
        """More than the context holds: refused, and not part of the episode."""
        long = dataclasses.replace(dialogue, turns=[*dialogue.turns, _user("ab c" * 700)])
        assert await self.ask(long) is None

    # One request.

    async def ask(self, dialogue: Dialogue, api: str | None = None) -> Message | None:
        """The reply as a chat's message, or None if the server refuses."""
        rng = self.rng
        api, path, body = self._request(dialogue, api)
        key = {"idempotency-key": f"{rng.random()}"}
        first, retry = rng.choice([(_attempt(0), _attempt(1)), (key, key), ({}, None)])
        with self._open(path, body) as is_alone:
            answer = await self._post(path, body, first)
            while retry and rng.random() < 0.2:  # the SDK believes that it got no answer
                again = await self._post(path, body, retry)
                is_same = again.content == answer.content
                assert is_same or not is_alone(), "a retry was sampled again"
        reply = self._read(api, path, body, answer)
        if reply is not None and api == "responses":
            dialogue.response_id = reply.pop("id")
            dialogue.num_known = len(dialogue.turns) + 1
        elif reply is not None:
            dialogue.touched()
        return reply

    @contextmanager
    def _open(self, path: str, body: Message) -> Iterator[Callable[[], bool]]:
        """Whether no equal request was open at the same time: a retry may be one of either."""
        name = path + json.dumps(body, sort_keys=True)
        self.open[name] += 1
        if self.open[name] > 1:
            self.overlapped.add(name)
        try:
            yield lambda: name not in self.overlapped
        finally:
            self.open[name] -= 1

    def _request(self, dialogue: Dialogue, api: str | None) -> tuple[str, str, Message]:
        rng = self.rng
        api = api or rng.choice(list(APIS))
        body = _BODIES[api](dialogue, rng)
        body |= {"model": "policy", "stream": rng.random() < 0.5}
        body[_LIMITS[api]] = rng.choice([1, 3, 6, 9])
        if rng.random() < 0.15 and api != "responses":
            body["stop" if api == "chat" else "stop_sequences"] = ["b"]
        return api, APIS[api], body

    async def _post(self, path: str, body: Message, headers: dict[str, str]) -> Any:
        headers = {"authorization": f"Bearer {self.key}", **headers}
        return await self.http.post(self.url + path, headers=headers, json=body)

    def _read(self, api: str, path: str, body: Message, answer: Any) -> Message | None:
        if answer.status_code != 200:
            assert answer.status_code == 400, f"{path} answered {answer.status_code}: {answer.text}"
            return None
        whole = FOLDS[path](events_of(answer.content)) if body["stream"] else answer.json()
        return _READERS[api](whole)


_CHANGES = [
    *[_Episode._goes_on] * 4,
    _Episode._edits,
    _Episode._compacts,
    _Episode._forgets,
    _Episode._strips_thinking,
    _Episode._changes_tools,
    _Episode._sends_for_help,
    _Episode._asks_twice,
    _Episode._samples_again,
    _Episode._prefills,
    _Episode._leaves,
    _Episode._asks_too_much,
]


def _attempt(number: int) -> dict[str, str]:
    return {"x-stainless-retry-count": str(number)}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _from_a_user(turns: list[Message]) -> list[Message]:
    """Without a beginning that answers nothing."""
    first = (i for i, turn in enumerate(turns) if turn["role"] == "user")
    return turns[next(first, len(turns)) :]


# A dialogue in the words of each API, and replies back in those of a chat.


def _chat_body(dialogue: Dialogue, rng: random.Random) -> Message:
    system = [{"role": "system", "content": dialogue.system}] if dialogue.system else []
    body: Message = {"messages": [*system, *dialogue.turns]}
    if rng.random() < 0.3:
        parts = [_in_parts(turn) if turn["role"] == "user" else turn for turn in body["messages"]]
        body["messages"] = parts
    return {**body, "tools": dialogue.tools} if dialogue.tools else body


def _in_parts(turn: Message) -> Message:
    return {**turn, "content": [{"type": "text", "text": turn["content"]}]}


def _responses_body(dialogue: Dialogue, rng: random.Random) -> Message:
    turns, body = dialogue.turns, {}
    if dialogue.response_id and rng.random() < 0.6:
        turns = turns[dialogue.num_known :]
        body["previous_response_id"] = dialogue.response_id
    body["input"] = [item for turn in turns for item in _items(turn)]
    if dialogue.system:
        body["instructions"] = dialogue.system
    if dialogue.tools:
        body["tools"] = [{"type": "function", **tool["function"]} for tool in dialogue.tools]
    return body


def _items(turn: Message) -> Iterator[Message]:
    if turn["role"] == "tool":
        result = {"type": "function_call_output", "call_id": turn["tool_call_id"]}
        yield {**result, "output": turn["content"]}
        return
    if thought := turn.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        yield {"type": "reasoning", "summary": [], "content": content}
    if turn["content"] or not turn.get("tool_calls"):
        yield {"type": "message", "role": turn["role"], "content": turn["content"] or ""}
    for call in turn.get("tool_calls", ()):
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def _messages_body(dialogue: Dialogue, rng: random.Random) -> Message:
    messages: list[Message] = []
    for turn in dialogue.turns:
        role = "assistant" if turn["role"] == "assistant" else "user"
        blocks = list(_blocks(turn))
        if messages and messages[-1]["role"] == role == "user":
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": role, "content": blocks})
    body: Message = {"messages": messages}
    if dialogue.system:
        body["system"] = dialogue.system
    if dialogue.tools:
        body["tools"] = [
            {"name": tool["function"]["name"], "input_schema": {"type": "object"}}
            for tool in dialogue.tools
        ]
    return body


def _blocks(turn: Message) -> Iterator[Message]:
    if turn["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": turn["tool_call_id"]}
        yield {**result, "content": turn["content"]}
        return
    if thought := turn.get("reasoning_content"):
        yield {"type": "thinking", "thinking": thought, "signature": ""}
    if turn["content"] or not turn.get("tool_calls"):
        yield {"type": "text", "text": turn["content"] or ""}
    for call in turn.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        name = call["function"]["name"]
        yield {"type": "tool_use", "id": call["id"], "name": name, "input": arguments}


def _of_chat(reply: Message) -> Message:
    message = reply["choices"][0]["message"]
    return {key: value for key, value in message.items() if key != "refusal"}


def _of_response(reply: Message) -> Message:
    message: Message = {"id": reply["id"], "role": "assistant", "content": ""}
    for item in reply["output"]:
        if item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            _call(message, item["call_id"], function)
        else:
            name = "content" if item["type"] == "message" else "reasoning_content"
            message[name] = message.get(name, "") + item["content"][0]["text"]
    return message


def _of_message(reply: Message) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    for block in reply["content"]:
        if block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            _call(message, block["id"], function)
        else:
            name = "content" if block["type"] == "text" else "reasoning_content"
            message[name] = message.get(name, "") + block[block["type"]]
    return message


def _call(message: Message, name: str, function: Message) -> None:
    call = {"id": name, "type": "function", "function": function}
    message.setdefault("tool_calls", []).append(call)


_BODIES = {"chat": _chat_body, "responses": _responses_body, "messages": _messages_body}
_READERS = {"chat": _of_chat, "responses": _of_response, "messages": _of_message}
_LIMITS = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}


@contextmanager
def open_talkative_world(folder: Path) -> Iterator[AgentWorld]:
    """An AgentWorld whose model calls tools, thinks and ends its turns."""
    tokenizer = build_chat_tokenizer(folder, words=WORDS)
    _write_talkative_model(folder, tokenizer)
    with world_of(folder, tokenizer) as world:
        yield world


def _write_talkative_model(folder: Path, tokenizer: Any) -> None:
    options = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }
    model = tiny_model(**options)
    likely = tokenizer.convert_tokens_to_ids([*WORDS, tokenizer.eos_token])
    tensors = dict(model.named_hf_tensors())
    with torch.no_grad():
        # Every state is then close to a vector of ones, whose product with a row is its sum.
        tensors["model.embed_tokens.weight"] += 1.0
        tensors["lm_head.weight"][likely] += LIKELY / tensors["lm_head.weight"].shape[1]
    save_hf(iter(tensors.items()), tiny_config(**options), folder)
