"""The fused decoder of a model with experts, and with dense layers among them, is the module."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model

from areal.engine.native.cuda.decoder import FusedDecoder, Rows
from areal.engine.native.cuda.feed_forward import ExpertLayer
from areal.engine.native.cuda.linear import Products
from areal.engine.native.cuda.paged_cache import PagedCache
from areal.engine.native.cuda.routing import router_arrivals
from areal.engine.native.cuda.skinny_linear import SkinnyWorkspace

OPTIONS = {"head_dim": 16, "num_hidden_layers": 3, "mlp_only_layers": [1]}
VARIANT = {"norm_topk_prob": False, "num_experts": 6, "num_experts_per_tok": 3}


@torch.inference_mode()
def check(model, num_rows, device):
    """Attention is left out: each head keeps its queries."""
    decoder = FusedDecoder(model, PagedCache(model, num_pages=8, page_size=4))
    positions = torch.arange(num_rows, dtype=torch.int32, device=device)
    rows = Rows(positions + 3, positions, positions)
    forward = decoder.forward_few if decoder.can_run_few(num_rows) else decoder.forward
    found_TD = forward(rows, lambda layer, q_TNH, out_TNH: out_TNH.copy_(q_TNH))
    expected_TD = model(rows.tokens_T, positions, lambda layer, q_TNH, *_, **__: q_TNH)
    torch.testing.assert_close(found_TD, expected_TD, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("num_rows", "overrides"), [(1, {}), (4, VARIANT), (5, VARIANT), (19, {})])
def test_computes_what_the_module_does(num_rows, overrides, device):
    """Up to four rows have kernels of their own."""
    check(tiny_model("qwen3_moe", **OPTIONS, **overrides).to(device), num_rows, device)


@pytest.mark.parametrize("num_rows", [2, 10])
def test_weights_loaded_by_name_are_read_by_the_kernels(num_rows, device):
    model = tiny_model("qwen3_moe", **OPTIONS).to(device)
    check(model, num_rows, device)
    for name, tensor in tiny_model("qwen3_moe", seed=1, **OPTIONS).named_hf_tensors():
        model.load_hf_tensor(name, tensor.to(device))
    check(model, num_rows, device)


@pytest.mark.parametrize(("num_rows", "by"), [(3, "small"), (40, "cublas")])
@torch.inference_mode()
def test_a_gated_shared_feed_forward_is_added_to_the_experts(num_rows, by, device):
    """As hybrids have it, also after a weight is loaded where the kernels read."""
    model = tiny_model("qwen3_5_moe_text").to(device)
    moe = next(iter(model.blocks)).feed_forward
    layer = ExpertLayer(moe, model.args.activation, 0, router_arrivals(device), None)
    products = Products(by, SkinnyWorkspace.make(device), torch.float32)
    x_TD = torch.randn(num_rows, model.args.dim, generator=torch.Generator().manual_seed(0))
    x_TD = x_TD.to(device)
    experts_TLK = torch.empty(num_rows, 1, moe.router.top_k, dtype=torch.int32, device=device)
    moe.shared_gate.weight.mul_(20)  # gates from nearly 0 to nearly 1
    alone_TD, shared = moe(x_TD), moe.shared
    for scale in (1.0, -3.0):
        shared.w1.weight.mul_(scale)
        found_TKD = layer.forward(x_TD, experts_TLK, products)
        torch.testing.assert_close(found_TKD.sum(1), moe(x_TD), atol=1e-5, rtol=1e-4)
    moe.shared = None
    assert (moe(x_TD) - alone_TD).abs().max() > 1e-3  # what is shared matters
