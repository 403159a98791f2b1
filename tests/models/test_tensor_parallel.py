"""Which part of each weight a rank holds, without the other ranks."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_config, tiny_model

from areal.models.common.args import share_of
from areal.models.common.decoder import build_share
from areal.models.common.moe import MoE
from areal.models.common.tensor_parallel import Ranks, cut_dim
from areal.models.hf_io import check_hf_shapes


def shares(whole, size=2):
    """The models of all ranks; building and loading them needs no group."""
    for rank in range(size):
        share = build_share(type(whole), whole.args, Ranks(None, rank, size))
        for name, tensor in whole.named_hf_tensors():
            share.load_hf_tensor(name, tensor)
        yield share


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen2", {"tie_word_embeddings": False, "vocab_size": 63}),
        ("qwen3", {}),
        ("llama", {"num_key_value_heads": 4, "attention_bias": True}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("gemma3_text", {}),
        ("mistral", {}),
        ("deepseek_v2", {}),
        ("deepseek_v2", {"q_lora_rank": 9}),
    ],
)
def test_the_shares_are_the_whole(family, overrides):
    whole = tiny_model(family, **overrides)
    parts = [dict(share.named_parameters()) for share in shares(whole)]
    for name, parameter in whole.named_parameters():
        pieces, dim = [part[name] for part in parts], cut_dim(name)
        if dim is None:
            assert all(torch.equal(piece, parameter) for piece in pieces), name
        else:
            assert torch.equal(torch.cat(pieces, dim), parameter), name
            assert pieces[0].shape[dim] == -(-parameter.shape[dim] // 2), name


def test_a_tied_head_is_a_part_of_the_whole_embedding():
    whole = tiny_model(vocab_size=65)
    heads = [share.output_weight for share in shares(whole)]
    assert [len(head) for head in heads] == [33, 32]
    assert torch.equal(torch.cat(heads), whole.tok_embeddings.weight)


def test_shapes_are_checked_as_those_of_the_whole_model():
    whole = tiny_model()
    share = next(shares(whole))
    assert share.hf_shapes() == whole.hf_shapes()
    own = {name: tuple(tensor.shape) for name, tensor in share.named_hf_tensors()}
    with pytest.raises(ValueError, match=r"q_proj.weight is \[16, 32\], expected \[32, 32\]"):
        check_hf_shapes(share, own, source="a share")
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(ValueError, match=r"has shape \[32, 24\], expected \[32, 48\]"):
        share.load_hf_tensor(name, torch.zeros(32, 24))


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "message"),
    [
        ({}, 4, "over 4 ranks: num_key_value_heads .* got 2"),
        ({"intermediate_size": 49}, 2, "over 2 ranks: intermediate_size .* got 49"),
        ({"moe_intermediate_size": 15}, 2, "over 2 ranks: moe_intermediate_size .* got 15"),
    ],
)
def test_a_model_that_cannot_be_cut(overrides, num_ranks, message):
    with pytest.raises(ValueError, match=message):
        share_of(tiny_model("qwen3_moe", **overrides).args, num_ranks)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_experts_of_the_shares_add_up_to_the_whole(family):
    whole = tiny_model(family, first_k_dense_replace=0)
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    # What a rank has before it adds up: the sum needs a group.
    partial = [MoE.forward(share.layers["0"].feed_forward, x) for share in shares(whole)]
    torch.testing.assert_close(sum(partial), whole.layers["0"].feed_forward(x))


def test_args_of_a_share():
    args = share_of(tiny_model().args, 2)
    assert (args.n_heads, args.n_kv_heads, args.hidden_dim) == (2, 1, 24)
    assert args.vocab_size == tiny_config()["vocab_size"]
