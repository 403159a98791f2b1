"""What the bits of a training step depend on besides config, weights and data.

What makes a run the same run: a recover point of another one is refused, key by key.

Models and their shape, roles, algorithm and data may not change between two starts. Rates, clips
and coefficients may.

The random generators of the process, which code of users may draw from: part of a recover point.

The trainers themselves draw nothing from them: order of rows, sampling and initial weights are
functions of the seed.
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
    """JSON values by name. Sums are cut by threads and rounded by the instructions there are."""
    on_gpu = torch.cuda.is_available()
    return {
        "areal": __version__,
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


# Sections that name a model; a trainer's config has some of them.
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
    """`trainer`, which each kind of experiment declares with its own name as the one choice."""
    return _values(config)["trainer"]


def run_identity(config: BaseExperimentConfig, dataset_size: int) -> dict[str, Any]:
    """JSON values by the key they are written under."""
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
    """Python's, numpy's and torch's, as JSON values."""

    def state_dict(self) -> dict[str, Any]:
        # A dict only with legacy=False.
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
        # A run may go on with another number of devices.
        for device, text in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(_decode(text), device)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
