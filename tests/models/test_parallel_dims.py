"""Layouts as numbers of ranks, and which models they can cut."""

from __future__ import annotations

import pytest
from tiny import tiny_config

from areal.api.alloc_mode import ModelAllocation
from areal.models import get_model_spec
from areal.models.parallel_dims import ParallelDims
from areal.models.parallelize import check_layout


def dims_of(backend: str, **options: int) -> ParallelDims:
    return ParallelDims.of(ModelAllocation.from_str(backend).parallel, **options)


def test_a_layout_becomes_axes():
    assert dims_of("archon:d6t2c4") == ParallelDims(dp_shard=6, cp=4, tp=2)
    dims = dims_of("archon:d6t2c4", num_replicas=3)
    assert (dims.dp_replicate, dims.dp_shard, dims.dp, dims.world_size) == (3, 2, 6, 48)


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
