"""Reads a config: argv -> `Source` -> checked keys -> interpolated values -> dataclasses."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from areal.api.config.build import build, check_keys, with_defaults
from areal.api.config.errors import ConfigError
from areal.api.config.experiment import BaseExperimentConfig, PPOConfig, SFTConfig
from areal.api.config.preference import DPOConfig, RWConfig
from areal.api.config.source import Source, read_source
from areal.api.secret_text import without_secrets

Config = TypeVar("Config", bound=BaseExperimentConfig)

# The `trainer` key of a file -> the class of its root.
EXPERIMENTS: dict[str, type[BaseExperimentConfig]] = {
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "rw": RWConfig,
    "dpo": DPOConfig,
}


def load_expr_config(argv: list[str], cls: type[Config]) -> tuple[Config, str]:
    """The config that `argv` describes, and the path of its file.

    `argv`: `[script.py] --config FILE | FILE`, then `key=value` overrides. Raises ConfigError.
    """
    source = read_source(list(argv))
    return _load(source, cls), source.path


def experiment_class(argv: list[str]) -> type[BaseExperimentConfig]:
    """The class to load `argv` with: its file says `trainer: ppo` (the default), `sft`, ..."""
    source = read_source(list(argv))
    kind = source.tree.get("trainer", "ppo")
    if not isinstance(kind, str) or kind not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise source.error(("trainer",), f"trainer must be one of {known}, got {kind!r}")
    return EXPERIMENTS[kind]


def dump_yaml(config: BaseExperimentConfig) -> str:
    """The whole config, defaults included, as a file that loads to an equal one, less secrets."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(without_secrets(dataclasses.asdict(config))))


def _load(source: Source, cls: type[Config]) -> Config:
    check_keys(cls, source.tree, source)
    tree = _interpolate(with_defaults(cls, source.tree), source)
    check_keys(cls, tree, source)  # again: `${...}` may have brought in a whole section
    return build(cls, tree, source)


def _interpolate(tree: dict[str, Any], source: Source) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        reason = str(error).strip().splitlines()[0]
        raise source.error(tuple(key.split(".")), f"{key}: {reason}") from None
    except RecursionError:
        raise ConfigError(f"{source.path}: ${{...}} references go round in a circle") from None
