"""Sections of the inference servers that a run starts.

`vLLMConfig` and `SGLangConfig` are stock servers, each in its own environment. The named keys are
those a run often sets; any other option of a server goes into `extra_args`, as on its command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from areal.api.config.section import (
    config_section,
    expand_path,
    require,
    require_at_least,
)

MAX_VLLM_LORA_RANK = 512


@config_section
class vLLMConfig:
    """The vLLM servers of a run with `rollout.backend: vllm:d1` or more."""

    python: str = ""
    """Interpreter of the environment that has vLLM. Default: that of `areal env create vllm`."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision. Default: that of the actor."""
    max_model_len: int | None = None
    """Most tokens of prompt and output. Default: the model's max_position_embeddings."""
    max_num_seqs: int = 256
    """Most sequences decoded together."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory the server takes; lower it where it shares the GPU."""
    cpu_cache_gb: int = 4
    """Size of the key-value cache on a machine without GPU."""
    enforce_eager: bool = False
    """No compilation and no CUDA graphs: a quicker start, slower tokens."""
    block_size: int | None = None
    """Tokens per block of the key-value cache. Default: the server's choice."""
    no_enable_prefix_caching: bool = False
    """Compute every prompt whole, also what the cache holds of it."""
    seed: int | None = None
    """Seed of the first server's samples; each further server adds 1. Default: the run's seed."""
    threads: int = 1
    """CPU threads of the server."""
    extra_args: list[str] = field(default_factory=list)
    """Further arguments of the server, like `[--swap-space, "8"]`."""

    def __post_init__(self) -> None:
        self.python = expand_path("python", self.python)
        require_at_least(
            1,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            cpu_cache_gb=self.cpu_cache_gb,
            block_size=self.block_size,
            threads=self.threads,
        )
        require_at_least(0, seed=self.seed)
        _require_share(gpu_memory_utilization=self.gpu_memory_utilization)

    @property
    def max_context(self) -> int | None:
        return self.max_model_len

    @property
    def arguments(self) -> list[str]:
        """Command line of the keys that are only passed on, then `extra_args`."""
        options = {
            "block-size": self.block_size,
            "no-enable-prefix-caching": self.no_enable_prefix_caching,
        }
        return [*command_line(options), *self.extra_args]


@config_section
class SGLangConfig:
    """The SGLang servers of a run with `rollout.backend: sglang:d1` or more."""

    python: str = ""
    """Interpreter of the environment that has SGLang. Default: that of `areal env create
    sglang`."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision. Default: that of the actor."""
    context_length: int | None = None
    """Most tokens of prompt and output. Default: the model's max_position_embeddings."""
    max_running_requests: int | None = None
    """Most sequences decoded together. Default: the server's choice."""
    mem_fraction_static: float = 0.9
    """Share of the GPU's memory for weights and cache; lower it where the server shares the GPU."""
    attention_backend: str | None = None
    """The server's attention kernels, like `fa3`. Default: its choice."""
    chunked_prefill_size: int | None = None
    """Tokens of a prompt computed at a time; -1: the whole prompt. Default: the server's choice."""
    max_prefill_tokens: int | None = None
    """Most tokens of all prompts computed at a time. Default: the server's choice."""
    disable_radix_cache: bool = False
    """Compute every prompt whole, also what the cache holds of it."""
    random_seed: int | None = None
    """Seed of the first server's samples; each further server adds 1. Default: the run's seed."""
    threads: int = 1
    """CPU threads of the server."""
    extra_args: list[str] = field(default_factory=list)
    """Further arguments of the server, like `[--schedule-policy, lpm]`."""

    def __post_init__(self) -> None:
        self.python = expand_path("python", self.python)
        require_at_least(
            1,
            context_length=self.context_length,
            max_running_requests=self.max_running_requests,
            max_prefill_tokens=self.max_prefill_tokens,
            threads=self.threads,
        )
        require_at_least(0, random_seed=self.random_seed)
        require(
            self.chunked_prefill_size in (None, -1) or (self.chunked_prefill_size or 0) > 0,
            "chunked_prefill_size must be above 0, or -1 for whole prompts",
            self.chunked_prefill_size,
        )
        _require_share(mem_fraction_static=self.mem_fraction_static)

    @property
    def max_context(self) -> int | None:
        return self.context_length

    @property
    def seed(self) -> int | None:
        return self.random_seed

    @property
    def arguments(self) -> list[str]:
        """Command line of the keys that are only passed on, then `extra_args`."""
        options = {
            "chunked-prefill-size": self.chunked_prefill_size,
            "max-prefill-tokens": self.max_prefill_tokens,
            "disable-radix-cache": self.disable_radix_cache,
        }
        return [*command_line(options), *self.extra_args]


def command_line(options: Mapping[str, object]) -> list[str]:
    """A flag for true, nothing for null and false, else a name and a value."""
    words: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def _require_share(**fields: float) -> None:
    for name, value in fields.items():
        require(0 < value <= 1, f"{name} must lie in (0, 1]", value)


@config_section
class NativeServerConfig:
    """The native inference server: cache, batch and threads."""

    page_size: int = 16
    """Tokens per page of the key-value cache."""
    num_pages: int | None = None
    """Pages of the cache. Default: as many as max_running sequences need, within memory."""
    max_running: int = 512
    """Most sequences decoded together."""
    threads: int = 1
    """CPU threads of each server."""
    dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = None
    """Precision. fp8: weights of linear layers and the cache in 8 bits, quantized at each update;
    dense models only. Default: that of the actor."""
    batch_invariant: bool = False
    """On CUDA, tokens and log-probabilities of a request do not depend on the others, bit for bit;
    with actor.batch_invariant they equal the trainer's. Slower. On the CPU it is always so."""

    def __post_init__(self) -> None:
        require_at_least(
            1,
            page_size=self.page_size,
            num_pages=self.num_pages,
            max_running=self.max_running,
            threads=self.threads,
        )
