"""What the agent tests share: a tokenizer with chat turns and tools, a tiny engine, a loop.

`ScriptedEngine` stands for a model that says given texts, where a random one never would (calls of
tools); everything else is the real thing.
"""

from __future__ import annotations

import asyncio
import re
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sample_agents import client_of
from tiny import write_tiny_model

from areal.agents.workflow import agent_workflow
from areal.api.config.inference import AgentConfig, GenerationHyperparameters
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.workflow_context import episode
from areal.engine.native.local_engine import NativeLocalEngine
from areal.rollout.event_loop import TaskRunner

TIMEOUT_S = 900
ADD_CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'

# In the manner of Qwen's: turns with header and end, tools before them, tool results as user turns.
CHAT_TEMPLATE = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""".lstrip("\n")


def build_chat_tokenizer(folder: Path, words: Sequence[str] = ()) -> Any:
    """One token per character of printable ASCII, and the marks of turns.

    `words` are tokens too, and a text that has several is cut into the longest: the tokens of a
    text that was sampled in smaller pieces are then others.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<|im_end|>", "<unk>", "<|im_start|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *string.printable, *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pieces = [re.escape(word) for word in sorted(words, key=len, reverse=True)]
    pattern = "|".join([*pieces, r"[\s\S]"])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(str(folder))
    return tokenizer


class ScriptedEngine:
    """Says `texts` one after the other, each with an end token; an exception is raised instead."""

    def __init__(self, tokenizer: Any, *texts: str | Exception, version: int = 0) -> None:
        self.tokenizer = tokenizer
        self.texts = list(texts)
        self.version = version
        self.requests: list[ModelRequest] = []

    async def tell(self, request: ModelRequest, tokens: list[int]) -> None:
        """One by one, as a model samples them."""
        for token in tokens if request.on_tokens else ():
            request.on_tokens([token], [-0.125])
            await asyncio.sleep(0)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        text = self.texts.pop(0)
        if isinstance(text, Exception):
            raise text
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens.append(self.tokenizer.eos_token_id)
        await self.tell(request, tokens)
        return ModelResponse(
            input_tokens=request.input_ids,
            output_tokens=tokens,
            output_logprobs=[-0.125] * len(tokens),
            output_versions=[self.version] * len(tokens),
            stop_reason="stop",
        )


class Does:
    """An agent of one coroutine, `act(client, extra)`; worth 1 if it does not say."""

    def __init__(self, act: Any) -> None:
        self.act = act

    async def run(self, data: dict[str, Any], **extra: Any) -> Any:
        result = await self.act(client_of(extra), extra)
        return 1.0 if result is None else result


@dataclass
class AgentWorld:
    """Runs single episodes on a loop like the trainer's."""

    folder: Path  # of the model
    engine: NativeLocalEngine
    tokenizer: Any
    runner: TaskRunner

    def run(
        self,
        agent: Any,
        data: dict[str, Any] | None = None,
        *,
        engine: Any = None,
        kwargs: dict[str, Any] | None = None,
        max_new_tokens: int = 6,
        ignore_eos: bool = False,
        **config: Any,
    ) -> Any:
        """The interactions of one episode, or its exception."""
        lengths = {"max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos}
        with self.open(agent, kwargs, **lengths, **config) as workflow:
            return self.episode(workflow, data, engine=engine)

    def episode(self, workflow: Any, data: dict[str, Any] | None = None, engine: Any = None) -> Any:
        return self.start(workflow, data, engine).result(TIMEOUT_S)

    def start(self, workflow: Any, data: dict[str, Any] | None = None, engine: Any = None) -> Any:
        async def one() -> Any:
            with episode(task_id=3, sample=1, is_eval=False, run_seed=7):
                return await workflow.arun_episode(engine or self.engine, data or {})

        return self.runner.run(one())

    @contextmanager
    def open(
        self,
        agent: Any,
        kwargs: dict[str, Any] | None = None,
        *,
        max_new_tokens: int = 6,
        ignore_eos: bool = False,
        logs: Path | None = None,
        sight: Any = None,
        **config: Any,
    ) -> Iterator[Any]:
        workflow = agent_workflow(
            agent,
            kwargs or {},
            config=AgentConfig(**config),
            tokenizer=self.tokenizer,
            gconfig=GenerationHyperparameters(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos),
            logs=logs,
            sight=sight,
        )
        try:
            yield workflow
        finally:
            workflow.close()


@contextmanager
def open_agent_world(folder: Path) -> Iterator[AgentWorld]:
    tokenizer = build_chat_tokenizer(folder)
    write_tiny_model(
        folder,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_position_embeddings=2048,
    )
    with world_of(folder, tokenizer) as world:
        yield world


@contextmanager
def world_of(folder: Path, tokenizer: Any) -> Iterator[AgentWorld]:
    """`folder` has a model and its tokenizer."""
    runner = TaskRunner("agents")
    runner.start()
    engine = NativeLocalEngine(folder, seed=5)
    engine.initialize()
    try:
        yield AgentWorld(folder, engine, tokenizer, runner)
    finally:
        engine.destroy()
        runner.close(2.0)
