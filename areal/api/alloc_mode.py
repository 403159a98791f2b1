"""Allocation strings: which engine, with which parallel layout, over how many devices.

One engine:   backend ("[" name "]")? ":" dims      `fsdp:d4t2`, `archon[actor]:d2p2e2`
dims:         a letter and a positive number each, in any order; 1 by default
              d data, t tensor, p pipeline, and for training c context, e expert
world size:   d * t * p * c; the e expert ranks are taken from d * c * t
hybrid MoE:   `megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)`, a second layout for the experts, same world
              (archon: t of ffn is 1 or that of attn; without ffn experts are not sharded over t)
several:      `A+B` on separate devices, `A|B` colocated (binds tighter; equal world sizes);
              `vllm:d4+d4`: dims alone train with fsdp, or with archon if there is p or e

Whitespace is ignored. Text that does not parse is a ValueError, a layout that an engine does not
support an AllocationValidationError, colocated parts of different world sizes an
InvalidAllocationModeError; the last two are ValueErrors too. `from_str(str(x)) == x` always.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

Role = Literal["inference", "training"]

# backend -> (role, letters it accepts)
BACKENDS: dict[str, tuple[Role, str]] = {
    "native": ("inference", "dtp"),
    "sglang": ("inference", "dtp"),
    "vllm": ("inference", "dtp"),
    "archon": ("training", "dtpce"),
    "fsdp": ("training", "dtpce"),
    "megatron": ("training", "dtpce"),
}
_HYBRID_BACKENDS = ("archon", "megatron")
_DIM_NAMES = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}

_ENGINE = re.compile(r"(?P<backend>[A-Za-z]\w*)(\[(?P<name>[A-Za-z_][\w-]*)\])?:(?P<dims>.+)", re.A)
_HYBRID = re.compile(r"\(attn:(?P<attn>\w+)\|ffn:(?P<ffn>\w+)\)", re.A)
_DIM = re.compile(r"([a-z])([1-9][0-9]{0,5})", re.A)
_BARE = re.compile(r"([a-z][1-9][0-9]{0,5})+", re.A)
_COMBINE = re.compile(r"[+|](?![^(]*\))")  # not the bar inside a hybrid's parentheses


class AllocationValidationError(ValueError):
    """The text is well formed, but the engine does not support this layout."""


class InvalidAllocationModeError(ValueError):
    """Two colocated parts have different world sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelStrategy:
    """How one model is sharded. Each field is a number of ranks."""

    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        return self._ranks_per_stage * self.pipeline_parallel_size

    @property
    def expert_data_parallel_size(self) -> int:
        """Replicas of each expert: ranks of a pipeline stage / (expert x expert-tensor ranks)."""
        return self._ranks_per_stage // (
            self.expert_parallel_size * self.expert_tensor_parallel_size
        )

    @property
    def _ranks_per_stage(self) -> int:
        return self.data_parallel_size * self.context_parallel_size * self.tensor_parallel_size

    def __str__(self) -> str:
        if self.expert_tensor_parallel_size == 1:
            return self._dims() + _dim("e", self.expert_parallel_size)
        experts = (
            f"d{self.expert_data_parallel_size}"
            + _dim("t", self.expert_tensor_parallel_size)
            + _dim("p", self.pipeline_parallel_size)
            + _dim("e", self.expert_parallel_size)
        )
        return f"(attn:{self._dims()}|ffn:{experts})"

    def _dims(self) -> str:
        return (
            f"d{self.data_parallel_size}"
            + _dim("t", self.tensor_parallel_size)
            + _dim("p", self.pipeline_parallel_size)
            + _dim("c", self.context_parallel_size)
        )


@dataclass(frozen=True, slots=True)
class ModelAllocation:
    """One engine of a run: its backend, its layout, and the engine it is colocated with."""

    backend: str
    parallel: ParallelStrategy
    name: str | None = None
    colocated_with: str | None = None  # name (or backend) of the engine whose devices it uses

    @classmethod
    def from_str(cls, text: str) -> ModelAllocation:
        """`"fsdp:d4t2"` -> one allocation."""
        compact = _without_spaces(text)
        if _COMBINE.search(compact):
            raise ValueError(
                f"{text!r} names several engines where one is expected; give each engine its own "
                "backend string, like 'archon:d1'"
            )
        return _parse_engine(compact)

    @property
    def role(self) -> Role:
        return BACKENDS[self.backend][0]

    @property
    def world_size(self) -> int:
        """Devices it adds to the run: 0 if colocated with another engine."""
        return 0 if self.colocated_with else self.parallel.world_size

    def __str__(self) -> str:
        label = f"[{self.name}]" if self.name else ""
        return f"{self.backend}{label}:{self.parallel}"


