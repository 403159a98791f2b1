"""Qwen3.5 with its vision tower, dense and mixture of experts: the layers of qwen3_5.py with
interleaved M-RoPE, and the tower of Qwen3-VL (vision/qwen3_vl.py) without deepstack.

Heads that predict further tokens (`mtp.*`) are kept as they were, as without images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal.models.common.decoder import Decoder
from areal.models.common.state_dict_adapter import StateDictAdapter, below
from areal.models.family_args import Qwen35VLModelArgs
from areal.models.qwen3_5 import DECODER_FROM_HF, HybridBlock, is_mtp_head, unstacked
from areal.models.qwen3_vl import TOWER_FROM_HF
from areal.models.spec import ModelSpec
from areal.models.vision.qwen3_vl import Qwen3VLTower


class Qwen35VLStateDictAdapter(StateDictAdapter):
    from_hf_map = {
        **below("model.language_model.", DECODER_FROM_HF),
        **{theirs: ours for theirs, ours in TOWER_FROM_HF.items() if "deepstack" not in theirs},
    }

    def unfused(self, hf_name: str, shape: Sequence[int]) -> list[tuple[str, tuple[Any, ...]]]:
        return unstacked(hf_name, shape)

    def is_kept(self, hf_name: str) -> bool:
        return is_mtp_head(hf_name)

    def from_hf_name(self, hf_name: str) -> str | None:
        return None if self.is_kept(hf_name) else super().from_hf_name(hf_name)


class Qwen35VLModel(Decoder):
    adapter_class = Qwen35VLStateDictAdapter
    block_class = HybridBlock
    tower_class = Qwen3VLTower


SPEC = ModelSpec(
    name="Qwen3.5 (vision)",
    model_class=Qwen35VLModel,
    model_args_class=Qwen35VLModelArgs,
    state_dict_adapter_class=Qwen35VLStateDictAdapter,
    supported_model_types=frozenset({"qwen3_5", "qwen3_5_moe"}),
)
