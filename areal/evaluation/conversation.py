"""A conversation with a model in this process, streamed.

with Conversation("path/to/model") as conversation:
    conversation.say("2+2=", print)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.engine.native.local_engine import NativeLocalEngine
from areal.openai.replies import TextReader
from areal.utils.device import best_device
from areal.utils.hub import model_folder
from areal.utils.tokenizer import chat_prompt_ids, load_hf_tokenizer


class Conversation:
    """`temperature` 0 takes the most likely token."""

    def __init__(
        self,
        path: str,
        *,
        system: str | None = None,
        max_new_tokens: int = 1024,
        temperature: float = 1.0,
        seed: int = 1,
    ) -> None:
        self._tokenizer = load_hf_tokenizer(str(model_folder(path)))
        sampling = GenerationHyperparameters(
            max_new_tokens=max_new_tokens, greedy=temperature == 0, temperature=temperature or 1.0
        )
        self._gconfig = sampling.new_with_stop_and_pad_token_ids(self._tokenizer)
        self._engine = NativeLocalEngine(path, device=best_device())
        self._system, self._seed, self._num_turns = system, seed, 0
        self.begin()

    def __enter__(self) -> Conversation:
        self._engine.initialize()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._engine.destroy()

    def begin(self) -> None:
        """Forget what was said."""
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str, show: Callable[[str], None]) -> str:
        """The reply; `show` gets its pieces. ValueError, and nothing was said, if there is no room
        for one."""
        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = chat_prompt_ids(messages, self._tokenizer)
        reply = asyncio.run(self._reply(prompt, show))
        self._messages = [*messages, {"role": "assistant", "content": reply}]
        return reply

    async def _reply(self, prompt: list[int], show: Callable[[str], None]) -> str:
        gconfig = self._gconfig.new(seed=self._seed + self._num_turns)
        self._num_turns += 1
        reader = TextReader(gconfig, self._tokenizer, stop_ids=gconfig.stop_token_ids)
        num_shown = 0

        def on_tokens(tokens: list[int], logprobs: list[float]) -> None:
            nonlocal num_shown
            num_shown += len(tokens)
            show(reader.push(tokens))

        request = ModelRequest(input_ids=prompt, gconfig=gconfig, on_tokens=on_tokens)
        response = await self._engine.agenerate(request)
        show(reader.push(response.output_tokens[num_shown:]) + reader.finish())
        return reader.text
