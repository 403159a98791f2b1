"""Engines that train (archon, fsdp, megatron), and that generate (native, vllm, sglang)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from areal.api.alloc_mode import ModelAllocation

if TYPE_CHECKING:
    from areal.api.engine_api import TrainEngine

# Import paths, so that one engine's dependencies are not loaded for another.
TRAIN_ENGINES = {
    "archon": "areal.engine.train.archon.ArchonEngine",
    "fsdp": "areal.engine.train.fsdp.engine.FSDPEngine",
    "megatron": "areal.engine.train.megatron.engine.MegatronEngine",
}


def train_engine_path(backend: str) -> str:
    """The import path of the class that trains with `backend`, like `fsdp:d1`."""
    name = ModelAllocation.from_str(backend).backend
    if name not in TRAIN_ENGINES:
        raise ValueError(
            f"backend {backend!r} has no training engine here: use one of {list(TRAIN_ENGINES)}"
        )
    return TRAIN_ENGINES[name]


def train_engine_class(backend: str) -> type[TrainEngine]:
    module, _, class_name = train_engine_path(backend).rpartition(".")
    return getattr(importlib.import_module(module), class_name)
