"""The `gconfig` section: how tokens are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from areal.api.config.checks import require


@dataclass(kw_only=True)
class GenerationHyperparameters:
    """Sampling options of one request, and the group size of a prompt."""

    n_samples: int = 1
    """Samples per prompt: the size of a group."""
    max_new_tokens: int = 16384
    """Most tokens to generate."""
    min_new_tokens: int = 0
    """Stop tokens are not sampled before this many tokens."""
    max_tokens: int = 32768
    """Most tokens of prompt and output together."""
    greedy: bool = False
    """Always take the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities reach this sum."""
    top_k: int = 100_000_000
    """Keep this many most likely tokens."""
    temperature: float = 1.0
    """Divides the logits before sampling."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Generation ends after one of these."""
    ignore_eos: bool = False
    """Go on after the model's end token; `stop_token_ids` still hold."""
    seed: int | None = None
    """Fixes the draw of this request, whatever else is in the batch."""

    def __post_init__(self) -> None:
        require(self.n_samples >= 1, "n_samples must be at least 1", self.n_samples)
        require(self.max_new_tokens >= 1, "max_new_tokens must be at least 1", self.max_new_tokens)
        require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens must lie between 0 and max_new_tokens",
            self.min_new_tokens,
        )
        require(0 < self.top_p <= 1, "top_p must lie in (0, 1]", self.top_p)
        require(self.top_k >= 1, "top_k must be at least 1", self.top_k)
        require(
            0 < self.temperature < float("inf"),
            "temperature must be above 0 (set greedy=true for the most likely token)",
            self.temperature,
        )

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """A copy with `changes`."""
        return replace(self, **{"stop_token_ids": list(self.stop_token_ids), **changes})

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> GenerationHyperparameters:
        """A copy that also stops at the tokenizer's EOS and PAD."""
        ids = {*self.stop_token_ids, tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}
        return self.new(stop_token_ids=sorted(ids))
