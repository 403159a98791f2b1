"""FlashInfer's attention over our cache, and what happens where it cannot run."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from paged_world import make_paged_world, relative_error

from areal.engine.native.cuda import prefill_attention as module
from areal.engine.native.cuda.prefill_attention import flashinfer_prefill

TOLERANCE = 1e-2  # weights are rounded to bfloat16 before they meet the values


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(12, 2, 128, 16), (28, 4, 128, 16), (14, 2, 64, 16)])
def test_chunks_attend_to_what_lies_before_them(shape, device):
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    num_heads, num_kv_heads, head_dim, page_size = shape
    chunks = [(0, 700), (0, 1), (333, 250), (1000, 17), (64, 64), (1999, 1)]  # position, rows
    first_position_C, num_rows_C = np.array(chunks).T
    world = make_paged_world(
        (first_position_C + num_rows_C).tolist(),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=torch.bfloat16,
        device=device,
    )
    keys, values = world.keys.nan_to_num(0.0), world.values.nan_to_num(0.0)  # as PagedCache begins
    q_TNH = torch.randn(num_rows_C.sum(), num_heads, head_dim, dtype=torch.bfloat16, device=device)
    out_TNH = torch.full_like(q_TNH, float("nan"))
    prefill = flashinfer_prefill(keys, num_heads)
    prefill.plan(num_rows_C, first_position_C, world.table_SP[:-1].cpu().numpy())
    prefill.attend(q_TNH, keys, values, out_TNH)
    places = [(c, start + i) for c, (start, rows) in enumerate(chunks) for i in range(rows)]
    wanted = [world.attend(q_TNH[t], chunk, at + 1) for t, (chunk, at) in enumerate(places)]
    assert relative_error(out_TNH, torch.stack(wanted)) < TOLERANCE


@pytest.mark.gpu
def test_a_plan_waits_for_the_one_before_it(device):
    """The host runs ahead of the device: what a plan has written must not be written over."""
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    world = make_paged_world(
        [400, 90], num_kv_heads=2, head_dim=128, page_size=16, dtype=torch.bfloat16, device=device
    )
    keys, values = world.keys.nan_to_num(0.0), world.values.nan_to_num(0.0)
    prefill, table = flashinfer_prefill(keys, 12), world.table_SP.cpu().numpy()
    queries = [torch.randn(n, 12, 128, dtype=torch.bfloat16, device=device) for n in (400, 90)]
    torch.cuda._sleep(200_000_000)
    outputs = []
    for chunk, q_TNH in enumerate(queries):
        outputs.append(torch.empty_like(q_TNH))
        prefill.plan(np.array([len(q_TNH)]), np.zeros(1, np.int64), table[chunk : chunk + 1])
        prefill.attend(q_TNH, keys, values, outputs[-1])
    for chunk, (q_TNH, out_TNH) in enumerate(zip(queries, outputs, strict=True)):
        wanted = torch.stack([world.attend(q_NH, chunk, t + 1) for t, q_NH in enumerate(q_TNH)])
        assert relative_error(out_TNH, wanted) < TOLERANCE


def test_without_a_cuda_device_it_is_not_taken():
    assert flashinfer_prefill(torch.zeros(4, 2, 16, 64, dtype=torch.bfloat16), 4) is None


def test_an_installation_that_cannot_run_is_named_and_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(module, "_may_run", lambda keys: True)
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # importing it fails
    with caplog.at_level("WARNING"):
        assert flashinfer_prefill(torch.zeros(4, 2, 16, 64), 4) is None
    assert "FlashInfer is installed but not used" in caplog.text
