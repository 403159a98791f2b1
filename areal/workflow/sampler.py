"""Requests of a workflow to the engine: sampling options, seeds, and the text of a reply.

Seeds come from `workflow_context`, so a retried episode samples the same tokens from the same
weights; an aborted reply is a failure, never data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from areal.api.io_struct import ModelRequest, ModelResponse, Sample
from areal.api.workflow_context import workflow_context
from areal.utils.tokenizer import load_hf_tokenizer

if TYPE_CHECKING:
    from areal.api.config.inference import GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine


class Sampler:
    """`tokenizer` is an object or a path."""

    def __init__(self, gconfig: GenerationHyperparameters, tokenizer: Any) -> None:
        self.tokenizer = load_hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(self.tokenizer).new(n_samples=1)
        self.stop_ids = frozenset(self.gconfig.stop_token_ids)

    async def generate(
        self,
        engine: InferenceEngine,
        input_ids: list[int],
        *,
        stop: Sequence[str] = (),
        image_data: Sequence[str] = (),
        chat: list[dict[str, Any]] | None = None,
    ) -> ModelResponse:
        """`stop`: texts that end the reply, besides those of the config; `image_data`: base64;
        `chat`: what the prompt was made of, for servers that take images in one."""
        seed = self.gconfig.seed if self.gconfig.seed is not None else workflow_context.next_seed()
        request = ModelRequest(
            input_ids=list(input_ids),
            gconfig=self.gconfig.new(seed=seed, stop=[*(self.gconfig.stop or ()), *stop] or None),
            tokenizer=self.tokenizer,
            image_data=list(image_data),
            vision_msg_vllm=chat,
        )
        response = await engine.agenerate(request)
        if response.stop_reason == "abort":
            raise RuntimeError(f"generation was aborted after {response.output_len} tokens")
        return response

    async def generate_group(
        self,
        engine: InferenceEngine,
        input_ids: list[int],
        num_samples: int,
        *,
        image_data: Sequence[str] = (),
        chat: list[dict[str, Any]] | None = None,
    ) -> list[Sample | Exception]:
        seeds: Sequence[int | None] = [self.gconfig.seed] * num_samples
        if self.gconfig.seed is None:
            seeds = workflow_context.next_seeds(num_samples)
        request = ModelRequest(
            input_ids=list(input_ids),
            gconfig=self.gconfig,
            tokenizer=self.tokenizer,
            image_data=list(image_data),
            vision_msg_vllm=chat,
        )
        samples = await engine.agenerate_group(request, seeds)
        return [_unless_aborted(sample) for sample in samples]

    def reply_text(self, output_tokens: list[int]) -> str:
        """The text of a reply, without the token that ended it."""
        if output_tokens and output_tokens[-1] in self.stop_ids:
            output_tokens = output_tokens[:-1]
        return self.tokenizer.decode(output_tokens)


def _unless_aborted(sample: Sample | Exception) -> Sample | Exception:
    if isinstance(sample, Sample) and sample.stop_reason == "abort":
        return RuntimeError(f"generation was aborted after {len(sample.tokens)} tokens")
    return sample
