"""Packed attention for Hugging Face models, registered with transformers under a name of its own.

    hf = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION)
    attend = PackedAttention(cu_seqlens, max_seqlen)
    hf(input_ids=tokens_T[None], position_ids=attend.positions_T[None], attend=attend)

A model made with this name asks for no mask and calls `packed_attention` in every layer; the
keyword `attend` travels through transformers' keyword arguments and knows where sequences begin, so
that none sees another. What a layer asks for and `attend` does not compute is refused, not ignored.

Shape legend: T packed tokens, N query heads, K key-value heads, H head dim.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from areal.models.common.attention import Attend

PACKED_ATTENTION = "areal_packed"

# Arguments of transformers' attention functions that change the result, beside those we compute.
_NOT_COMPUTED = ("softcap", "s_aux", "position_bias")


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, N, T, H]
    key: torch.Tensor,  # [1, K, T, H]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attend: Attend | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`[1, T, N, H]`, as transformers' attention functions return it."""
    if attend is None or attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} does not hand keyword arguments to its attention, so it "
            "cannot be trained on packed sequences: use another model"
        )
    asked = [name for name in _NOT_COMPUTED if options.get(name) is not None]
    if asked:
        raise ValueError(
            f"{type(module).__name__} needs {', '.join(asked)} in its attention, which packed "
            "attention does not compute: use another model"
        )
    q_TNH, k_TKH, v_TKH = (x[0].transpose(0, 1) for x in (query, key, value))
    layer = cast(int, module.layer_idx)
    out_TNH = attend(layer, q_TNH, k_TKH, v_TKH, window=sliding_window, scale=scaling)
    return out_TNH[None], None


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)
