"""LoRA: low-rank matrices beside frozen weights, merged when weights are exported.

    adapters = Adapters(model, rank=32, alpha=16, target_modules=[])    # before sharding or loading
    adapters.draw(seed)                                                 # after materialisation
    adapters.merge(name, weight, dtype)      # unsharded weight with its adapter merged
    adapters.save(adapters.tensors(is_receiver=True), folder, base_model)

A fresh adapter is a no-op: one of its two matrices is zero. A critic's score head is trained in
full and saved beside the adapters. Files: lora_files.py.

Shape legend: T tokens, D inputs, N outputs, R rank.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from areal.models.common.lora_layers import ExpertLora, LoraLinear
from areal.models.common.moe import Experts
from areal.models.lora_files import ADAPTER_FILE, FILE_PREFIX, base_model_keys, write_peft_config
from areal.models.parallelize import whole, write_own_part

if TYPE_CHECKING:
    from areal.models.common.decoder import Decoder

_TOWER_MODULES = (
    r".*\b(visual|vision_tower|multi_modal_projector)\b.*"  # matches names of transformers' modules
)

Tensors = Iterator[tuple[str, torch.Tensor]]
PassOn = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained weight: its parameter, its name in the model, and those in the adapter's file: one
    per expert where it is a stack, else one."""

    parameter: torch.Tensor
    name: str
    files: list[str]
    is_stack: bool = False

    def of_file(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield from zip(self.files, tensor if self.is_stack else (tensor,), strict=True)

    @property
    def shape(self) -> torch.Size:
        """Of each tensor in the file."""
        return self.parameter.shape[1:] if self.is_stack else self.parameter.shape

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        own = self.parameter.detach()
        for index, name in enumerate(self.files):
            if self.is_stack:
                write_own_part(own, tensors[name][None], index)
            else:
                write_own_part(own, tensors[name])


class LoraAdapters(ABC):
    """The adapters of one model. What differs between our layers and peft's is abstract."""

    _layers: Mapping[str, Any]  # layers with an adapter, by the name that `merge` gets

    @abstractmethod
    def _matrices(self, layer: Any) -> tuple[nn.Parameter, nn.Parameter, float]:
        """A [R, D] and B [N, R] of a layer, and the factor on their product."""

    @abstractmethod
    def _trained(self) -> list[Trained]: ...

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
            bound = 1 / math.sqrt(a_RD.shape[-1])
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
    def tensors(self, *, is_receiver: bool, pass_on: PassOn | None = None) -> Tensors:
        """(name in the adapter's file, unsharded tensor) of trained weights, for the receiver.

        pass_on: (name in the model, tensor) -> on the receiver, the tensor of its owner; every rank
        calls it for every weight, in order.
        """
        for trained in self._trained():
            tensor = whole(trained.parameter, trained.parameter.dtype)
            if pass_on is not None:
                tensor = pass_on(trained.name, tensor)
            if is_receiver:
                yield from trained.of_file(tensor)

    def save(self, tensors: Tensors, folder: str | Path, base_model: str) -> None:
        """adapter_config.json and adapter_model.safetensors, so that peft loads the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors}
        save_file(on_cpu, folder / ADAPTER_FILE, metadata={"format": "pt"})
        self._write_config(folder, base_model_keys(base_model))

    def load(self, folder: str | Path) -> None:
        """Load a folder that `save` or peft wrote."""
        file = Path(folder) / ADAPTER_FILE
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} not found: with use_lora a saved model is the adapter alone"
            )
        trained, tensors = self._trained(), load_file(file)
        shapes = {name: one.shape for one in trained for name in one.files}
        odd = sorted(tensors.keys() ^ shapes.keys())
        odd += [name for name in shapes.keys() & tensors if shapes[name] != tensors[name].shape]
        if odd:
            differ = f"{', '.join(odd[:4])} differ{'s' if len(odd) == 1 else ''}"
            raise ValueError(f"{file} does not fit {self}: {differ}")
        for one in trained:
            one.write(tensors)


class Adapters(LoraAdapters):
    def __init__(
        self, model: Decoder, *, rank: int, alpha: float, target_modules: list[str]
    ) -> None:
        """`target_modules` are endings of Hugging Face module names (`q_proj`); empty: every linear
        layer of the decoder but the head, and no expert. A vision tower gets none."""
        self._model = model
        self._rank, self._alpha = rank, alpha
        model.requires_grad_(False)
        if model.score is not None:
            model.score.requires_grad_(True)
        chosen = _choose(_linear_layers(model), _expert_stacks(model), target_modules)
        self._targets = sorted({names[0].rpartition(".")[2] for names in chosen.values()})
        self._hf_names = chosen
        self._layers: dict[str, LoraLinear | ExpertLora] = {}  # by our name
        for name in chosen:
            parent, _, leaf = name.rpartition(".")
            owner = model.get_submodule(parent)
            if isinstance(owner, Experts):
                layer = ExpertLora(getattr(owner, leaf), rank=rank, alpha=alpha)
                owner.adapters[leaf] = layer
            else:
                linear = owner.get_submodule(leaf)
                assert isinstance(linear, nn.Linear), f"{name} was chosen among the linear layers"
                layer = LoraLinear(linear, rank=rank, alpha=alpha)
                setattr(owner, leaf, layer)
            self._layers[name] = layer

    def __str__(self) -> str:
        return f"rank {self._rank} on {', '.join(self._targets)}"

    def _matrices(self, layer: LoraLinear | ExpertLora) -> tuple[nn.Parameter, nn.Parameter, float]:
        return layer.lora_A, layer.lora_B, layer.scaling

    def _write_config(self, folder: Path, base_model: Mapping[str, str]) -> None:
        shape = {"r": self._rank, "lora_alpha": self._alpha, "target_modules": self._targets}
        is_critic = self._model.score is not None
        if self._model.tower is not None:  # its layers may have the same names
            shape["exclude_modules"] = _TOWER_MODULES
        write_peft_config(folder, {**base_model, **shape}, is_critic=is_critic)

    def _trained(self) -> list[Trained]:
        trained = []
        for name, layer in self._layers.items():
            is_stack = isinstance(layer, ExpertLora)
            for matrix in ("lora_A", "lora_B"):
                files = [f"{FILE_PREFIX}{hf}.{matrix}.weight" for hf in self._hf_names[name]]
                trained.append(Trained(getattr(layer, matrix), name, files, is_stack))
        if self._model.score is not None:
            files = [f"{FILE_PREFIX}score.weight"]
            trained.append(Trained(self._model.score.weight, "score.weight", files))
        return trained


def _linear_layers(model: Decoder) -> dict[str, list[str]]:
    """Our name -> [Hugging Face name] of every linear layer but the heads and a vision tower."""
    heads = (model.output, model.score)
    return {
        name: [model.adapter.module_name(f"{name}.weight").removesuffix(".weight")]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not any(module is head for head in heads)
        and not name.startswith("tower.")
    }


def _expert_stacks(model: Decoder) -> dict[str, list[str]]:
    """Our name of a stack of expert weights -> the Hugging Face names of its layers."""
    return {
        f"{name}.{leaf}": [
            model.adapter.to_hf_name(f"{name}.{leaf}", index).removesuffix(".weight")
            for index in range(len(weight))
        ]
        for name, module in model.named_modules()
        if isinstance(module, Experts)
        for leaf, weight in module.named_parameters()
    }


def _choose(
    layers: dict[str, list[str]], experts: dict[str, list[str]], targets: list[str]
) -> dict[str, list[str]]:
    if not targets:
        return layers
    named = {**layers, **experts}
    for target in targets:
        if not any(_ends_in(names[0], target) for names in named.values()):
            known = ", ".join(sorted({names[0].rpartition(".")[2] for names in named.values()}))
            raise ValueError(f"target_modules: no layer is called {target!r}; there are {known}")
    return {
        name: names
        for name, names in named.items()
        if any(_ends_in(names[0], target) for target in targets)
    }


def _ends_in(hf_name: str, target: str) -> bool:
    return hf_name == target or hf_name.endswith(f".{target}")
