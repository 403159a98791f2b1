"""Which rank holds which layers of a pipeline."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_config

from areal.models.hf_io import build_model
from areal.models.pipeline import cut_stage
from areal.models.stage_layout import StageLayout

SCHEDULES = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


def sizes(*args, **options) -> list[int]:
    return [len(layers) for layers in StageLayout.of(*args, **options).layers]


def test_the_ends_have_fewer_layers_for_the_embedding_and_the_head():
    assert sizes(30, num_ranks=4, schedule="1F1B") == [7, 8, 8, 7]
    assert sizes(28, num_ranks=4, schedule="1F1B") == [7, 7, 7, 7]
    assert sizes(4, num_ranks=2, schedule="Interleaved1F1B") == [1, 1, 1, 1]
    assert sizes(31, num_ranks=2, schedule="1F1B", embedding_layers=0, head_layers=5) == [18, 13]
    assert sizes(14, num_ranks=2, schedule="Interleaved1F1B", layers_per_stage=2) == [
        *(1, 2, 2, 2, 2, 2, 2, 1)
    ]


def test_a_v_comes_back_to_the_first_rank():
    layout = StageLayout.of(6, num_ranks=2, schedule="ZBVZeroBubble")
    assert [layout.stages_of(rank) for rank in range(2)] == [[0, 3], [1, 2]]
    assert layout.layers == (range(0, 1), range(1, 3), range(3, 5), range(5, 6))
    owners = {"tok_embeddings.weight": 0, "norm.weight": 0, "score.weight": 0}
    owners |= {"layers.0.ffn_norm.weight": 0, "layers.4.attention.wq.bias": 1}
    assert {name: layout.owner_of(name) for name in owners} == owners
    loop = StageLayout.of(6, num_ranks=2, schedule="Interleaved1F1B")
    assert [loop.stages_of(rank) for rank in range(2)] == [[0, 2], [1, 3]]
    assert loop.owner_of("output.weight") == 1


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"num_ranks": 4, "schedule": "Interleaved1F1B"}, "8 stages, some of 0 layers"),
        ({"num_ranks": 2, "schedule": "1F1B", "head_layers": 7}, "pp_last_stage_less_layers"),
        ({"num_ranks": 2, "schedule": "1F1B", "layers_per_stage": 2}, "4 stages .* needs 1 on"),
        (
            {"num_ranks": 2, "schedule": "Interleaved1F1B", "layers_per_stage": 3},
            "pp_layers_per_stage=3 makes 3 stages .* needs 2 or more on each of 2",
        ),
    ],
)
def test_a_cut_that_cannot_be_is_refused(options: dict, fault: str):
    with pytest.raises(ValueError, match=fault):
        StageLayout.of(6, **options)


@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(0, 40))
def test_each_layer_is_in_one_stage_and_stages_are_even(schedule, num_ranks, more_layers):
    n_layers = 2 * num_ranks + more_layers
    layout = StageLayout.of(n_layers, num_ranks=num_ranks, schedule=schedule)
    assert [layer for stage in layout.layers for layer in stage] == list(range(n_layers))
    spread = [len(stage) for stage in layout.layers]
    assert max(spread) - min(spread) <= 2
    for index, stage in enumerate(layout.layers):
        owners = {layout.owner_of(f"layers.{layer}.ffn_norm.weight") for layer in stage}
        assert owners == {layout.rank_of(index)}


def test_stages_one_after_another_are_the_model():
    with torch.device("meta"):
        model = build_model(
            tiny_config("qwen3", num_hidden_layers=4), device="meta", dtype=torch.float32
        )
    first = cut_stage(model, range(0, 1), is_first=True, is_last=False)
    last = cut_stage(model, range(1, 4), is_first=False, is_last=True)
    last.to_empty(device="cpu")
    assert [name for name, w in model.named_parameters() if w.is_meta] == [
        name for name, _ in first.named_parameters()
    ]
    assert set(dict(last.named_parameters())) - set(dict(model.named_parameters())) == {
        "output.weight"  # the copy of the tied head
    }
    assert model.holds("model.layers.3.mlp.up_proj.weight")
    assert not model.holds("model.embed_tokens.weight") and not model.holds("lm_head.weight")
