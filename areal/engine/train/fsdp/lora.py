"""LoRA by peft: low-rank matrices beside frozen weights, merged when weights are exported.

    adapters = Adapters(hf, rank=32, alpha=16, target_modules=[], is_critic=False)   # on meta
    adapters.draw(seed)                  # after the model was materialised
    adapters.merge(name, weight, dtype)  # unsharded weight with its adapter merged
    adapters.save(adapters.tensors(is_receiver=True), folder, base_model)

A fresh adapter is a no-op: one of its two matrices is zero. A critic's score head is trained in
full and saved beside the adapters.

The only file that needs peft.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, TaskType, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from areal.models.lora import LoraAdapters, Trained
from areal.models.lora_files import FILE_PREFIX

_ADAPTER = "default"  # peft's name for the only adapter; not part of names in files


class Adapters(LoraAdapters):
    def __init__(
        self,
        hf: PreTrainedModel,
        *,
        rank: int,
        alpha: float,
        target_modules: list[str],
        dtype: torch.dtype,
        is_critic: bool,
    ) -> None:
        """`target_modules` are endings of module names (`q_proj`); empty: every linear layer.

        dtype: of the trained weights; frozen ones keep theirs.
        """
        self.config = LoraConfig(
            r=rank,
            lora_alpha=alpha,  # pyright: ignore[reportArgumentType]  # any number does
            target_modules=list(target_modules) or "all-linear",
            modules_to_save=["score"] if is_critic else None,
            task_type=TaskType.SEQ_CLS if is_critic else TaskType.CAUSAL_LM,
        )
        hf.requires_grad_(False)
        # peft would wrap `modules_to_save`; here they stay plain parameters.
        injected = LoraConfig(**{**self.config.to_dict(), "modules_to_save": None})
        try:
            inject_adapter_in_model(injected, hf, _ADAPTER, low_cpu_mem_usage=True)
        except ValueError as error:
            raise ValueError(f"target_modules: {error}") from error
        if is_critic:
            hf.score.requires_grad_(True)
        for parameter in hf.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        hf.eval()
        self._hf = hf
        self._layers: dict[str, LoraLayer] = {
            name: module for name, module in hf.named_modules() if isinstance(module, LoraLayer)
        }

    def __str__(self) -> str:
        return f"rank {self.config.r} on {self.config.target_modules}"

    def _matrices(self, layer: LoraLayer) -> tuple[nn.Parameter, nn.Parameter, float]:
        name = f"{_ADAPTER}.weight"
        a_RD, b_NR = layer.lora_A.get_parameter(name), layer.lora_B.get_parameter(name)
        return a_RD, b_NR, layer.scaling[_ADAPTER]

    def _trained(self) -> list[Trained]:
        return [
            Trained(parameter, name, [FILE_PREFIX + name.replace(f".{_ADAPTER}.", ".")])
            for name, parameter in self._hf.named_parameters()
            if parameter.requires_grad
        ]

    def _write_config(self, folder: Path, base_model: Mapping[str, str]) -> None:
        for key, value in base_model.items():
            setattr(self.config, key, value)
        self.config.save_pretrained(str(folder))
