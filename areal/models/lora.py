"""LoRA: low-rank matrices beside frozen weights, merged when weights are exported.

    adapters = Adapters(model, rank=32, alpha=16, target_modules=[])    # before sharding or loading
    adapters.draw(seed)                                                 # after materialisation
    adapters.merge(name, weight, dtype)      # unsharded weight with its adapter merged
    adapters.save(adapters.tensors(is_receiver=True), folder, base_model)

A fresh adapter is a no-op: one of its two matrices is zero. A critic's score head is trained in
full and saved beside the adapters. Files have peft's format, with Hugging Face names; peft itself
is not needed.

Shape legend: T tokens, D inputs, N outputs, R rank.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from areal.models.parallelize import whole, write_own_part
from areal.utils.hub import hub_name

if TYPE_CHECKING:
    from areal.models.common.decoder import Decoder

_FILE = "adapter_model.safetensors"
_CONFIG_FILE = "adapter_config.json"
FILE_PREFIX = "base_model.model."

Tensors = Iterator[tuple[str, torch.Tensor]]


class LoraAdapters(ABC):
    """The adapters of one model. What differs between our layers and peft's is abstract."""

    _layers: Mapping[str, Any]  # layers with an adapter, by the name that `merge` gets

    @abstractmethod
    def _matrices(self, layer: Any) -> tuple[nn.Parameter, nn.Parameter, float]:
        """A [R, D] and B [N, R] of a layer, and the factor on their product."""

    @abstractmethod
    def _trained(self) -> dict[str, nn.Parameter]:
        """By name in the adapter's file."""

    @abstractmethod
    def _write_config(self, folder: Path, base_model: Mapping[str, str]) -> None:
        """adapter_config.json; `base_model` are its keys that name the base model."""

    @abstractmethod
    def __str__(self) -> str:
        """Rank and target modules, for errors."""

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Initialize as a no-op, A random and B zero; equal on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        for layer in self._layers.values():
            a_RD, b_NR, _ = self._matrices(layer)
            bound = 1 / math.sqrt(a_RD.shape[1])
            drawn = torch.empty(a_RD.shape, device="cpu")
            drawn.uniform_(-bound, bound, generator=generator)
            write_own_part(a_RD.detach(), drawn)
            b_NR.detach().zero_()

    def merge(self, name: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The unsharded weight `name` with its adapter, summed in float32."""
        layer = self._layers.get(name.removesuffix(".weight"))
        if layer is None:
            return whole(weight, dtype)
        *matrices, scaling = self._matrices(layer)
        a_RD, b_NR = (whole(matrix, torch.float32) for matrix in matrices)
        return (whole(weight, torch.float32) + scaling * (b_NR @ a_RD)).to(dtype)

    @torch.no_grad()
    def tensors(self, *, is_receiver: bool) -> Tensors:
        """(name in the adapter's file, unsharded tensor) of trained weights, for the receiver."""
        for name, parameter in self._trained().items():
            tensor = whole(parameter, parameter.dtype)
            if is_receiver:
                yield name, tensor

    def save(self, tensors: Tensors, folder: str | Path, base_model: str) -> None:
        """adapter_config.json and adapter_model.safetensors, so that peft loads the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors}
        save_file(on_cpu, folder / _FILE, metadata={"format": "pt"})
        self._write_config(folder, _base_model_keys(base_model))

    def load(self, folder: str | Path) -> None:
        """Load a folder that `save` or peft wrote."""
        file = Path(folder) / _FILE
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} not found: with use_lora a saved model is the adapter alone"
            )
        own, tensors = self._trained(), load_file(file)
        odd = sorted(tensors.keys() ^ own.keys())
        odd += [name for name in own.keys() & tensors if own[name].shape != tensors[name].shape]
        if odd:
            differ = f"{', '.join(odd[:4])} differ{'s' if len(odd) == 1 else ''}"
            raise ValueError(f"{file} does not fit {self}: {differ}")
        for name, parameter in own.items():
            write_own_part(parameter.detach(), tensors[name])


class LoraLinear(nn.Linear):
    """Its state dict is that of the plain layer, so the model's checkpoints fit unchanged."""

    def __init__(self, linear: nn.Linear, *, rank: int, alpha: float) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate and fill another weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scaling = alpha / rank
        like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, **like))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, rank, **like))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        out_TN = super().forward(x_TD)
        return out_TN + F.linear(F.linear(x_TD, self.lora_A), self.lora_B) * self.scaling

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name in ("weight", "bias"):
            tensor = getattr(self, name)
            if tensor is not None:
                destination[prefix + name] = tensor if keep_vars else tensor.detach()


