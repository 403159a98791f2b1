"""Random LoRA adapters of a model, and the model that each is meant to be."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch

from areal.models.common.decoder import Decoder

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def adapter_tensors(
    model: Decoder, seed: int, rank: int, *targets: str, scale: float = 0.3
) -> dict[str, torch.Tensor]:
    """Under their names in peft's files, for layers whose name ends so; none of experts."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in model.hf_shapes().items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in targets and ".experts." not in layer:
            for matrix, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                drawn = torch.randn(size, generator=generator)
                tensors[f"{layer}.lora_{matrix}.weight"] = scale * drawn
    return tensors


def merged_model(model: Decoder, tensors: Mapping[str, torch.Tensor], alpha: float) -> Decoder:
    """A copy of the plain model with the adapter in its weights, summed in float64."""
    merged = copy.deepcopy(model)
    for name, a_RD in tensors.items():
        layer, is_a, _ = name.partition(".lora_A")
        if is_a:
            weight = model.get_parameter(model.adapter.from_hf_name(f"{layer}.weight"))
            low = tensors[f"{layer}.lora_B.weight"].double() @ a_RD.double() * (alpha / len(a_RD))
            merged.load_hf_tensor(f"{layer}.weight", (weight.cpu().double() + low).float())
    return merged
