"""Qwen3.5 (text), dense and mixture of experts: layers with the gated delta rule, and every few of
them one with gated attention, of which a part of each head is rotated. Experts stand beside a
shared one with a gate. With its vision tower it is in qwen3_5_vl.py.

Heads that predict further tokens (`mtp.*`) are neither computed nor trained: a saved model has them
as they were (`is_kept`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from areal.models.common.attention import Attend
from areal.models.common.decoder import Decoder, DecoderBlock
from areal.models.common.gated_layers import AttendOrRecur, GatedAttention, GatedDelta, Tensors
from areal.models.common.state_dict_adapter import (
    DELTA_FROM_HF,
    EXPERTS_FROM_HF,
    GATED_SHARED_EXPERT_FROM_HF,
    QK_NORM_DECODER_FROM_HF,
    StateDictAdapter,
)
from areal.models.family_args import Qwen35ModelArgs
from areal.models.spec import ModelSpec

_LANGUAGE_PREFIX = "model.language_model."
_IMAGE_PREFIX = "model.visual."
_KEPT_PREFIX = "mtp."

DECODER_FROM_HF: dict[str, str] = {
    **QK_NORM_DECODER_FROM_HF,
    **DELTA_FROM_HF,
    **EXPERTS_FROM_HF,
    **GATED_SHARED_EXPERT_FROM_HF,
}


def is_mtp_head(hf_name: str) -> bool:
    """Of the heads that predict further tokens."""
    return hf_name.startswith(_KEPT_PREFIX)


def unstacked(hf_name: str, shape: Sequence[int]) -> list[tuple[str, tuple[Any, ...]]]:
    """Published checkpoints stack the experts, and the rows of gate over those of up."""
    stem, _, leaf = hf_name.rpartition(".")
    if not stem.endswith(".mlp.experts") or len(shape) != 3 or is_mtp_head(hf_name):
        return [(hf_name, ())]
    rows = {"down_proj": {"down_proj": slice(None)}}
    half = shape[1] // 2
    rows["gate_up_proj"] = {"gate_proj": slice(half), "up_proj": slice(half, None)}
    return [
        (f"{stem}.{expert}.{name}.weight", (expert, part))
        for expert in range(shape[0])
        for name, part in rows.get(leaf, {}).items()
    ]


class Qwen35StateDictAdapter(StateDictAdapter):
    from_hf_map = DECODER_FROM_HF

    def usual_hf_name(self, hf_name: str) -> str:
        if hf_name.startswith(_LANGUAGE_PREFIX):
            return "model." + hf_name.removeprefix(_LANGUAGE_PREFIX)
        return hf_name

    def unfused(self, hf_name: str, shape: Sequence[int]) -> list[tuple[str, tuple[Any, ...]]]:
        return unstacked(hf_name, shape)

    def multimodal_hf_name(self, hf_name: str) -> str:
        if hf_name.startswith("model."):
            return _LANGUAGE_PREFIX + hf_name.removeprefix("model.")
        return hf_name

    def is_kept(self, hf_name: str) -> bool:
        return is_mtp_head(hf_name)

    def from_hf_name(self, hf_name: str) -> str | None:
        if hf_name.startswith(_IMAGE_PREFIX) or self.is_kept(hf_name):
            return None
        return super().from_hf_name(hf_name)


class HybridBlock(DecoderBlock):
    """A block whose attention, or what it has in place of it, ends with a gate."""

    def before(self, x_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> Tensors:
        """What is mixed over the sequence, and the gate of the result."""
        return self._layer.project(self.attention_norm(x_TD), cos_TR, sin_TR)

    def mix(self, attend: Attend, *projected: torch.Tensor) -> Tensors:
        *mixed, gate_TX = projected
        return self._layer.mix(cast(AttendOrRecur, attend), *mixed), gate_TX

    def after(
        self, x_TD: torch.Tensor, out_TNH: torch.Tensor, gate_TX: torch.Tensor
    ) -> torch.Tensor:
        x_TD = x_TD + self._layer.gated_output(out_TNH, gate_TX)
        return x_TD + self.feed_forward(self.ffn_norm(x_TD))

    @property
    def _layer(self) -> GatedAttention | GatedDelta:
        return cast("GatedAttention | GatedDelta", self.attention)


class Qwen35Model(Decoder):
    adapter_class = Qwen35StateDictAdapter
    block_class = HybridBlock


SPEC = ModelSpec(
    name="Qwen3.5",
    model_class=Qwen35Model,
    model_args_class=Qwen35ModelArgs,
    state_dict_adapter_class=Qwen35StateDictAdapter,
    supported_model_types=frozenset({"qwen3_5_text", "qwen3_5_moe_text"}),
)