@dataclass(frozen=True, slots=True)
class AllocationMode:
    """All engines of a run in one string, in the order written."""

    allocations: tuple[ModelAllocation, ...]

    @classmethod
    def from_str(cls, text: str) -> AllocationMode:
        """`"sglang:d4+fsdp:d4"` -> two allocations."""
        parts = _COMBINE.split(_without_spaces(text))
        separators = _COMBINE.findall(_without_spaces(text))
        allocations: list[ModelAllocation] = []
        anchor: ModelAllocation | None = None
        for separator, part in zip(["+", *separators], parts, strict=True):
            allocation = _parse_engine(_with_trainer(part) if _BARE.fullmatch(part) else part)
            if separator == "|":
                assert anchor is not None
                allocation = _colocate(allocation, anchor)
            else:
                anchor = allocation
            allocations.append(allocation)
        _check_names(allocations)
        return cls(tuple(allocations))

    def sections(self) -> dict[str, dict[str, object]]:
        """Section of a config file -> its keys. A name is a section; without one inference is
        `rollout`, and training `actor`."""
        found: dict[str, dict[str, object]] = {}
        for allocation in self.allocations:
            role = _section_of(allocation)
            if role in found:
                raise AllocationValidationError(
                    f"{str(allocation)!r} is the second part for {role}: name the sections, like "
                    f"{allocation.backend}[critic]:{allocation.parallel}"
                )
            found[role] = {"backend": f"{allocation.backend}:{allocation.parallel}"}
        for allocation in self.allocations:
            if allocation.colocated_with is not None:
                anchor = next(a for a in self.allocations if _label(a) == allocation.colocated_with)
                role, target = _section_of(allocation), _section_of(anchor)
                if target == "rollout":  # a server shares the devices of a model, not a model its
                    role, target = target, role
                found[role]["scheduling_strategy"] = {"type": "colocation", "target": target}
        return found

    @property
    def world_size(self) -> int:
        """Devices of the whole run."""
        return sum(allocation.world_size for allocation in self.allocations)

    def __str__(self) -> str:
        text = ""
        for allocation in self.allocations:
            separator = "|" if allocation.colocated_with else "+"
            text += f"{separator}{allocation}" if text else str(allocation)
        return text


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _dim(letter: str, size: int) -> str:
    return f"{letter}{size}" if size != 1 else ""


def _with_trainer(dims: str) -> str:
    """`d4t2` -> `fsdp:d4t2`; archon where fsdp does not take the letters."""
    sizes = _parse_dims(dims, BACKENDS["archon"][1], dims)
    is_plain = sizes.get("p", 1) == sizes.get("e", 1) == 1
    return f"fsdp:{dims}" if is_plain else f"archon:{dims}"


def _parse_engine(text: str) -> ModelAllocation:
    match = _ENGINE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"cannot read {text!r}: expected backend:dims, like 'archon:d1' or 'fsdp:d4t2'"
        )
    backend = match["backend"]
    if backend not in BACKENDS:
        raise ValueError(
            f"unknown backend {backend!r} in {text!r}: known are {', '.join(BACKENDS)}"
        )
    dims = match["dims"]
    if dims.startswith("("):
        parallel = _parse_hybrid(backend, dims, text)
    else:
        parallel = _strategy(_parse_dims(dims, BACKENDS[backend][1], text))
    _check_layout(backend, parallel, text)
    return ModelAllocation(backend, parallel, match["name"])


