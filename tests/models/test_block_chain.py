"""Blocks that run in a chain compute what the blocks themselves do."""

import pytest
import torch
from tiny import tiny_model
from torch._dynamo.utils import counters

from areal.models.common.attention import PackedAttention
from areal.models.parallelize import chain_blocks, checkpoint_blocks, compile_blocks


def train_once(model, lengths):
    """Hidden states of sequences with these lengths, and all gradients."""
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    attend = PackedAttention(bounds, max(lengths))
    hidden_TD = model(torch.arange(int(bounds[-1])), attend.positions_T, attend)
    model.zero_grad()
    hidden_TD.square().sum().backward()
    grads = {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}
    return hidden_TD.detach(), grads


# Plain, with windows and two rotations, with recurrent states.
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "qwen3_5_text"])
def test_a_chain_computes_what_its_blocks_do(family):
    model = tiny_model(family, num_hidden_layers=3)
    expected = train_once(model, [7, 12])
    chain_blocks(model)
    assert model.chain is not None
    with torch.compiler.set_stance("force_eager"):
        found = train_once(model, [7, 12])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_a_compiled_chain_has_one_program_for_all_blocks_and_lengths():
    model = tiny_model("qwen3", num_hidden_layers=4)
    cases = [[7, 12], [5, 20, 3]]
    expected = [train_once(model, lengths) for lengths in cases]
    torch.compiler.reset()
    counters.clear()
    compile_blocks(model)
    chain_blocks(model)
    found = [train_once(model, lengths) for lengths in cases]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    # Those of the first and of the last half, and one between blocks.
    assert counters["stats"]["unique_graphs"] == 3


def test_a_hook_sees_its_block():
    model = tiny_model("qwen3", num_hidden_layers=2)
    chain_blocks(model)
    seen = []
    model.layers["0"].register_forward_hook(lambda *_: seen.append("output"))
    train_once(model, [5])
    assert seen == ["output"]


def test_blocks_with_experts_or_recomputed_as_a_whole_are_not_chained():
    sparse, recomputed = tiny_model("qwen3_moe"), tiny_model("qwen3")
    checkpoint_blocks(recomputed, "full", selective_option="op", compiled=True)
    for model in (sparse, recomputed):
        chain_blocks(model)
        assert model.chain is None
