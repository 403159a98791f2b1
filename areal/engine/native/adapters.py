"""LoRA adapters that a native engine serves: many in one batch, beside one copy of the weights.

    bank = AdapterBank(model)
    bank.add("mine", read_adapter(model, tensors, alpha=16))     # requests name it: lora_name
    bank.set_live(read_adapter(model, tensors, alpha=16))        # for requests that name none
    bank.begin(numbers_T)                                        # before a forward of T rows

Rows of one forward may have different adapters: each linear layer adds the product of its rows'
matrices, adapter by adapter, in whole tiles of rows, so that a row's bits do not depend on other
rows (torch_runner.py). An adapter has a number, which also separates what the cache keeps of it;
0 is the live one, or the plain model. Adapters of a run's versions are kept under versioned names,
`NAME-vVERSION`: a request that names one keeps it whatever is published meanwhile.

Whoever computes by kernels of its own reads the adapters from the bank (cuda/adapters.py). Where
none can be added by row (layers of experts, FP8, several ranks; weights that kernels apply to other
products), the live adapter is merged into the weights instead (`merged`), and none can be named.

Shape legend: T rows, D inputs, N outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

from areal.models.common.decoder import Decoder
from areal.models.lora_files import FILE_PREFIX
from areal.models.lora_merge import merged_weight
from areal.utils.device import CPU_TILE
from areal.utils.model_files import weight_files

LIVE = 0  # the number of requests that name no adapter
_KEPT_VERSIONS = 2  # besides those that requests still use
_MAX_KERNEL_RANK = 128  # one tile of the kernels (cuda/adapter_linear.py)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    matrices: dict[str, tuple[torch.Tensor, torch.Tensor]]  # A and B by Hugging Face layer name
    alpha: float
    version: int | None = None  # of the run that trains it

    def scaling(self, layer: str) -> float:
        return self.alpha / len(self.matrices[layer][0])


def read_adapter(
    model: Decoder,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    alpha: float,
    version: int | None = None,
) -> Adapter:
    """Of tensors under their names in peft's files; ValueError unless they fit the model."""
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        layer, found, matrix = name.removeprefix(FILE_PREFIX).rpartition(".lora_")
        if not found or matrix not in ("A.weight", "B.weight"):
            raise ValueError(f"adapter: {name} is no matrix A or B; only these can be served")
        halves.setdefault(layer, {})[matrix[0]] = tensor
    shapes = model.hf_shapes()
    for layer, pair in halves.items():
        _check_fit(layer, pair, shapes)
    weight = model.embedding_weight
    matrices = {
        layer: (pair["A"].to(weight, copy=True), pair["B"].to(weight, copy=True))
        for layer, pair in halves.items()
    }
    if weight.is_cuda:  # a runner reads them on a stream of its own
        torch.cuda.current_stream(weight.device).synchronize()
    return Adapter(matrices, alpha, version)


