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

from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, TaskType, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from areal.models.lora import (
    FILE_PREFIX,
    base_model_keys,
    draw_adapter,
    load_adapter,
    save_adapter,
)
from areal.models.parallelize import whole

_ADAPTER = "default"  # peft's name for the only adapter; not part of names in files


class Adapters:
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

    def draw(self, seed: int) -> None:
        """Initialize as a no-op; equal on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        for layer in self._layers.values():
            draw_adapter(*_matrices(layer), generator)

    def merge(self, name: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The unsharded weight of checkpoint name `name` with its adapter, summed in float32."""
        layer = self._layers.get(name.removesuffix(".weight"))
        if layer is None:
            return whole(weight, dtype)
        a, b = (whole(matrix, torch.float32) for matrix in _matrices(layer))
        merged = whole(weight, torch.float32) + layer.scaling[_ADAPTER] * (b @ a)
        return merged.to(dtype)

    @torch.no_grad()
    def tensors(self, *, is_receiver: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the adapter's file, unsharded tensor) of trained weights, for the receiver."""
        for name, parameter in self._trained():
            tensor = whole(parameter, parameter.dtype)
            if is_receiver:
                yield name, tensor

    def save(
        self, tensors: Iterator[tuple[str, torch.Tensor]], folder: str | Path, base_model: str
    ) -> None:
        """adapter_config.json and adapter_model.safetensors, so that peft loads the folder."""
        save_adapter(tensors, folder)
        for key, value in base_model_keys(base_model).items():
            setattr(self.config, key, value)
        self.config.save_pretrained(str(folder))

    def load(self, folder: str | Path) -> None:
        """Load a folder that `save` or peft wrote."""
        what = f"rank {self.config.r} on {self.config.target_modules}"
        load_adapter(folder, dict(self._trained()), what)

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """By name in the adapter's file."""
        for name, parameter in self._hf.named_parameters():
            if parameter.requires_grad:
                yield FILE_PREFIX + name.replace(f".{_ADAPTER}.", "."), parameter


def _matrices(layer: LoraLayer) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    name = f"{_ADAPTER}.weight"
    return layer.lora_A.get_parameter(name), layer.lora_B.get_parameter(name)
