"""A model that says what a test wants: replies in turn, as tokens of a tokenizer."""

from __future__ import annotations

from areal.api.io_struct import ModelRequest, ModelResponse


class ScriptedEngine:
    """`replies` are texts, each ended by a stop string or the end token; `asked` the prompts."""

    def __init__(self, tokenizer, replies):
        self._tokenizer = tokenizer
        self._replies = list(replies)
        self.asked: list[str] = []

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.asked.append(self._tokenizer.decode(req.input_ids))
        text = self._replies.pop(0) if self._replies else "?"
        ends = [text.find(stop) + len(stop) for stop in req.gconfig.stop or () if stop in text]
        tokens = self._tokenizer.encode(text[: min(ends)] if ends else text)
        if not ends:
            tokens.append(self._tokenizer.eos_token_id)
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=tokens,
            output_logprobs=[-0.5] * len(tokens),
            output_versions=[3] * len(tokens),
            stop_reason="stop",
            tokenizer=req.tokenizer,
        )
