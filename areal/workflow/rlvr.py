"""RLVRWorkflow: one question, one answer, one verifiable reward.

    row["messages"] -> prompt tokens -> engine.agenerate -> text -> reward process -> trajectory

One call makes one sample. The samples of a group share the tokenised prompt, and their seeds come
from `workflow_context`, so an episode that runs again draws the same tokens from the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow
from areal.reward import get_reward_fn
from areal.rollout.context import workflow_context
from areal.utils import import_path, stats_tracker
from areal.utils.tokenizer import chat_prompt_ids, load_hf_tokenizer

if TYPE_CHECKING:
    from areal.api.config.generation import GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine

NUM_CACHED_PROMPTS = 1024  # more than the groups in flight at any time
REWARD_ARGUMENTS = ("prompt", "completions", "prompt_ids", "completion_ids")


def messages_of(data: dict[str, Any]) -> Any:
    if "messages" not in data:
        raise ValueError(f"a row needs the key 'messages' (a chat), found {', '.join(data)}")
    return data["messages"]


def chat_input_ids(messages: Any, tokenizer: Any, enable_thinking: bool) -> list[int]:
    return chat_prompt_ids(messages, tokenizer, enable_thinking=enable_thinking)


class RLVRWorkflow(RolloutWorkflow):
    """Single-turn episodes judged by a reward function.

    `reward_fn` is a name of `areal.reward`, an import path or a function; `tokenizer` an object or
    a path. `reward_kwargs` go to AsyncRewardWrapper (timeout_seconds, max_workers, max_retries).
    A row's keys reach the reward function as keywords, except those that are its own arguments.

    `data_extract_prompt_fn(row)` gives the chat of a row (default: `row["messages"]`);
    `get_input_ids_fn(chat, tokenizer, enable_thinking)` its tokens (default: the chat template).
    """

    def __init__(
        self,
        reward_fn: Callable[..., float] | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool = False,
        get_input_ids_fn: Callable[..., list[int]] | str = chat_input_ids,
        data_extract_prompt_fn: Callable[[dict[str, Any]], Any] | str = messages_of,
        reward_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = load_hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(self.tokenizer).new(n_samples=1)
        self.enable_thinking = enable_thinking
        self._extract_prompt = _function(data_extract_prompt_fn, "data_extract_prompt_fn")
        self._get_input_ids = _function(get_input_ids_fn, "get_input_ids_fn")
        self._prompt = lru_cache(maxsize=NUM_CACHED_PROMPTS)(self._tokenize)
        self._stop_ids = frozenset(self.gconfig.stop_token_ids)
        if isinstance(reward_fn, str):
            reward_fn = get_reward_fn(reward_fn)
        self.async_reward_fn = AsyncRewardWrapper(reward_fn, **(reward_kwargs or {}))

    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        prompt = self._prompt(json.dumps(self._extract_prompt(data)))
        seed = self.gconfig.seed if self.gconfig.seed is not None else workflow_context.next_seed()
        request = ModelRequest(
            input_ids=list(prompt.ids),
            gconfig=self.gconfig.new(seed=seed),
            tokenizer=self.tokenizer,
        )
        response = await engine.agenerate(request)
        if response.stop_reason == "abort":
            raise RuntimeError(f"generation was aborted after {response.output_len} tokens")
        reward = await self._judge(prompt, response, data)
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward)
        return to_trajectory(response, reward)

    def close(self) -> None:
        """End the reward processes."""
        self.async_reward_fn.close()

    async def _judge(self, prompt: Prompt, response: ModelResponse, data: dict[str, Any]) -> float:
        text_ids = response.output_tokens
        if text_ids and text_ids[-1] in self._stop_ids:
            text_ids = text_ids[:-1]
        return await self.async_reward_fn(
            prompt.text,
            self.tokenizer.decode(text_ids),
            prompt.ids,
            response.output_tokens,
            **{key: value for key, value in data.items() if key not in REWARD_ARGUMENTS},
        )

    def _tokenize(self, chat_json: str) -> Prompt:
        ids = self._get_input_ids(json.loads(chat_json), self.tokenizer, self.enable_thinking)
        return Prompt(ids=ids, text=self.tokenizer.decode(ids))


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    text: str


def to_trajectory(response: ModelResponse, reward: float) -> dict[str, torch.Tensor]:
    """A batch of one: the prompt and output of a single turn, as `api/io_struct.py` says."""
    shape = 1, response.input_len + response.output_len

    def row(prompt_value: float, output: list[float] | float, dtype: type) -> torch.Tensor:
        # Filled by numpy: five times faster than torch.tensor on a list of thousands.
        values = np.full(shape, prompt_value, dtype)
        values[0, response.input_len :] = output
        return torch.from_numpy(values)

    tokens = np.array([response.input_tokens + response.output_tokens], np.int32)
    return {
        "input_ids": torch.from_numpy(tokens),
        "attention_mask": torch.ones(shape, dtype=torch.bool),
        "loss_mask": row(0, 1, np.int32),
        "logprobs": row(0.0, response.output_logprobs, np.float32),
        "versions": row(-1, response.output_versions, np.int32),
        "turn_ids": row(-1, 0, np.int32),
        "rewards": torch.tensor([reward], dtype=torch.float32),
        "seq_no_eos": torch.tensor([response.stop_reason == "length"]),
    }


def _function(value: Callable | str, key: str) -> Callable[..., Any]:
    return import_path.load(value, key=key) if isinstance(value, str) else value
