"""Fingerprint of a run: the values that must not change between two starts.

Models and their shape, roles, algorithm, data; a recover point of another run is refused, key by
key. Rates, clips and coefficients may change. Loads no torch: `areal check` reads it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from areal.api.config.train_engine import TrainEngineConfig

if TYPE_CHECKING:
    from areal.api.config.experiment import BaseExperimentConfig

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