def _check_fit(
    layer: str, pair: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    shape = shapes.get(f"{layer}.weight")
    if shape is None or len(shape) != 2:
        raise ValueError(f"adapter: this model has no layer {layer}")
    if len(pair) < 2:
        raise ValueError(f"adapter: {layer} has one of its matrices A and B; expected both")
    a_RD, b_NR = pair["A"], pair["B"]
    is_pair = a_RD.dim() == b_NR.dim() == 2 and 0 < a_RD.shape[0] == b_NR.shape[1]
    if not is_pair or (b_NR.shape[0], a_RD.shape[1]) != shape:
        raise ValueError(
            f"adapter: A {list(a_RD.shape)} and B {list(b_NR.shape)} of {layer} do not fit its "
            f"weight {list(shape)}: it was trained for another model"
        )


class AdapterBank:
    """The adapters of one engine, by number and name."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._adapters: dict[int, Adapter] = {}
        self._numbers: dict[str, int] = {}
        self._num_added = 0
        self._layers: dict[str, AdaptedLinear] = {}  # by Hugging Face name
        self._groups: list[tuple[torch.Tensor | slice, Adapter]] = []  # of the present forward

    @property
    def names(self) -> list[str]:
        return sorted(self._numbers)

    def number_of(self, name: str) -> int:
        if not name:
            return LIVE
        if name not in self._numbers:
            known = ", ".join(self.names) or "none"
            raise ValueError(f"gconfig.lora_name: no adapter is called {name!r}; loaded: {known}")
        return self._numbers[name]

    def version_of(self, number: int) -> int | None:
        """The version that its tokens have whatever is live; None: the live one."""
        return None if number == LIVE else self._adapters[number].version

    @property
    def by_number(self) -> Mapping[int, Adapter]:
        return self._adapters

    def weight_of(self, layer: str) -> torch.Tensor:
        """Of a layer that `takes` lets through."""
        module = self._module(layer)
        assert isinstance(module, nn.Linear), f"{layer} was checked by `takes`"
        return module.weight

    def takes(self, adapter: Adapter, weights: frozenset[int] | None) -> bool:
        """Whether it can be computed by row: of plain linear layers, all on this rank, and among
        `weights`, those that have kernels (identities; None: any, of any rank)."""
        modules = [self._module(layer) for layer in adapter.matrices]
        rank = max((len(a_RD) for a_RD, _ in adapter.matrices.values()), default=0)
        if weights is not None and rank > _MAX_KERNEL_RANK:
            return False
        is_plain = self._model.share is None and not self._model.has_fp8_cache
        return is_plain and all(
            isinstance(module, nn.Linear)
            and module is not self._model.output
            and (weights is None or id(module.weight) in weights)
            for module in modules
        )

    def add(self, name: str, adapter: Adapter) -> None:
        if name in self._numbers:
            raise ValueError(f"lora_name: {name!r} is loaded already; unload it first")
        self._num_added += 1
        self._install(adapter)
        self._adapters[self._num_added] = adapter
        self._numbers[name] = self._num_added

    def remove(self, name: str) -> None:
        del self._adapters[self._numbers.pop(name)]

    def set_live(self, adapter: Adapter) -> None:
        self._install(adapter)
        self._adapters[LIVE] = adapter

    def clear_live(self) -> None:
        self._adapters.pop(LIVE, None)

    def live_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Matrices of the live adapter, under their names in peft's files."""
        if LIVE in self._adapters:
            for layer, (a_RD, b_NR) in self._adapters[LIVE].matrices.items():
                yield f"{FILE_PREFIX}{layer}.lora_A.weight", a_RD
                yield f"{FILE_PREFIX}{layer}.lora_B.weight", b_NR

    def keep_version(self, run: str, adapter: Adapter, in_use: set[int]) -> None:
        """Also as `RUN-vVERSION`; old versions of the run go, unless a request uses them."""
        name = f"{run}-v{adapter.version}"
        if name in self._numbers:  # published again, by a run that was resumed
            self._adapters[self._numbers[name]] = adapter
        else:
            self.add(name, adapter)
        versions = {
            self._adapters[number].version or 0: known
            for known, number in self._numbers.items()
            if known.startswith(f"{run}-v") and number not in in_use
        }
        for version in sorted(versions)[:-_KEPT_VERSIONS]:
            self.remove(versions[version])

    def begin(self, numbers_T: np.ndarray) -> None:
        """The adapters of the rows of the next forward."""
        used = [n for n in np.unique(numbers_T).tolist() if n in self._adapters]
        if len(used) == 1 and (numbers_T == used[0]).all():
            self._groups = [(slice(None), self._adapters[used[0]])]
            return
        device = self._model.embedding_weight.device
        self._groups = [
            (torch.from_numpy(_whole_tiles(np.flatnonzero(numbers_T == n))).to(device), adapter)
            for n in used
            if (adapter := self._adapters[n])
        ]

    def add_products(self, layer: str, x_TD: torch.Tensor, out_TN: torch.Tensor) -> None:
        for rows, adapter in self._groups:
            if layer in adapter.matrices:
                a_RD, b_NR = adapter.matrices[layer]
                low = F.linear(F.linear(x_TD[rows], a_RD), b_NR) * adapter.scaling(layer)
                # Repeated rows get the same value: written, not accumulated.
                out_TN[rows] = out_TN[rows] + low

    def _install(self, adapter: Adapter) -> None:
        for layer in adapter.matrices.keys() - self._layers.keys():
            linear = self._module(layer)
            assert isinstance(linear, nn.Linear), f"{layer} was checked by `takes`"
            parent, _, leaf = self._our_name(layer).rpartition(".")
            adapted = AdaptedLinear(linear, layer, self.add_products)
            setattr(self._model.get_submodule(parent), leaf, adapted)
            self._layers[layer] = adapted

    def _our_name(self, layer: str) -> str:
        name = self._model.adapter.from_hf_name(f"{layer}.weight")
        assert name is not None, f"{layer} is a layer of the model"
        return name.removesuffix(".weight")

    def _module(self, layer: str) -> nn.Module | None:
        """None for one expert of a stack."""
        if self._model.adapter.stack_index(f"{layer}.weight") is not None:
            return None
        return self._model.get_submodule(self._our_name(layer))


def _whole_tiles(rows: np.ndarray) -> np.ndarray:
    """Padded with the last row, because products treat a few rows differently than many."""
    return np.pad(rows, (0, -len(rows) % CPU_TILE), mode="edge")


class AdaptedLinear(nn.Linear):
    """Its state dict is that of the plain layer."""

    def __init__(
        self,
        linear: nn.Linear,
        layer: str,
        add_products: Callable[[str, torch.Tensor, torch.Tensor], None],
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate and fill another weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._layer, self._add_products = layer, add_products

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        out_TN = super().forward(x_TD)
        self._add_products(self._layer, x_TD, out_TN)
        return out_TN


def merged(adapter: Adapter, base: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the folder `base` that the adapter changes, with it, summed in float32."""
    wanted = {f"{layer}.weight": layer for layer in adapter.matrices}
    for file in weight_files(base):
        with safe_open(file, framework="pt") as tensors:
            for name in wanted.keys() & set(tensors.keys()):
                a_RD, b_NR = adapter.matrices[wanted[name]]
                yield name, merged_weight(tensors.get_tensor(name), a_RD, b_NR, adapter.alpha)
