"""RLVRWorkflow: one question, one answer, one verifiable reward.

    row["messages"] -> prompt tokens -> engine.agenerate -> text -> reward process -> trajectory

A group is one request of several samples (`arun_group`); an episode makes one sample, which is also
how a failed sample of a group is retried. Both share the tokenised prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from areal.api.io_struct import Sample
from areal.api.workflow_api import GroupResult, RolloutWorkflow
from areal.api.workflow_context import workflow_context
from areal.utils import stats_tracker
from areal.workflow.chat import ChatTurn, chat_input_ids, messages_of
from areal.workflow.transcript import Transcript, group_trajectory

if TYPE_CHECKING:
    import torch

    from areal.api.config.inference import GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine


class RLVRWorkflow(RolloutWorkflow):
    """Single-turn episodes scored by a reward function.

    `reward_fn` is a name of `areal.reward`, an import path or a function; `tokenizer` an object or
    a path. `reward_kwargs` go to AsyncRewardWrapper (timeout_seconds, max_workers, max_retries).
    A row's keys reach the reward function as keywords, except those that are its own arguments.

    `data_extract_prompt_fn(row)` returns the chat of a row (default: `row["messages"]`);
    `get_input_ids_fn(chat, tokenizer, enable_thinking)` its tokens (default: the chat template).
    """

    text_only = True

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
        self._turn = ChatTurn(
            reward_fn,
            gconfig,
            tokenizer,
            enable_thinking=enable_thinking,
            get_input_ids_fn=get_input_ids_fn,
            data_extract_prompt_fn=data_extract_prompt_fn,
            reward_kwargs=reward_kwargs,
        )
        self.tokenizer = self._turn.tokenizer

    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        prompt = await self._turn.prompt(data)
        transcript = Transcript(prompt.ids)
        response = await self._turn.generate(engine, transcript.ids)
        transcript.add_reply(response)
        reward = await self._turn.judge(prompt, response.output_tokens, data)
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward)
        return transcript.trajectory(reward)

    async def arun_group(
        self, engine: InferenceEngine, data: dict[str, Any], num_samples: int
    ) -> GroupResult:
        prompt = await self._turn.prompt(data)
        replies = await self._turn.generate_group(engine, prompt.ids, num_samples)
        scores, failures = await self._turn.score_group(prompt, replies, data)
        if not scores:
            return GroupResult(None, failures)
        stats = stats_tracker.get(workflow_context.stat_scope())
        for score in scores.values():
            stats.scalar(reward=score)
        kept = [reply for reply in map(replies.__getitem__, scores) if isinstance(reply, Sample)]
        return GroupResult(group_trajectory(prompt.ids, kept, list(scores.values())), failures)

    def close(self) -> None:
        """End the reward processes."""
        self._turn.close()