def _parse_dims(dims: str, allowed: str, text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    position = 0
    while position < len(dims):
        match = _DIM.match(dims, position)
        if match is None:
            raise ValueError(
                f"cannot read {dims[position:]!r} in {text!r}: expected a letter and a positive "
                "number, like d4t2"
            )
        letter, size = match.groups()
        if letter not in allowed:
            known = ", ".join(f"{x} ({_DIM_NAMES[x]})" for x in allowed)
            raise ValueError(f"unknown dimension {letter!r} in {text!r}: this part takes {known}")
        if letter in sizes:
            raise ValueError(f"dimension {letter!r} is given twice in {text!r}")
        sizes[letter] = int(size)
        position = match.end()
    return sizes


def _strategy(sizes: dict[str, int]) -> ParallelStrategy:
    return ParallelStrategy(**{f"{_DIM_NAMES[x]}_parallel_size": n for x, n in sizes.items()})


def _parse_hybrid(backend: str, dims: str, text: str) -> ParallelStrategy:
    match = _HYBRID.fullmatch(dims)
    if match is None:
        raise ValueError(f"cannot read {dims!r} in {text!r}: expected (attn:DIMS|ffn:DIMS)")
    if backend not in _HYBRID_BACKENDS:
        raise AllocationValidationError(
            f"{backend} cannot shard experts apart from attention ({text!r}): use "
            f"{' or '.join(_HYBRID_BACKENDS)}"
        )
    attention = _strategy(_parse_dims(match["attn"], "dtpc", text))
    experts = _parse_dims(match["ffn"], "dtpe", text)
    stages = experts.get("p", 1)
    if stages != attention.pipeline_parallel_size:
        raise AllocationValidationError(
            f"attn and ffn must have the same pipeline size in {text!r}, got "
            f"p{attention.pipeline_parallel_size} and p{stages}"
        )
    cut = experts.get("t", 1) * experts.get("e", 1)
    expert_world = cut * stages * experts.get("d", 1)
    same = expert_world == attention.world_size
    if "d" not in experts:
        same = attention.world_size % expert_world == 0  # d follows from the rest
    if not same:
        raise InvalidAllocationModeError(
            f"attn and ffn must use the same devices in {text!r}, got world sizes "
            f"{attention.world_size} and {expert_world}"
        )
    return replace(
        attention,
        expert_parallel_size=experts.get("e", 1),
        expert_tensor_parallel_size=experts.get("t", 1),
    )


def _check_layout(backend: str, parallel: ParallelStrategy, text: str) -> None:
    if backend == "fsdp" and parallel.pipeline_parallel_size > 1:
        raise AllocationValidationError(
            f"fsdp has no pipeline parallelism ({text!r}): remove p, or use archon or megatron"
        )
    if backend == "fsdp" and parallel.expert_parallel_size > 1:
        raise AllocationValidationError(
            f"fsdp has no expert parallelism ({text!r}): remove e, or use archon or megatron"
        )
    ranks = parallel.world_size // parallel.pipeline_parallel_size
    if ranks % (parallel.expert_parallel_size * parallel.expert_tensor_parallel_size):
        raise AllocationValidationError(
            f"e{parallel.expert_parallel_size} does not divide d*c*t = {ranks} in {text!r}: "
            "experts are spread over those ranks"
        )

    if backend == "archon":
        check_expert_tensor_parallel(parallel)


def check_expert_tensor_parallel(parallel: ParallelStrategy) -> None:
    """Experts of our own models are unsharded, or sharded over t like the rest."""
    own, tensor = parallel.expert_tensor_parallel_size, parallel.tensor_parallel_size
    if own not in (1, tensor):
        choices = "t1" if tensor == 1 else f"t1 or t{tensor}"
        raise AllocationValidationError(
            f"archon cannot shard experts over t{own} in {str(parallel)!r}: ffn takes {choices}, "
            "whole experts or the t of attn"
        )


def check_num_experts(expert_parallel_size: int, num_experts: int) -> None:
    """`num_experts` of the model's config.json; 0 when it has none."""
    if num_experts == 0:
        raise AllocationValidationError(
            "the layout spreads experts, but this model has none: write it without e and ffn"
        )
    if num_experts % expert_parallel_size:
        raise AllocationValidationError(
            f"e{expert_parallel_size} cannot spread this model: num_experts of its config.json "
            f"must be a multiple of {expert_parallel_size}, got {num_experts}; choose another e"
        )


def check_equal_stages(
    pipeline_parallel_size: int, stages_per_rank: int, num_hidden_layers: int
) -> None:
    """megatron-core's stages have equal length; `num_hidden_layers` is the model's."""
    num_stages = pipeline_parallel_size * stages_per_rank
    if num_hidden_layers % num_stages:
        several = f" with megatron.virtual_pipeline_parallel_size {stages_per_rank}"
        raise AllocationValidationError(
            f"p{pipeline_parallel_size}{several if stages_per_rank > 1 else ''} cannot cut this "
            f"model: num_hidden_layers of its config.json must be a multiple of {num_stages}, got "
            f"{num_hidden_layers}; choose another p{' or size' if stages_per_rank > 1 else ''}"
        )


def _colocate(allocation: ModelAllocation, anchor: ModelAllocation) -> ModelAllocation:
    if allocation.name is None:
        raise AllocationValidationError(
            f"{str(allocation)!r} shares the devices of {str(anchor)!r} and needs a name, like "
            f"'{allocation.backend}[critic]:{allocation.parallel}'"
        )
    if allocation.world_size != anchor.world_size:
        raise InvalidAllocationModeError(
            f"engines that share devices must have equal world sizes, got {str(anchor)!r} with "
            f"{anchor.world_size} and {str(allocation)!r} with {allocation.world_size}"
        )
    return replace(allocation, colocated_with=_label(anchor))


def _label(allocation: ModelAllocation) -> str:
    return allocation.name or allocation.backend


def _section_of(allocation: ModelAllocation) -> str:
    return allocation.name or ("rollout" if allocation.role == "inference" else "actor")


def _check_names(allocations: list[ModelAllocation]) -> None:
    names = [allocation.name for allocation in allocations]
    if len(allocations) >= 3 and None in names:
        unnamed = next(str(a) for a in allocations if a.name is None)
        raise AllocationValidationError(
            f"with three or more engines each needs a name, {unnamed!r} has none; write "
            "backend[name]:dims"
        )
    given = [name for name in names if name]
    twice = next((name for name in given if given.count(name) > 1), None)
    if twice:
        raise AllocationValidationError(f"two engines are named {twice!r}: names must be unique")
