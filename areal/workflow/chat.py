"""One chat turn, shared by the shipped workflows: prompt tokens, the engine's reply, its reward.

`Sampler` asks the engine; this adds the prompt of a row and the reward process.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.api.io_struct import Sample
from areal.reward import check_reward_fn, get_reward_fn
from areal.sandbox.pool import AsyncRewardWrapper
from areal.utils import import_path
from areal.utils.perf_tracer import episode_scope
from areal.utils.tokenizer import chat_prompt_ids, chat_prompts_ids
from areal.utils.waits import waiting
from areal.workflow.sampler import Sampler

if TYPE_CHECKING:
    from areal.api.config.inference import GenerationHyperparameters

NUM_CACHED_PROMPTS = 1024  # more than the groups in flight at any time
REWARD_ARGUMENTS = ("prompt", "completions", "prompt_ids", "completion_ids")


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    text: str


def messages_of(data: dict[str, Any]) -> Any:
    if "messages" not in data:
        raise ValueError(f"a row needs the key 'messages' (a chat), found {', '.join(data)}")
    if has_images(data):
        raise ValueError("the row has images, and this workflow reads text only")
    return data["messages"]


def has_images(row: Mapping[str, Any]) -> bool:
    """Whether a row has images: in `images`, in its chat, or as a picture in `image`."""
    if row.get("images") or ("image" in row and _is_picture(row["image"])):
        return True
    for message in row.get("messages") or ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and any(map(_is_image_part, content)):
            return True
    return False


def _is_image_part(part: Any) -> bool:
    return isinstance(part, Mapping) and "image" in str(part.get("type"))


def _is_picture(value: Any) -> bool:
    """Not a name or a number, which a column may hold too."""
    if isinstance(value, Mapping):  # of a data set of Hugging Face that is not decoded
        value = value.get("bytes")
    return isinstance(value, bytes) or callable(getattr(value, "getbands", None))  # PIL


def chat_input_ids(messages: Any, tokenizer: Any, enable_thinking: bool) -> list[int]:
    return chat_prompt_ids(messages, tokenizer, enable_thinking=enable_thinking)


_Unread = tuple[str, "asyncio.Future[Prompt]"]


class ChatTurn(Sampler):
    """For the arguments see `RLVRWorkflow`."""

    def __init__(
        self,
        reward_fn: Callable[..., float] | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        enable_thinking: bool = False,
        get_input_ids_fn: Callable[..., list[int]] | str = chat_input_ids,
        data_extract_prompt_fn: Callable[[dict[str, Any]], Any] | str = messages_of,
        reward_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(gconfig, tokenizer)
        self._enable_thinking = enable_thinking
        self._extract_prompt = _function(data_extract_prompt_fn, "data_extract_prompt_fn")
        self._get_input_ids = _function(get_input_ids_fn, "get_input_ids_fn")
        self._prompts: OrderedDict[str, asyncio.Future[Prompt]] = OrderedDict()  # by chat
        # Chats of this tick that are not tokenised yet, of each event loop.
        self._unread: dict[asyncio.AbstractEventLoop, list[_Unread]] = {}
        if isinstance(reward_fn, str):
            reward_fn = get_reward_fn(reward_fn)
        check_reward_fn(reward_fn)
        self._reward = AsyncRewardWrapper(reward_fn, **(reward_kwargs or {}))

    async def prompt(self, data: dict[str, Any]) -> Prompt:
        """The tokenised prompt of a row; cached, so the samples of a group tokenise it once.

        The prompts of one tick of the event loop are tokenised together: rendering a template asks
        another process, which takes longer than the rendering.
        """
        chat, loop = json.dumps(self._extract_prompt(data)), asyncio.get_running_loop()
        prompt = self._prompts.get(chat)
        if prompt is None or (prompt.get_loop() is not loop and not prompt.done()):
            prompt = self._prompts[chat] = loop.create_future()
            if loop not in self._unread:
                self._unread[loop] = []
                loop.call_soon(self._tokenize_unread, loop)
            self._unread[loop].append((chat, prompt))
        # Shared: whoever is cancelled leaves it to the others.
        return prompt.result() if prompt.done() else await asyncio.shield(prompt)

    async def judge(self, prompt: Prompt, tokens: list[int], data: dict[str, Any]) -> float:
        """The reward of the tokens after the prompt, computed in a reward process."""
        with waiting(f"reward {self._reward.name}"), episode_scope("reward"):
            return await self._start_reward(prompt, tokens, data)

    async def judge_group(
        self, prompt: Prompt, samples: Sequence[Sample], data: dict[str, Any]
    ) -> list[float | Exception]:
        """As `judge`, for each sample; an error is a result."""
        if not samples:
            return []
        rewards = [self._start_reward(prompt, one.tokens.tolist(), data) for one in samples]
        try:
            with waiting(f"reward {self._reward.name}"), episode_scope("reward"):
                await asyncio.wait(rewards)
        finally:
            for reward in rewards:
                reward.cancel()
        return [_value_of(reward) for reward in rewards]

    async def score_group(
        self, prompt: Prompt, replies: Sequence[Sample | Exception], data: dict[str, Any]
    ) -> tuple[dict[int, float], dict[int, Exception]]:
        """Rewards and failures by sample; a sample fails if its reply or its reward did."""
        samples = {i: reply for i, reply in enumerate(replies) if isinstance(reply, Sample)}
        rewards = await self.judge_group(prompt, list(samples.values()), data)
        scores: dict[int, float] = {}
        failures = {i: reply for i, reply in enumerate(replies) if isinstance(reply, Exception)}
        for i, reward in zip(samples, rewards, strict=True):
            if isinstance(reward, Exception):
                failures[i] = reward
            else:
                scores[i] = reward
        return scores, failures

    def _start_reward(
        self, prompt: Prompt, output_tokens: list[int], data: dict[str, Any]
    ) -> asyncio.Future[float]:
        return self._reward.start(
            prompt.text,
            self.reply_text(output_tokens),
            prompt.ids,
            output_tokens,
            **{key: value for key, value in data.items() if key not in REWARD_ARGUMENTS},
        )

    def close(self) -> None:
        """End the reward processes."""
        self._reward.close()

    def _tokenize_unread(self, loop: asyncio.AbstractEventLoop) -> None:
        unread = self._unread.pop(loop)
        found = self._tokenize([chat for chat, _ in unread])
        for (chat, future), prompt in zip(unread, found, strict=True):
            if isinstance(prompt, Exception):
                self._prompts.pop(chat, None)
                future.set_exception(prompt)
            else:
                future.set_result(prompt)
        while len(self._prompts) > NUM_CACHED_PROMPTS:
            self._prompts.popitem(last=False)

    def _tokenize(self, chats: list[str]) -> list[Prompt | Exception]:
        contents = [json.loads(chat) for chat in chats]
        if self._get_input_ids is chat_input_ids:
            thinking = self._enable_thinking
            # A chat that the template rejects must not fail the others: then one by one.
            with suppress(Exception):
                rows = chat_prompts_ids(contents, self.tokenizer, enable_thinking=thinking)
                return [Prompt(ids, self.tokenizer.decode(ids)) for ids in rows]
        return [self._tokenize_one(content) for content in contents]

    def _tokenize_one(self, content: Any) -> Prompt | Exception:
        try:
            ids = self._get_input_ids(content, self.tokenizer, self._enable_thinking)
            return Prompt(ids=ids, text=self.tokenizer.decode(ids))
        except Exception as error:  # boundary: it belongs to the episodes of this prompt
            return error


def _value_of(reward: asyncio.Future[float]) -> float | Exception:
    error = reward.exception()
    if error is None:
        return reward.result()
    if not isinstance(error, Exception):
        raise error
    return error


def _function(value: Callable | str, key: str) -> Callable[..., Any]:
    return import_path.load(value, key=key) if isinstance(value, str) else value