class Adapters(LoraAdapters):
    def __init__(
        self, model: Decoder, *, rank: int, alpha: float, target_modules: list[str]
    ) -> None:
        """`target_modules` are endings of Hugging Face module names (`q_proj`); empty: every linear
        layer but the head."""
        self._model = model
        self._rank, self._alpha = rank, alpha
        model.requires_grad_(False)
        if model.score is not None:
            model.score.requires_grad_(True)
        chosen = _choose(_linear_layers(model), target_modules)
        self._targets = sorted({hf_name.rpartition(".")[2] for hf_name in chosen.values()})
        self._layers: dict[str, LoraLinear] = {}  # by our name
        self._hf_names = chosen
        for name in chosen:
            parent, _, leaf = name.rpartition(".")
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear), f"{name} was chosen among the linear layers"
            layer = LoraLinear(linear, rank=rank, alpha=alpha)
            setattr(model.get_submodule(parent), leaf, layer)
            self._layers[name] = layer

    def __str__(self) -> str:
        return f"rank {self._rank} on {', '.join(self._targets)}"

    def _matrices(self, layer: LoraLinear) -> tuple[nn.Parameter, nn.Parameter, float]:
        return layer.lora_A, layer.lora_B, layer.scaling

    def _write_config(self, folder: Path, base_model: Mapping[str, str]) -> None:
        is_critic = self._model.score is not None
        config = {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if is_critic else "CAUSAL_LM",
            **base_model,
            "r": self._rank,
            "lora_alpha": self._alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": self._targets,
            "modules_to_save": ["score"] if is_critic else None,
            "inference_mode": True,
        }
        (folder / _CONFIG_FILE).write_text(json.dumps(config, indent=2), encoding="utf-8")

    def _trained(self) -> dict[str, nn.Parameter]:
        trained = {}
        for name, layer in self._layers.items():
            for matrix in ("lora_A", "lora_B"):
                file_name = f"{FILE_PREFIX}{self._hf_names[name]}.{matrix}.weight"
                trained[file_name] = getattr(layer, matrix)
        if self._model.score is not None:
            trained[f"{FILE_PREFIX}score.weight"] = self._model.score.weight
        return trained


def _base_model_keys(base_model: str) -> dict[str, str]:
    """A folder, or a hub name with its revision."""
    name = hub_name(base_model)
    if name is None:
        return {"base_model_name_or_path": base_model}
    revision = {} if name.revision is None else {"revision": name.revision}
    return {"base_model_name_or_path": name.repo, **revision}


def _linear_layers(model: Decoder) -> dict[str, str]:
    """Our name -> Hugging Face name of every linear layer but the heads."""
    heads = (model.output, model.score)
    return {
        name: model.adapter.to_hf_name(f"{name}.weight").removesuffix(".weight")
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not any(module is head for head in heads)
    }


def _choose(layers: dict[str, str], targets: list[str]) -> dict[str, str]:
    if not targets:
        return layers
    for target in targets:
        if not any(_ends_in(hf_name, target) for hf_name in layers.values()):
            known = ", ".join(sorted({hf_name.rpartition(".")[2] for hf_name in layers.values()}))
            raise ValueError(f"target_modules: no layer is called {target!r}; there are {known}")
    return {
        name: hf_name
        for name, hf_name in layers.items()
        if any(_ends_in(hf_name, target) for target in targets)
    }


def _ends_in(hf_name: str, target: str) -> bool:
    return hf_name == target or hf_name.endswith(f".{target}")
