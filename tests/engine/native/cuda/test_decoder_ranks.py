"""The fused decoder cut over two processes computes what it computes in one."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from tiny import tiny_config, tiny_model, write_tiny_model

from areal.models.common.tensor_parallel import Ranks
from areal.models.hf_io import build_model, load_hf

_DENSE = {"head_dim": 16, "vocab_size": 65, "attention_bias": True}
FAMILIES = {
    "llama": _DENSE,
    "qwen3_moe": _DENSE,
    "deepseek_v2": {"vocab_size": 65, "q_lora_rank": 10},
}

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="two ranks need two devices; here they share the CPU"
)


def test_two_ranks_compute_what_one_does(tmp_path):
    for family, options in FAMILIES.items():
        write_tiny_model(tmp_path / family, family, **options)
    found = run_ranks(2, "engine.native.cuda.test_decoder_ranks:rank_computes", str(tmp_path))
    assert found[0] == found[1]  # to the last bit: all ranks draw the same tokens
    for family, options in FAMILIES.items():
        for mine, theirs in zip(
            forward(tiny_model(family, **options)), found[0][family], strict=True
        ):
            torch.testing.assert_close(torch.tensor(theirs), mine, atol=2e-5, rtol=1e-5)


def rank_computes(folder: str) -> dict[str, list[Any]]:
    """By family, what `forward` returns."""
    runpy.run_path(str(Path(__file__).with_name("conftest.py")))  # turns the interpreter on
    found = {}
    for family, options in FAMILIES.items():
        model = build_model(
            tiny_config(family, **options),
            device="cpu",
            dtype=torch.float32,
            ranks=Ranks.of(dist.group.WORLD),
        )
        load_hf(model, Path(folder) / family)
        found[family] = [tensor.tolist() for tensor in forward(model)]
    return found


@torch.inference_mode()
def forward(model):
    """Hidden states and logits of a few tokens; attention is left out, each head is by itself."""
    from areal.engine.native.cuda.decoder import FusedDecoder, Rows
    from areal.engine.native.cuda.paged_cache import PagedCache

    decoder = FusedDecoder(model, PagedCache(model, num_pages=4, page_size=4))
    assert decoder.can_run_few(3) == (model.share is None and model.args.latent is None)
    positions = torch.arange(10, dtype=torch.int32)
    rows = Rows(positions + 3, positions, positions)
    hidden_TD = decoder.forward(rows, lambda _, q, out: out.copy_(q[..., : out.shape[-1]]))
    return hidden_TD, decoder.logits(hidden_TD), decoder.logits(hidden_TD[:3])
