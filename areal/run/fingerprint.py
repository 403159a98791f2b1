"""Which facts identify a run, and which affect the bits of its steps?

`numeric_world`: what the bits of a training step depend on besides config, weights and data.

`run_identity`: the values that must not change between two starts (models and their shape, roles,
algorithm, data); a recover point of another run is refused, key by key. Rates, clips and
coefficients may change.

`RandomStates`: the process-wide random generators, part of a recover point because user code may
draw from them. The trainers do not: row order, sampling and initial weights are functions of the
seed.
"""

from __future__ import annotations

import base64
import random
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from areal import __version__
from areal.api.config.train_engine import TrainEngineConfig

if TYPE_CHECKING:
    from areal.api.config.experiment import BaseExperimentConfig


def numeric_world() -> dict[str, Any]:
    """JSON values by name. Thread count and CPU ISA change float summation order."""
    on_gpu = torch.cuda.is_available()
    return {
        "areal": __version__,
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


# Config sections with a model; each trainer's config has some of them.
_ROLES = ("actor", "critic", "ref", "teacher")

_LORA_KEYS = ("use_lora", "lora_rank", "target_modules")
_ALGORITHM_KEYS = (
    "importance_sampling_level",
    "use_sapo_loss",
    "use_cispo_loss",
    "use_decoupled_loss",
    "loss_type",
)


def trainer_name(config: BaseExperimentConfig) -> str:
    """The value of `trainer`, which each experiment class fixes to its own name."""
    return _values(config)["trainer"]


def run_identity(config: BaseExperimentConfig, dataset_size: int) -> dict[str, Any]:
    """JSON values by dotted config key."""
    identity: dict[str, Any] = {"trainer": trainer_name(config), "seed": config.seed}
    identity |= {f"train_dataset.{k}": v for k, v in _values(config.train_dataset).items()}
    identity["rows of train_dataset"] = dataset_size
    for role, section in _values(config).items():
        if role not in _ROLES or section is None:
            continue
        values = _values(section)
        keys = ["path", *(key for key in _ALGORITHM_KEYS if key in values)]
        if isinstance(section, TrainEngineConfig):
            keys += _LORA_KEYS if section.use_lora else ()
            if section.optimizer is not None:
                identity[f"{role}.optimizer.type"] = section.optimizer.type
        identity |= {f"{role}.{key}": values[key] for key in keys}
    return identity


def _values(section: Any) -> dict[str, Any]:
    return {f.name: getattr(section, f.name) for f in fields(section)}


class RandomStates:
    """Generator states of Python, numpy and torch, as JSON values."""

    def state_dict(self) -> dict[str, Any]:
        # It is a tuple: a dict only with legacy=False.
        kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
        return {
            "python": random.getstate(),
            "numpy": [kind, keys.tolist(), *rest],
            "torch": _encode(torch.get_rng_state()),
            "cuda": [_encode(state) for state in torch.cuda.get_rng_state_all()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(_decode(state["torch"]))
        # A run may resume with another number of devices.
        for device, text in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(_decode(text), device)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
