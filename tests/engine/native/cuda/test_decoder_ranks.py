"""The fused decoder cut over two processes computes what it computes in one."""

from __future__ import annotations

import multiprocessing
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny import tiny_config, tiny_model, write_tiny_model

from areal.models.common.tensor_parallel import Ranks
from areal.models.hf_io import build_model, load_hf

OPTIONS = {"head_dim": 16, "vocab_size": 65, "attention_bias": True}
WAIT_S = 900

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="two ranks need two devices; here they share the CPU"
)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_two_ranks_compute_what_one_does(family, tmp_path):
    folder = write_tiny_model(tmp_path / "model", family, **OPTIONS)
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    ranks = [
        spawn.Process(
            target=run_rank,
            args=(rank, str(tmp_path / "store"), family, folder, results),
            daemon=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    hidden_TD, many_TV, few_TV = forward(tiny_model(family, **OPTIONS))
    for process in ranks:
        process.join(WAIT_S)
    assert [process.exitcode for process in ranks] == [0, 0]
    found = [results.get() for _ in ranks]
    assert found[0] == found[1]  # to the last bit: all ranks draw the same tokens
    for mine, theirs in zip((hidden_TD, many_TV, few_TV), found[0], strict=True):
        torch.testing.assert_close(torch.tensor(theirs), mine, atol=2e-5, rtol=1e-5)


def run_rank(rank, store, family, folder, results) -> None:
    runpy.run_path(str(Path(__file__).with_name("conftest.py")))  # turns the interpreter on
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = build_model(
        tiny_config(family, **OPTIONS),
        device="cpu",
        dtype=torch.float32,
        ranks=Ranks.of(dist.group.WORLD),
    )
    load_hf(model, folder)
    results.put([tensor.tolist() for tensor in forward(model)])
    dist.destroy_process_group()


@torch.inference_mode()
def forward(model):
    """Hidden states and logits of a few tokens; attention is left out, each head is by itself."""
    from areal.engine.native.cuda.decoder import FusedDecoder, Rows
    from areal.engine.native.cuda.paged_cache import PagedCache

    decoder = FusedDecoder(model, PagedCache(model, num_pages=4, page_size=4))
    assert decoder.can_run_few(3) == (model.share is None)
    positions = torch.arange(10, dtype=torch.int32)
    rows = Rows(positions + 3, positions, positions)
    hidden_TD = decoder.forward(rows, lambda layer, q_TNH, out_TNH: out_TNH.copy_(q_TNH))
    return hidden_TD, decoder.logits(hidden_TD), decoder.logits(hidden_TD[:3])
