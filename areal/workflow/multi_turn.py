"""MultiTurnWorkflow: retries a question with feedback, up to `max_turns` replies.

    question -> reply -> reward != 0: done
                      -> reward == 0: "your answer is wrong" -> reply -> ...

One call makes one trajectory of all turns; its reward is that of the last reply, discounted by the
number of retries. Sampled tokens are kept as they are: a later turn appends tokens and never
tokenises earlier ones again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from areal.api.workflow_api import RolloutWorkflow
from areal.api.workflow_context import workflow_context
from areal.utils import stats_tracker
from areal.workflow.chat import ChatTurn, Prompt, chat_input_ids, messages_of
from areal.workflow.next_turn import join_turns, text_after_reply
from areal.workflow.transcript import Transcript

if TYPE_CHECKING:
    import torch

    from areal.api.config.inference import GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine

FEEDBACK = (
    "Your answer is wrong, or it could not be read. Read the question again, look for the mistake "
    "in what you wrote, and answer once more."
)


class MultiTurnWorkflow(RolloutWorkflow):
    """Episodes of up to `max_turns` replies; reward * turn_discount ** retries.

    `feedback` is the user's turn after a wrong reply. An episode also ends when the next turn
    would not fit in `gconfig.max_tokens`; `gconfig.max_new_tokens` holds for each reply. The other
    arguments are those of `RLVRWorkflow`.
    """

    text_only = True

    def __init__(
        self,
        reward_fn: Callable[..., float] | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_turns: int = 2,
        turn_discount: float = 1.0,
        feedback: str = FEEDBACK,
        enable_thinking: bool = False,
        get_input_ids_fn: Callable[..., list[int]] | str = chat_input_ids,
        data_extract_prompt_fn: Callable[[dict[str, Any]], Any] | str = messages_of,
        reward_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_turns(max_turns, turn_discount)
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self._turn = ChatTurn(
            reward_fn,
            gconfig,
            tokenizer,
            enable_thinking=enable_thinking,
            get_input_ids_fn=get_input_ids_fn,
            data_extract_prompt_fn=data_extract_prompt_fn,
            reward_kwargs=reward_kwargs,
        )
        self._feedback_ids = feedback_ids(feedback, self._turn.tokenizer, enable_thinking)

    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        prompt = await self._turn.prompt(data)
        transcript = Transcript(prompt.ids)
        while True:
            response = await self._turn.generate(engine, transcript.ids)
            transcript.add_reply(response)
            reward = await self._turn.judge(prompt, response.output_tokens, data)
            feedback = join_turns(transcript.ids, self._feedback_ids, self._turn.stop_ids)
            if reward != 0 or not self._may_retry(transcript, feedback):
                break
            transcript.add_text(feedback)
            ids = list(transcript.ids)
            prompt = Prompt(ids=ids, text=self._turn.tokenizer.decode(ids))
        reward *= self.turn_discount ** (transcript.num_turns - 1)
        stats_tracker.get(workflow_context.stat_scope()).scalar(
            reward=reward, num_turns=transcript.num_turns
        )
        return transcript.trajectory(reward)

    def close(self) -> None:
        """End the reward processes."""
        self._turn.close()

    def _may_retry(self, transcript: Transcript, feedback: list[int]) -> bool:
        fits = len(transcript.ids) + len(feedback) < self._turn.gconfig.max_tokens
        return transcript.num_turns < self.max_turns and fits


def check_turns(max_turns: int, turn_discount: float) -> None:
    if max_turns < 1:
        raise ValueError(f"workflow_kwargs.max_turns must be at least 1, got {max_turns}")
    if not 0 <= turn_discount <= 1:
        raise ValueError(
            f"workflow_kwargs.turn_discount must lie between 0 and 1, got {turn_discount}"
        )


def feedback_ids(feedback: str, tokenizer: Any, enable_thinking: bool) -> list[int]:
    """Tokens from the end of an assistant's turn through `feedback` to the next turn's header."""
    chat = [{"role": "user", "content": feedback}]
    text = text_after_reply(chat, tokenizer, enable_thinking=enable_thinking)
    if feedback not in text:
        raise ValueError(
            "the tokenizer's chat template leaves out the feedback, so a chat cannot be "
            f"continued; it rendered {text!r:.300}"
        )
    return tokenizer(text, add_special_tokens=False)["input_ids"]
