"""Allocation strings: the documented examples, the documented errors, and a round trip."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.alloc_mode import (
    BACKENDS,
    AllocationMode,
    AllocationValidationError,
    InvalidAllocationModeError,
    ModelAllocation,
    ParallelStrategy,
)


@pytest.mark.parametrize(
    ("text", "world_size"),
    [
        ("native:d1", 1),
        ("sglang:d4t2", 8),
        ("sglang:d4p2t2", 16),
        ("vllm:d2t4p2", 16),
        ("fsdp:d4c2", 8),
        ("archon:d2p2e2", 4),
        ("archon:d8t2", 16),
        ("megatron:d4t2p2", 16),
        ("megatron:(attn:d1p12t4|ffn:d1p12e4)", 48),
        ("megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)", 32),
        ("sglang:d4+fsdp:d4", 8),
        ("vllm:d2t4+megatron:d2p2t1", 12),
        ("sglang[rollout]:d2+fsdp[actor]:d4+fsdp[critic]:d4", 10),
        ("sglang[rollout]:d2+fsdp[actor]:d4|fsdp[critic]:d4", 6),
        ("sglang:d4p2t2+megatron:(attn:d2p2t2c2|ffn:d2p2t2e2)", 32),
    ],
)
def test_documented_examples_have_their_world_size(text: str, world_size: int) -> None:
    assert AllocationMode.from_str(text).world_size == world_size


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("d8", {"actor": {"backend": "fsdp:d8"}}),
        (
            "sglang:d12p1t1+d4p1t1",
            {"rollout": {"backend": "sglang:d12"}, "actor": {"backend": "fsdp:d4"}},
        ),
        (
            "vllm:d2t4+d2p2e2",
            {"rollout": {"backend": "vllm:d2t4"}, "actor": {"backend": "archon:d2p2e2"}},
        ),
        (
            "native[rollout]:d2+fsdp[actor]:d4|fsdp[critic]:d4",
            {
                "rollout": {"backend": "native:d2"},
                "actor": {"backend": "fsdp:d4"},
                "critic": {
                    "backend": "fsdp:d4",
                    "scheduling_strategy": {"type": "colocation", "target": "actor"},
                },
            },
        ),
        (
            "native:d2|archon[actor]:d2",
            {
                "rollout": {
                    "backend": "native:d2",
                    "scheduling_strategy": {"type": "colocation", "target": "actor"},
                },
                "actor": {"backend": "archon:d2"},
            },
        ),
    ],
)
def test_a_string_sets_the_back_ends_of_sections(text: str, sections: dict) -> None:
    assert AllocationMode.from_str(text).sections() == sections


def test_two_parts_of_one_section_need_names() -> None:
    with pytest.raises(AllocationValidationError, match="second part for actor"):
        AllocationMode.from_str("fsdp:d4+archon:d4").sections()


def test_dimensions_in_any_order_with_spaces() -> None:
    allocation = ModelAllocation.from_str(" fsdp [ actor ] : t2 d4 c 3 ")
    assert allocation.backend == "fsdp"
    assert allocation.name == "actor"
    assert allocation.role == "training"
    assert allocation.parallel == ParallelStrategy(
        data_parallel_size=4, tensor_parallel_size=2, context_parallel_size=3
    )


def test_hybrid_lays_experts_out_on_the_same_devices() -> None:
    parallel = ModelAllocation.from_str("megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)").parallel
    assert parallel.world_size == 32
    assert parallel.expert_parallel_size == 2
    assert parallel.expert_tensor_parallel_size == 4
    assert parallel.expert_data_parallel_size == 2


def test_hybrid_derives_the_data_size_of_experts() -> None:
    given = ModelAllocation.from_str("megatron:(attn:d4t2|ffn:d4e2)")
    assert ModelAllocation.from_str("megatron:(attn:d4t2|ffn:e2)") == given


def test_colocated_engine_adds_no_devices() -> None:
    mode = AllocationMode.from_str("fsdp[actor]:d4|fsdp[critic]:d2t2")
    actor, critic = mode.allocations
    assert (actor.world_size, critic.world_size, mode.world_size) == (4, 0, 4)
    assert critic.colocated_with == "actor"


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("", ValueError, "backend:dims"),
        ("fsdp", ValueError, "backend:dims"),
        ("fsdp:", ValueError, "backend:dims"),
        ("fsdpp:d4", ValueError, "unknown backend 'fsdpp'"),
        ("fsdp:x4", ValueError, "unknown dimension 'x'"),
        ("sglang:d4c2", ValueError, "unknown dimension 'c'"),
        ("fsdp:d0", ValueError, "positive number"),
        ("fsdp:d", ValueError, "positive number"),
        ("fsdp:4", ValueError, "positive number"),
        ("fsdp:d2d4", ValueError, "given twice"),
        ("fsdp[]:d2", ValueError, "backend:dims"),
        ("sglang:d4+d4x2", ValueError, "unknown dimension 'x'"),
        ("vllm:d4+[actor]:d4", ValueError, "'[actor]:d4'"),
        ("sglang:d4+", ValueError, "''"),
        ("megatron:(attn:d2)", ValueError, "(attn:DIMS|ffn:DIMS)"),
        ("megatron:(attn:d2e2|ffn:d2)", ValueError, "unknown dimension 'e'"),
        ("megatron:(attn:d2|ffn:c2)", ValueError, "unknown dimension 'c'"),
        ("fsdp:d4p2", AllocationValidationError, "pipeline"),
        ("fsdp:d2e2", AllocationValidationError, "expert"),
        ("fsdp:(attn:d2|ffn:e2)", AllocationValidationError, "archon or megatron"),
        ("archon:d2e3", AllocationValidationError, "does not divide"),
        ("archon:(attn:d4t2|ffn:t4)", AllocationValidationError, "ffn takes t1 or t2"),
        ("archon:(attn:d4|ffn:t2e2)", AllocationValidationError, "ffn takes t1, whole experts"),
        ("fsdp:d4|fsdp:d4", AllocationValidationError, "needs a name"),
        ("sglang:d2+fsdp:d4+megatron:d8", AllocationValidationError, "needs a name"),
        ("fsdp[a]:d4+fsdp[a]:d4", AllocationValidationError, "unique"),
        ("megatron:(attn:d4p2|ffn:e4)", AllocationValidationError, "pipeline size"),
        ("megatron:(attn:d4t2|ffn:d4e4)", InvalidAllocationModeError, "8 and 16"),
        ("megatron:(attn:d4|ffn:e3)", InvalidAllocationModeError, "same devices"),
        ("sglang:d4|fsdp[actor]:d8", InvalidAllocationModeError, "equal world sizes"),
    ],
)
def test_mistakes_say_what_is_wrong(text: str, error: type[ValueError], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        AllocationMode.from_str(text)
    assert type(caught.value) is error
    assert says in str(caught.value)


def test_one_engine_string_takes_one_engine() -> None:
    with pytest.raises(ValueError, match="several engines"):
        ModelAllocation.from_str("sglang:d4+fsdp:d4")


_sizes = st.integers(1, 16)


@st.composite
def _engines(draw: st.DrawFn, name: str | None) -> ModelAllocation:
    backend = draw(st.sampled_from(sorted(BACKENDS)))
    sizes = {"data_parallel_size": draw(_sizes), "tensor_parallel_size": draw(_sizes)}
    if backend != "fsdp":
        sizes["pipeline_parallel_size"] = draw(_sizes)
    if BACKENDS[backend][0] == "training":
        sizes["context_parallel_size"] = draw(_sizes)
    if backend in ("archon", "megatron"):
        # Experts are cut along sizes that divide a stage's ranks by construction.
        sizes["expert_parallel_size"] = draw(st.sampled_from([1, sizes["data_parallel_size"]]))
        sizes["expert_tensor_parallel_size"] = draw(
            st.sampled_from([1, sizes["tensor_parallel_size"]])
        )
    return ModelAllocation(backend, ParallelStrategy(**sizes), name)


@given(st.data())
def test_text_and_allocation_are_the_same_thing(data: st.DataObject) -> None:
    named = data.draw(st.integers(1, 4))
    names = [f"engine_{i}" for i in range(named)] if named >= 3 else [None] * named
    engines = tuple(data.draw(_engines(name)) for name in names)
    mode = AllocationMode(engines)
    assert AllocationMode.from_str(str(mode)) == mode
    assert mode.world_size == sum(engine.parallel.world_size for engine in engines)


@given(st.text(alphabet="dtpce0123456789:+|()[]fsdpattn ", max_size=30))
def test_any_text_parses_or_is_a_value_error(text: str) -> None:
    try:
        mode = AllocationMode.from_str(text)
    except ValueError:
        return
    assert AllocationMode.from_str(str(mode)) == mode
