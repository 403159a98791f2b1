"""The fused decoder of a model with experts, and with dense layers among them, is the module."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model

from areal.engine.native.cuda.decoder import FusedDecoder, Rows
from areal.engine.native.cuda.paged_cache import PagedCache

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
