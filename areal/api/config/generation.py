"""The `gconfig` section: how tokens are sampled, and the same options in OpenAI's words.

The three `to_openai_*` methods give keyword arguments of the `openai` client's
`chat.completions.create` and `responses.create`, and of the Agents SDK's `ModelSettings`. What such
an interface has no name for goes into `extra_body` under the name it has here, when it is set;
only our prompt-and-output bound is renamed, because `max_tokens` is OpenAI's old name for the
output bound. What no request can say is refused: a group where one call gives one answer, and
`lora_name`, which the `model` argument chooses. `reward_normalization` and `drop_incomplete_group`
are about a group, not a request, and stay behind.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any

from areal.api.config.checks import require
from areal.api.config.section import config_section


@config_section
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
    skip_special_tokens: bool = True
    """Leave special tokens out of the text of an OpenAI-style reply."""
    stop: list[str] | None = None
    """Generation ends once the text contains one of these."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time it was generated already, between -2 and 2."""
    seed: int | None = None
    """Fixes the draw of this request, whatever else is in the batch."""
    lora_name: str = ""
    """The adapter to generate with. Default: none, the model itself."""
    use_beam_search: bool = False
    """Must stay false: a beam search does not sample, so its log-probabilities cannot be trained
    on."""
    reward_normalization: bool = False
    """Subtract the group's mean from the rewards and divide by its spread, before anything else
    sees them; what they were is kept as `original_rewards`."""
    drop_incomplete_group: bool = False
    """Reject a group of which the workflow rejected a sample. Default: go on with the others."""

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
        require(
            -2 <= self.frequency_penalty <= 2,
            "frequency_penalty must lie between -2 and 2",
            self.frequency_penalty,
        )
        require(
            self.stop is None or all(self.stop),
            "stop must hold texts of at least one character",
            self.stop,
        )
        require(
            not self.use_beam_search,
            "use_beam_search must be false: sampled log-probabilities are undefined under beam "
            "search",
            self.use_beam_search,
        )

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """A copy with `changes`."""
        own = {
            "stop_token_ids": list(self.stop_token_ids),
            "stop": None if self.stop is None else list(self.stop),
        }
        return replace(self, **{**own, **changes})

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> GenerationHyperparameters:
        """A copy that also stops at the tokenizer's EOS and PAD."""
        ids = {*self.stop_token_ids, tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}
        return self.new(stop_token_ids=sorted(ids))

    def to_openai_completions_args_dict(self) -> dict[str, Any]:
        """Arguments of `client.chat.completions.create`, besides `model` and `messages`."""
        named = {"n_samples", "frequency_penalty", "stop", "seed"}
        return self._openai_args("max_completion_tokens", named)

    def to_openai_responses_args_dict(self) -> dict[str, Any]:
        """Arguments of `client.responses.create`, besides `model` and `input`."""
        return self._openai_args("max_output_tokens", set())

    def to_openai_agents_model_settings_dict(self) -> dict[str, Any]:
        """Arguments of the Agents SDK's `ModelSettings`."""
        return self._openai_args("max_tokens", {"frequency_penalty"})

    def _openai_args(self, max_output: str, named: set[str]) -> dict[str, Any]:
        """`max_output` is the interface's name for the output bound; it has `named` options too."""
        self._check_one_call(may_have_n="n_samples" in named)
        args = {
            max_output: self.max_new_tokens,
            "temperature": 0.0 if self.greedy else self.temperature,
            "top_p": self.top_p,
        }
        if "n_samples" in named:
            args["n"] = self.n_samples
        extra = {}
        defaults = GenerationHyperparameters()
        for option, name in _SENT_WHEN_SET.items():
            value = getattr(self, option)
            if value != getattr(defaults, option):
                (args if option in named else extra)[name] = value
        return {**args, "extra_body": extra} if extra else args

    def _check_one_call(self, *, may_have_n: bool) -> None:
        require(
            self.n_samples == 1 or may_have_n,
            "n_samples must be 1, because one call of this interface gives one answer (the samples "
            "of a group are episodes of their own: use gconfig.new(n_samples=1))",
            self.n_samples,
        )
        require(
            not self.lora_name,
            "lora_name must be empty here: an OpenAI interface chooses the adapter by `model`",
            self.lora_name,
        )


# Options whose default changes nothing, and what a request calls them.
_SENT_WHEN_SET = {
    "frequency_penalty": "frequency_penalty",
    "stop": "stop",
    "seed": "seed",
    "top_k": "top_k",
    "min_new_tokens": "min_new_tokens",
    "max_tokens": "max_total_tokens",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
}
