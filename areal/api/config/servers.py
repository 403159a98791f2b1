"""The `vllm` and `sglang` sections: stock servers, each in an environment of its own.

Keys that are named here are those a run must often set. Any other option of a server goes into
`extra_args`, as on its command line.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from areal.api.config.checks import expand_path, require, require_at_least
from areal.api.config.section import config_section


@config_section
class VLLMConfig:
    """The vLLM server of a run with `rollout.backend: vllm:d1`."""

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
    threads: int = 1
    """CPU threads of the server."""
    extra_args: list[str] = field(default_factory=list)
    """Further arguments of the server, like `[--block-size, "32"]`."""

    def __post_init__(self) -> None:
        self.python = expand_path("python", self.python)
        require_at_least(
            1,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            cpu_cache_gb=self.cpu_cache_gb,
            threads=self.threads,
        )
        _require_share(gpu_memory_utilization=self.gpu_memory_utilization)

    @property
    def max_context(self) -> int | None:
        return self.max_model_len


@config_section
class SGLangConfig:
    """The SGLang server of a run with `rollout.backend: sglang:d1`."""

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
    threads: int = 1
    """CPU threads of the server."""
    extra_args: list[str] = field(default_factory=list)
    """Further arguments of the server, like `[--chunked-prefill-size, "4096"]`."""

    def __post_init__(self) -> None:
        self.python = expand_path("python", self.python)
        require_at_least(
            1,
            context_length=self.context_length,
            max_running_requests=self.max_running_requests,
            threads=self.threads,
        )
        _require_share(mem_fraction_static=self.mem_fraction_static)

    @property
    def max_context(self) -> int | None:
        return self.context_length


def _require_share(**fields: float) -> None:
    for name, value in fields.items():
        require(0 < value <= 1, f"{name} must lie in (0, 1]", value)
