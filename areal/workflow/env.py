"""EnvWorkflow: the model acts in an environment until that is done.

    reset(row) -> observation -> reply -> step(reply) -> observation -> reply -> ... -> done
                                       -> tool calls  -> their results -> reply -> ...

One call makes one trajectory of all turns. Observations and results of tools are appended as tokens
and not trained on; sampled tokens are kept as they are. The reward is the sum over all steps.

The environment's code is foreign: each call has a deadline, at most `max_concurrent` episodes are
open, and each is closed however it ends. Exceptions, time-outs and malformed results fail the
episode. One also ends after `max_turns` replies and when the next turn would not fit: what it
earned until then is its reward.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from areal.api.config.mcp import mcp_servers_of
from areal.api.workflow_api import RolloutWorkflow
from areal.api.workflow_context import workflow_context
from areal.environments.calls import Calls
from areal.environments.interface import EnvError, Messages, checked_step, messages_of
from areal.environments.load import environment_maker
from areal.environments.mcp.toolbox import Toolbox
from areal.environments.tools import Tool, answer_call, tools_of
from areal.openai.parsing.formats import format_of_template
from areal.openai.parsing.parser import ParsedOutput, begins_in_reasoning, parse_output
from areal.utils import stats_tracker
from areal.utils.chat_template import render_chat
from areal.workflow.next_turn import join_turns, require_shown, text_after_reply
from areal.workflow.sampler import Sampler
from areal.workflow.transcript import Transcript

if TYPE_CHECKING:
    import torch

    from areal.api.config.inference import GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine

NUM_CACHED_TURNS = 1024


class EnvWorkflow(RolloutWorkflow):
    """Episodes in an environment (areal/environments).

    `env` is an import path, a class or HUB:NAME, built anew with `env_kwargs` for each episode.
    `timeout_s` holds for each call of the environment, `gconfig.max_new_tokens` for each reply and
    `gconfig.max_tokens` for all of an episode. `mcp_servers` offer tools besides the environment's.
    """

    text_only = True

    def __init__(
        self,
        env: str | Callable[..., Any],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        env_kwargs: dict[str, Any] | None = None,
        mcp_servers: dict[str, Any] | None = None,
        max_turns: int = 16,
        timeout_s: float = 60.0,
        max_concurrent: int = 256,
        enable_thinking: bool = False,
    ) -> None:
        for key, value in {
            "max_turns": max_turns,
            "timeout_s": timeout_s,
            "max_concurrent": max_concurrent,
        }.items():
            if not value > 0:
                raise ValueError(f"workflow_kwargs.{key} must be above 0, got {value}")
        self._make = environment_maker(env, env_kwargs or {})
        self._toolbox = Toolbox(mcp_servers_of(mcp_servers or {}))
        self._sampler = Sampler(gconfig, tokenizer)
        self._chat = _ChatTokens(self._sampler.tokenizer, enable_thinking)
        self._max_turns = max_turns
        self._calls = Calls(_name_of(env), timeout_s, max_concurrent)

    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        async with self._calls.slot():
            environment = await self._calls.run("__init__", self._make)
            try:
                offered = await self._calls.run("mcp_servers", self._toolbox.open)
                try:
                    return await self._play(engine, environment, offered.tools, data)
                finally:
                    await self._calls.close(offered)
            finally:
                await self._calls.close(environment)

    def close(self) -> None:
        """End the processes of hubs and MCP servers."""
        self._toolbox.close()
        close = getattr(self._make, "close", None)
        if close is not None:
            close()

    async def _play(
        self, engine: InferenceEngine, environment: Any, served: list[Tool], row: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        first = await self._calls.run("reset", environment.reset, row)
        messages = messages_of(first, self._calls.name_of("reset"))
        if not messages:
            raise EnvError(f"{self._calls.name_of('reset')} returned no observation")
        tools = tools_of([*(getattr(environment, "tools", None) or ()), *served])
        transcript = Transcript(self._chat.prompt(messages, tools))
        reward, num_calls, done = 0.0, 0, False
        while not done:
            reply = await self._reply(engine, transcript, tools)
            num_calls += len(reply.calls)
            if reply.calls:
                messages = [await self._tool_message(tools, call) for call in reply.calls]
            else:
                step = await self._calls.run("step", environment.step, reply.content)
                messages, gained, done = checked_step(step, self._calls.name_of("step"))
                reward += gained
            done = done or not self._add(transcript, messages, tools)
        stats_tracker.get(workflow_context.stat_scope()).scalar(
            reward=reward, num_turns=transcript.num_turns, num_tool_calls=num_calls
        )
        return transcript.trajectory(reward)

    async def _reply(
        self, engine: InferenceEngine, transcript: Transcript, tools: dict[str, Tool]
    ) -> ParsedOutput:
        in_reasoning = begins_in_reasoning(self._sampler.tokenizer, transcript.ids)
        response = await self._sampler.generate(engine, transcript.ids)
        transcript.add_reply(response)
        return parse_output(
            self._sampler.reply_text(response.output_tokens),
            self._chat.tool_format,
            tools=_schemas(tools),
            in_reasoning=in_reasoning,
        )

    async def _tool_message(self, tools: dict[str, Tool], call: Any) -> dict[str, Any]:
        run = partial(self._calls.run_tool, call.name)
        text = await answer_call(tools, call.name, call.arguments, run)
        return {"role": "tool", "content": text, "name": call.name, "tool_call_id": call.id}

    def _add(self, transcript: Transcript, messages: Messages, tools: dict[str, Tool]) -> bool:
        """Append the next turn's text; False if there is no room for the turn."""
        ids = self._chat.between(messages, tools)
        ids = join_turns(transcript.ids, ids, self._sampler.stop_ids)
        fits = len(transcript.ids) + len(ids) < self._sampler.gconfig.max_tokens
        if transcript.num_turns >= self._max_turns or not fits:
            return False
        transcript.add_text(ids)
        return True


class _ChatTokens:
    """Messages to tokens, by the chat template.

    Cached: rendering asks another process, and worlds repeat themselves.
    """

    def __init__(self, tokenizer: Any, enable_thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._enable_thinking = enable_thinking
        self.tool_format = format_of_template(tokenizer.chat_template)
        self._shown_roles: set[str] = set()
        self._cached = lru_cache(NUM_CACHED_TURNS)(self._render)

    def prompt(self, messages: Messages, tools: dict[str, Tool]) -> list[int]:
        return list(self._cached(json.dumps([messages, _schemas(tools)]), True))

    def between(self, messages: Messages, tools: dict[str, Tool]) -> list[int]:
        return list(self._cached(json.dumps([messages, _schemas(tools)]), False))

    def _render(self, written: str, is_first: bool) -> list[int]:
        messages, schemas = json.loads(written)
        tools, thinking = schemas or None, self._enable_thinking
        if is_first:
            variables = {"enable_thinking": thinking}
            text = render_chat(self._tokenizer, messages, tools=tools, variables=variables)
        else:
            options = {"enable_thinking": thinking, "tools": tools}
            for role in {message["role"] for message in messages} - self._shown_roles:
                require_shown(role, self._tokenizer, **options)
                self._shown_roles.add(role)
            text = text_after_reply(messages, self._tokenizer, **options)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _schemas(tools: dict[str, Tool]) -> list[dict[str, Any]]:
    return [tool.schema for tool in tools.values()]


def _name_of(env: Any) -> str:
    return env if isinstance(env, str) else getattr(env, "__name__", repr(env))
