r"""TIRWorkflow: tool-integrated reasoning, where code that the model writes is run as it writes it.

    prompt -> "... ```python\n" CODE "```\n" -> sandbox session -> "```output\n" OUTPUT "```\n"
           -> "... the answer is 7"          -> reward of all that text

Everything is one turn of the assistant: a reply stops at the end of its code, the output follows as
tokens that are not trained on, and the model goes on from there. Code runs in one session per
episode, so that files stay. The outcome of the code is data, whatever it is; a session that cannot
be started or is lost fails the episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from areal.api.workflow_api import RolloutWorkflow
from areal.api.workflow_context import workflow_context
from areal.sandbox.limits import SessionLimits
from areal.sandbox.session import Session
from areal.sandbox.sessions import SessionPool
from areal.utils import stats_tracker
from areal.utils.perf_tracer import episode_scope
from areal.utils.waits import waiting
from areal.workflow.chat import ChatTurn, chat_input_ids, messages_of
from areal.workflow.transcript import Transcript

if TYPE_CHECKING:
    import torch

    from areal.api.config.inference import GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine


class TIRWorkflow(RolloutWorkflow):
    """Up to `max_calls` runs of code in an episode; `sandbox` has the keys of SessionLimits.

    `gconfig.max_new_tokens` holds between two runs, `gconfig.max_tokens` for the episode. The other
    arguments are those of `RLVRWorkflow`; the reward function gets the text with all outputs.
    """

    text_only = True

    def __init__(
        self,
        reward_fn: Callable[..., float] | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_calls: int = 4,
        sandbox: dict[str, Any] | None = None,
        max_sessions: int = 32,
        code_start: str = "```python\n",
        code_end: str = "```\n",
        output_start: str = "```output\n",
        output_end: str = "\n```\n",
        enable_thinking: bool = False,
        get_input_ids_fn: Callable[..., list[int]] | str = chat_input_ids,
        data_extract_prompt_fn: Callable[[dict[str, Any]], Any] | str = messages_of,
        reward_kwargs: dict[str, Any] | None = None,
    ) -> None:
        for key, value in {"max_calls": max_calls, "max_sessions": max_sessions}.items():
            if value < 1:
                raise ValueError(f"workflow_kwargs.{key} must be at least 1, got {value}")
        for key, mark in {"code_start": code_start, "code_end": code_end}.items():
            if not mark:
                raise ValueError(f"workflow_kwargs.{key} must be a text of at least one character")
        self._limits = SessionLimits.of(sandbox or {})
        self._max_calls, self._max_sessions = max_calls, max_sessions
        self._code_start, self._code_end = code_start, code_end
        self._output_start, self._output_end = output_start, output_end
        self._turn = ChatTurn(
            reward_fn,
            gconfig,
            tokenizer,
            enable_thinking=enable_thinking,
            get_input_ids_fn=get_input_ids_fn,
            data_extract_prompt_fn=data_extract_prompt_fn,
            reward_kwargs=reward_kwargs,
        )
        self._pools: dict[asyncio.AbstractEventLoop, SessionPool] = {}

    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        prompt = await self._turn.prompt(data)
        transcript = Transcript(prompt.ids)
        async with AsyncExitStack() as stack:
            num_calls = await self._write(engine, transcript, stack)
        reward = await self._turn.judge(prompt, transcript.ids[len(prompt.ids) :], data)
        stats_tracker.get(workflow_context.stat_scope()).scalar(
            reward=reward, num_turns=transcript.num_turns, num_code_calls=num_calls
        )
        return transcript.trajectory(reward)

    def close(self) -> None:
        """End the reward processes."""
        self._turn.close()

    async def _write(
        self, engine: InferenceEngine, transcript: Transcript, stack: AsyncExitStack
    ) -> int:
        """Generate to the end; the number of runs of code."""
        session: Session | None = None
        num_calls = 0
        for is_last in [False] * self._max_calls + [True]:
            stop = [] if is_last else [self._code_end]
            response = await self._turn.generate(engine, transcript.ids, stop=stop)
            transcript.add_reply(response)
            text = self._turn.reply_text(response.output_tokens)
            if is_last or response.stop_reason == "length" or self._code_end not in text:
                break
            code = self._code_in(text)
            if code is None:  # some other text that ends like code
                continue
            if session is None:  # only now: many episodes need none
                session = await stack.enter_async_context(self._pool().session())
            with waiting("code in a sandbox"), episode_scope("tool"):
                result = await session.python(code)
            num_calls += 1
            if not self._add(transcript, result.text):
                break
        return num_calls

    def _code_in(self, text: str) -> str | None:
        before, _, _ = text.rpartition(self._code_end)
        _, found, code = before.rpartition(self._code_start)
        return code if found else None

    def _add(self, transcript: Transcript, output: str) -> bool:
        """Append the output; False if there is no room for it."""
        tokenizer, text = self._turn.tokenizer, f"{self._output_start}{output}{self._output_end}"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(transcript.ids) + len(ids) >= self._turn.gconfig.max_tokens:
            return False
        transcript.add_text(ids)
        return True

    def _pool(self) -> SessionPool:
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            self._pools[loop] = SessionPool(
                self._limits, num_warm=0, max_sessions=self._max_sessions
            )
        return self._pools[loop]
