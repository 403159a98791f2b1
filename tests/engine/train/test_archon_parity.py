"""Every layout computes what one rank computes: losses, gradients, weights, log-probabilities.

Batches do not divide by the number of ranks, ranks have unequal numbers of micro-batches, and in
one step all data-parallel places but one have no rows at all.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine.train.archon_world import assert_parity
from tiny import write_tiny_model

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3"},  # a norm of queries and keys, a tied head
    "qwen2": {"family": "qwen2", "tie_word_embeddings": False},  # biases of q, k, v
    "llama": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen3_moe": {"family": "qwen3_moe"},
    "deep": {"family": "qwen3", "num_hidden_layers": 5},  # enough for two stages on each rank
    "deep_untied": {"family": "llama", "num_hidden_layers": 4, "tie_word_embeddings": False},
    "deep_moe": {"family": "qwen3_moe", "num_hidden_layers": 4},
    "deep_gemma3": {"family": "gemma3_text", "num_hidden_layers": 4, "sliding_window_pattern": 2},
    "gemma3": {
        "family": "gemma3_text",
        "final_logit_softcapping": 5.0,
    },  # four norms a block, windows, a capped head
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @cache
    def build(name: str) -> Path:
        options = dict(MODELS[name])
        return write_tiny_model(tmp_path_factory.mktemp(name), options.pop("family"), **options)

    return build


@pytest.fixture
def check_parity(folder_of, tmp_path):
    def check(num_ranks: int, *cases: tuple[str, str, dict[str, Any]]) -> None:
        """Each case, (model, backend, changes of the engine), against one rank."""
        jobs = [
            (str(folder_of(model)), backend, changes, str(tmp_path / f"{i}.pt"))
            for i, (model, backend, changes) in enumerate(cases)
        ]
        assert_parity(num_ranks, jobs)

    return check


def test_two_ranks(check_parity):
    check_parity(
        2, *(("qwen3", backend, {}) for backend in ("archon:d2", "archon:t2", "archon:c2"))
    )


def schedule(name: str, **changes: Any) -> dict[str, Any]:
    return {"pp_schedule": name, **changes}


def test_two_ranks_of_a_pipeline(check_parity):
    check_parity(
        2,
        ("deep", "archon:p2", schedule("1F1B")),
        ("deep", "archon:p2", schedule("ZBVZeroBubble")),
        ("deep_untied", "archon:p2", schedule("Interleaved1F1B")),
        ("deep_untied", "archon:p2", schedule("InterleavedZeroBubble")),
    )


LORA = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8.0}
EXPERTS = {**LORA, "target_modules": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}


def test_two_ranks_with_adapters(check_parity):
    check_parity(
        2,
        ("llama", "archon:t2", {**LORA}),
        ("deep", "archon:p2", schedule("1F1B", **LORA)),
        ("qwen3_moe", "archon:d2e2", {**EXPERTS}),
    )


# One test each, so that ranks find once how the operations of these models are cut.
CRITIC = {"is_critic": True}
TWO_RANKS = (
    ("qwen2", "archon:t2", {"temperature": 0.7, "logprobs_chunk_size": 7}),
    ("llama", "archon:t2", {}),
    ("llama", "archon:c2", {}),
    ("qwen3_moe", "archon:d2", {}),
    ("qwen3_moe", "archon:t2", {}),
    ("gemma3", "archon:t2", {}),
    ("gemma3", "archon:c2", {}),
    ("qwen3", "archon:d2", CRITIC),
    ("qwen3", "archon:t2", CRITIC),
    ("qwen3", "archon:c2", CRITIC),
)
TWO_RANKS_OF_PIPELINES = (
    ("deep", "archon:p2", schedule("Interleaved1F1B")),
    ("deep", "archon:p2", schedule("InterleavedZeroBubble")),
    ("deep_untied", "archon:p2", schedule("1F1B")),
    ("deep_untied", "archon:p2", schedule("ZBVZeroBubble")),
    ("deep_moe", "archon:p2", schedule("Interleaved1F1B")),
    ("deep_gemma3", "archon:p2", schedule("1F1B", temperature=0.7)),
    ("deep", "archon:p2", schedule("Interleaved1F1B", gradient_checkpointing=True)),
    ("deep", "archon:p2", schedule("1F1B", is_critic=True, init_from_scratch=True)),
    ("deep", "archon:p2", schedule("ZBVZeroBubble", is_critic=True, init_from_scratch=True)),
)
TWO_RANKS_WITH_ADAPTERS = (
    ("qwen3", "archon:t2", {**LORA, "lora_rank": 3}),
    ("qwen3", "archon:c2", LORA),
    ("gemma3", "archon:t2", LORA),
    ("qwen3", "archon:t2", {**LORA, "is_critic": True}),
    ("qwen3_moe", "archon:t2", EXPERTS),
    ("qwen3_moe", "archon:d2", EXPERTS),
    ("deep_untied", "archon:p2", schedule("Interleaved1F1B", **LORA)),
    ("deep", "archon:p2", schedule("ZBVZeroBubble", **LORA)),
    ("deep_moe", "archon:p2", schedule("Interleaved1F1B", **EXPERTS)),
)
FOUR_RANKS = (
    ("qwen3", "archon:d2t2", {}),
    ("qwen2", "archon:d2c2", {}),
    ("qwen3_moe", "archon:d2t2", {"num_replicas": 2}),
    ("qwen3", "archon:c2t2", {}),
    ("qwen3", "archon:c4", {}),  # more ranks than key-value heads
    ("qwen3", "archon:d4", {"num_replicas": 2}),
)
FOUR_RANKS_OF_PIPELINES = (
    ("deep", "archon:d2p2", schedule("1F1B")),
    ("deep", "archon:d2p2", schedule("ZBVZeroBubble", num_replicas=2)),
    ("deep_untied", "archon:d2p2", schedule("InterleavedZeroBubble")),
    ("deep", "archon:p2t2", schedule("ZBVZeroBubble")),
    ("deep", "archon:p2c2", schedule("Interleaved1F1B")),
    ("deep", "archon:p4", schedule("1F1B")),
    ("deep_moe", "archon:d2p2e2", schedule("Interleaved1F1B")),
)
FOUR_RANKS_WITH_ADAPTERS = (
    ("qwen3", "archon:d2t2", LORA),
    ("deep_moe", "archon:d2p2e2", schedule("Interleaved1F1B", **EXPERTS)),
    ("qwen3_moe", "archon:d4e2", EXPERTS),
    ("qwen3_moe", "archon:(attn:d2t2|ffn:d2t2)", EXPERTS),
    ("qwen3_moe", "archon:(attn:d2t2|ffn:t2e2)", EXPERTS),
)


@pytest.mark.slow
def test_two_ranks_of_other_layouts(check_parity):
    check_parity(2, *TWO_RANKS, *TWO_RANKS_OF_PIPELINES, *TWO_RANKS_WITH_ADAPTERS)


@pytest.mark.slow
def test_four_ranks(check_parity):
    check_parity(4, *FOUR_RANKS, *FOUR_RANKS_OF_PIPELINES, *FOUR_RANKS_WITH_ADAPTERS)
