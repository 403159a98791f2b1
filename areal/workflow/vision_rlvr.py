"""VisionRLVRWorkflow: a question about images, one answer or several tries, a verifiable reward.

    row["messages"], row["images"] -> prompt tokens, one per merged patch of each image
        -> engine.agenerate with the images -> text -> reward process -> trajectory

The trajectory names its images by hash (`multi_modal_input`); their bytes are in the run's image
store before the engine sees them. With `max_turns` above 1 a reply of reward 0 is answered by
`feedback`, as in `MultiTurnWorkflow`, and the images stay in the prompt.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.image_references import MULTI_MODAL_KEY, ShownImage, references
from areal.api.io_struct import Sample
from areal.api.workflow_api import GroupResult, RolloutWorkflow
from areal.api.workflow_context import episode, workflow_context
from areal.models.vision.processor import image_processor_of
from areal.run.images import ImageStore
from areal.utils import stats_tracker
from areal.utils.data import concat_padded_tensors
from areal.workflow.chat import ChatTurn, Prompt
from areal.workflow.image_chat import chat_of, images_of
from areal.workflow.multi_turn import FEEDBACK, check_turns, feedback_ids
from areal.workflow.next_turn import join_turns
from areal.workflow.transcript import Transcript, group_trajectory

if TYPE_CHECKING:
    import torch

    from areal.api.config.inference import GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine


@dataclass(frozen=True, slots=True)
class _Question:
    prompt: Prompt  # as the chat template writes it: what the reward gets
    ids: list[int]  # with one image token per merged patch
    chat: list[dict[str, Any]]
    image_data: list[str]  # base64
    references: dict[str, torch.Tensor]


class VisionRLVRWorkflow(RolloutWorkflow):
    """Episodes about images, scored by a reward function.

    `processor` is the model's folder or hub name, transformers' `AutoProcessor` of it, or an
    `ImageProcessor`; `image_folder` is where images are kept (a run's: RunPaths.images). Rows have
    `messages` with {"type": "image"} parts and `images` in their order: encoded bytes, base64,
    `data:` URLs or PIL images. A row's other columns reach the reward function as keywords. The
    remaining arguments are those of `RLVRWorkflow` and `MultiTurnWorkflow`.
    """

    def __init__(
        self,
        reward_fn: Callable[..., float] | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        processor: Any,
        enable_thinking: bool = False,
        image_folder: str | Path = "images",
        max_turns: int = 1,
        turn_discount: float = 1.0,
        feedback: str = FEEDBACK,
        reward_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_turns(max_turns, turn_discount)
        self.max_turns, self.turn_discount = max_turns, turn_discount
        self._turn = ChatTurn(
            reward_fn,
            gconfig,
            tokenizer,
            enable_thinking=enable_thinking,
            data_extract_prompt_fn=chat_of,
            reward_kwargs=reward_kwargs,
        )
        self.tokenizer = self._turn.tokenizer
        self.processor = image_processor_of(processor, self.tokenizer)
        self._store = ImageStore(image_folder)
        self._feedback, self._feedback_ids = {"role": "user", "content": feedback}, []
        if max_turns > 1:
            self._feedback_ids = feedback_ids(feedback, self.tokenizer, enable_thinking)

    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        question = await self._question(data)
        prompt, chat, transcript = question.prompt, question.chat, Transcript(question.ids)
        row = _for_reward(data)
        while True:
            response = await self._turn.generate(
                engine, transcript.ids, image_data=question.image_data, chat=chat
            )
            transcript.add_reply(response)
            reward = await self._turn.judge(prompt, response.output_tokens, row)
            if reward != 0 or transcript.num_turns >= self.max_turns:
                break
            feedback = join_turns(transcript.ids, self._feedback_ids, self._turn.stop_ids)
            if len(transcript.ids) + len(feedback) >= self._turn.gconfig.max_tokens:
                break
            transcript.add_text(feedback)
            reply = self._turn.reply_text(response.output_tokens)
            chat = [*chat, {"role": "assistant", "content": reply}, self._feedback]
            ids = [*prompt.ids, *response.output_tokens, *feedback]
            prompt = Prompt(ids=ids, text=self.tokenizer.decode(ids))
        reward *= self.turn_discount ** (transcript.num_turns - 1)
        self._record(reward, transcript.num_turns)
        trajectory: dict[str, Any] = transcript.trajectory(reward)
        trajectory[MULTI_MODAL_KEY] = [question.references]
        return trajectory

    async def arun_group(
        self, engine: InferenceEngine, data: dict[str, Any], num_samples: int
    ) -> GroupResult:
        question = await self._question(data)
        if self.max_turns > 1:
            return await self._run_episodes(engine, data, num_samples)
        replies = await self._turn.generate_group(
            engine,
            question.ids,
            num_samples,
            image_data=question.image_data,
            chat=question.chat,
        )
        scores, failures = await self._turn.score_group(question.prompt, replies, _for_reward(data))
        if not scores:
            return GroupResult(None, failures)
        for score in scores.values():
            self._record(score, 1)
        kept = [reply for reply in map(replies.__getitem__, scores) if isinstance(reply, Sample)]
        trajectory: dict[str, Any] = group_trajectory(question.ids, kept, list(scores.values()))
        trajectory[MULTI_MODAL_KEY] = [question.references] * len(kept)
        return GroupResult(trajectory, failures)

    def close(self) -> None:
        """End the reward processes."""
        self._turn.close()

    async def _run_episodes(
        self, engine: InferenceEngine, data: dict[str, Any], num_samples: int
    ) -> GroupResult:
        """Turns differ between samples, so each is an episode of its own with its own seeds."""
        samples = [self._sample(engine, data, index) for index in range(num_samples)]
        results = await asyncio.gather(*samples, return_exceptions=True)
        failures = {i: error for i, error in enumerate(results) if isinstance(error, Exception)}
        rows = [row for row in results if isinstance(row, dict)]
        return GroupResult(concat_padded_tensors(rows) if rows else None, failures)

    async def _sample(
        self, engine: InferenceEngine, data: dict[str, Any], index: int
    ) -> dict[str, torch.Tensor]:
        group = workflow_context.get()
        if group is None:
            return await self.arun_episode(engine, data)
        with episode(
            task_id=group.task_id, sample=index, is_eval=group.is_eval, run_seed=group.run_seed
        ):
            return await self.arun_episode(engine, data)

    async def _question(self, data: dict[str, Any]) -> _Question:
        images = images_of(data)
        prompt = await self._turn.prompt(data)
        # In a thread: files are flushed to disk, and another process decodes.
        shown = await asyncio.to_thread(self._keep, images)
        return _Question(
            prompt,
            self.processor.expand(prompt.ids, [one.grid for one in shown]),
            chat_of(data),
            [base64.b64encode(image).decode() for image in images],
            references(shown),
        )

    def _keep(self, images: list[bytes]) -> list[ShownImage]:
        grids = [self.processor.grid_of(image) for image in images]  # first: it refuses bad ones
        digests = [self._store.add(image) for image in images]
        return [ShownImage(*pair) for pair in zip(digests, grids, strict=True)]

    def _record(self, reward: float, num_turns: int) -> None:
        stats = stats_tracker.get(workflow_context.stat_scope())
        stats.scalar(reward=reward, **({"num_turns": num_turns} if self.max_turns > 1 else {}))


def _for_reward(data: dict[str, Any]) -> dict[str, Any]:
    """Without the images, which would be sent to the reward process for every sample."""
    return {key: value for key, value in data.items() if key != "images"}
