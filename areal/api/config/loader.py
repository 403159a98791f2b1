"""Reads a config: argv -> `Source` -> checked keys -> interpolated values -> dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any, TypeVar, cast

from areal.api.config.build import build, check_keys, with_defaults
from areal.api.config.effects import idle_keys
from areal.api.config.errors import ConfigError
from areal.api.config.experiment import BaseExperimentConfig, PPOConfig
from areal.api.config.offline import DPOConfig, RWConfig, SFTConfig
from areal.api.config.source import KeyPath, Source, read_source
from areal.api.redact import without_secrets

Config = TypeVar("Config", bound=BaseExperimentConfig)

logger = logging.getLogger("areal.Config")

# The `trainer` key of a file -> the class of its root.
EXPERIMENTS: dict[str, type[BaseExperimentConfig]] = {
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "rw": RWConfig,
    "dpo": DPOConfig,
}


_OF_ACTOR = "; that is an algorithm, chosen by keys of actor: trainer: ppo with "
# What is no trainer, and how it is written.
_ALGORITHMS = {
    "grpo": _OF_ACTOR + "reward_norm {mean_level: group, std_level: group}, and no critic",
    "dr_grpo": _OF_ACTOR + "reward_norm {mean_level: group, std_level: null}",
    "rloo": _OF_ACTOR + "reward_norm {mean_level: group, mean_leave1out: true, std_level: null}",
    "gspo": _OF_ACTOR + "importance_sampling_level: sequence",
    "dapo": _OF_ACTOR + "eps_clip_higher, overlong_reward_penalty, and dynamic_filter_fn",
    "cispo": _OF_ACTOR + "use_cispo_loss: true",
    "sapo": _OF_ACTOR + "use_sapo_loss: true",
    "m2po": _OF_ACTOR + "use_decoupled_loss: true and m2_threshold",
    "vapo": _OF_ACTOR + "gae_lambda: vapo, and a critic",
    "reinforce": _OF_ACTOR + "adv_norm {mean_level: batch, std_level: batch}, and no critic",
    "rlhf": "; that is trainer: rw for a reward model, then trainer: ppo",
    "rl": "; that is trainer: ppo",
    "ipo": "; that is trainer: dpo with actor.loss_type: ipo",
    "reward": "; that is trainer: rw",
    "rm": "; that is trainer: rw",
    "distill": "; that is trainer: ppo with a teacher",
}
_OTHER_NAMES = {
    "drgrpo": "dr_grpo",
    "reinforce_pp": "reinforce",
    "reinforce++": "reinforce",
    "distillation": "distill",
    "reward_model": "reward",
}


def load_expr_config(argv: list[str], cls: type[Config]) -> tuple[Config, str]:
    """The config that `argv` describes, and the path of its file.

    `argv`: `[script.py] --config FILE | FILE`, then `key=value` overrides. Raises ConfigError.
    """
    source = read_source(list(argv))
    config = _load(source, cls)
    _report_idle(config, source, by_workflow=False)
    return config, source.path


def load_experiment(argv: list[str]) -> tuple[BaseExperimentConfig, str]:
    """The same for the command line, which runs what the file names: its trainer and workflow."""
    source = read_source(list(argv))
    config = _load(source, experiment_class(argv))
    _report_idle(config, source, by_workflow=True)
    return config, source.path


def _report_idle(config: BaseExperimentConfig, source: Source, *, by_workflow: bool) -> None:
    """No key is silently without effect: a likely mistake is refused, another one logged."""
    for idle in idle_keys(config, source):
        if idle.by_workflow and not by_workflow:
            continue
        if _is_the_same_without(config, source, idle.key):
            continue
        if idle.refuse:
            raise source.error(idle.key, f"{idle}; remove it")
        logger.warning("%s: %s", source.place(idle.key), idle)


def _is_the_same_without(config: BaseExperimentConfig, source: Source, key: KeyPath) -> bool:
    """Whether the key, or a section around it, has the very value that it gets when left out."""
    for length in range(len(key), 0, -1):
        tree = copy.deepcopy(source.tree)
        parent = tree
        for name in key[: length - 1]:
            parent = parent[name]
        del parent[key[length - 1]]
        try:
            if _load(dataclasses.replace(source, tree=tree), type(config)) == config:
                return True
        except ConfigError:  # it cannot be left out
            pass
    return False


def experiment_class(argv: list[str]) -> type[BaseExperimentConfig]:
    """The class to load `argv` with: its file says `trainer: ppo` (the default), `sft`, ..."""
    source = read_source(list(argv))
    kind = source.tree.get("trainer", "ppo")
    if not isinstance(kind, str) or kind not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        name = str(kind).lower().replace("-", "_")
        hint = _ALGORITHMS.get(_OTHER_NAMES.get(name, name), "")
        raise source.error(("trainer",), f"trainer must be one of {known}, got {kind!r:.40}{hint}")
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
        found = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
        return cast("dict[str, Any]", found)  # of a dict
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        reason = str(error).strip().splitlines()[0]
        raise source.error(tuple(key.split(".")), f"{key}: {reason}") from None
    except RecursionError:
        raise ConfigError(f"{source.path}: ${{...}} references go round in a circle") from None
