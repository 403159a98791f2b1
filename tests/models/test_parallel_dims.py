"""Layouts as numbers of ranks, and which models they can cut."""

from __future__ import annotations

import pytest
from tiny import tiny_config

from areal.api.alloc_mode import ModelAllocation
from areal.models import get_model_spec
from areal.models.parallel_dims import ParallelDims, check_layout


def dims_of(backend: str, **options: int) -> ParallelDims:
    return ParallelDims.of(ModelAllocation.from_str(backend).parallel, **options)


def test_a_layout_becomes_axes():
    assert dims_of("archon:d6t2c4") == ParallelDims(dp_shard=6, cp=4, tp=2)
    dims = dims_of("archon:d6t2c4", num_replicas=3)
    assert (dims.dp_replicate, dims.dp_shard, dims.dp, dims.world_size) == (3, 2, 6, 48)


@pytest.mark.parametrize(
    ("backend", "ep", "etp", "efsdp"),
    [
        ("archon:d4e2", 2, 1, 2),
        ("archon:d2t2e4", 4, 1, 1),  # borrowed from t as well
        ("archon:d2t2c2e2", 2, 1, 4),
        ("archon:(attn:d4t2c2|ffn:t2e4)", 4, 2, 2),  # from d and c alone
        ("archon:(attn:d4t2|ffn:d4t2)", 1, 2, 4),
    ],
)
def test_experts_borrow_ranks(backend: str, ep: int, etp: int, efsdp: int):
    dims = dims_of(backend)
    assert (dims.ep, dims.etp, dims.efsdp) == (ep, etp, efsdp)
    assert dims.world_size == ModelAllocation.from_str(backend).world_size


@pytest.mark.parametrize(
    ("backend", "config", "fault"),
    [
        ("archon:d8e4", {}, None),
        ("archon:d3e3", {}, "num_experts .* multiple of 3, got 4"),
        ("archon:d7e1", {}, None),  # shards of whole experts, perhaps none on some ranks
        ("archon:d6e2", {}, "neither the 2 experts .* hidden_size of 32 .* over the 3 ranks"),
        ("archon:(attn:t2|ffn:t2)", {"moe_intermediate_size": 15}, "moe_intermediate_size .* 15"),
    ],
)
def test_experts_that_cannot_be_spread_are_refused(backend: str, config: dict, fault: str | None):
    args = get_model_spec("qwen3_moe").model_args_class.from_hf_config(
        tiny_config("qwen3_moe", **config)
    )
    if fault is None:
        check_layout(args, dims_of(backend))
        return
    with pytest.raises(ValueError, match=fault):
        check_layout(args, dims_of(backend))


@pytest.mark.parametrize(
    ("backend", "config", "fault"),
    [
        ("archon:t2", {}, None),
        ("archon:c4", {}, None),  # two ranks share each of 2 key-value heads
        ("archon:t2c2", {}, None),
        ("archon:t4", {}, "num_key_value_heads .* multiple of 4, got 2"),
        ("archon:t2", {"intermediate_size": 49}, "intermediate_size .* got 49"),
        ("archon:t2", {"vocab_size": 65}, "vocab_size .* got 65"),
        ("archon:c3", {}, "c3 cannot cut"),
        ("archon:c8", {}, "c8 cannot cut"),
        ("archon:t2c4", {}, "divide its 2 query and 1 key-value heads"),
        ("archon:d2e2", {}, "spreads experts, but this model has none"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(backend: str, config: dict, fault: str | None):
    hf = tiny_config("qwen3", **config)
    args = get_model_spec("qwen3").model_args_class.from_hf_config(hf)
    if fault is None:
        check_layout(args, dims_of(backend))
        return
    with pytest.raises(ValueError, match=fault):
        check_layout(args, dims_of(backend))
