"""Loads a config (argv -> `Source` -> checked keys -> interpolated values -> dataclasses) and
reports keys without effect (effects.py).
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from areal.api.alloc_mode import AllocationMode
from areal.api.config.effects import idle_keys, unused_sections
from areal.api.config.experiment import BaseExperimentConfig
from areal.api.config.section import ConfigError, field_types, section_class
from areal.api.config.source import (
    KeyPath,
    Source,
    build,
    check_keys,
    read_source,
    with_defaults,
)
from areal.api.config.trainers import trainer_class
from areal.api.redact import without_secrets

if TYPE_CHECKING:
    from areal.api.config.experiment import BaseExperimentConfig


Config = TypeVar("Config", bound=BaseExperimentConfig)

logger = logging.getLogger("areal.Config")


def load_expr_config(argv: list[str], cls: type[Config]) -> tuple[Config, str]:
    """The config that `argv` describes, and the path of its file.

    `argv`: `[script.py] --config FILE | FILE`, then `key=value` overrides. Raises ConfigError.
    """
    source = read_source(list(argv))
    config = _load(source, cls)
    _report_idle(config, source, by_workflow=False)
    return config, source.path


def load_experiment(argv: list[str]) -> tuple[BaseExperimentConfig, str]:
    """The same for the command line, which runs the file's own trainer and workflow."""
    source = read_source(list(argv))
    config = _load(source, trainer_class(source))
    _report_idle(config, source, by_workflow=True)
    return config, source.path


def load_source(source: Source, cls: type[Config]) -> Config:
    """The config of a file that is being written: as `load_experiment`, without warnings."""
    config = _load(source, cls)
    _report_idle(config, source, by_workflow=True, warn=False)
    return config


def load_shared(argv: list[str]) -> BaseExperimentConfig:
    """The keys that all trainers share, whatever class a script loads the whole file with."""
    source = read_source(list(argv))
    tree = _interpolate(with_defaults(BaseExperimentConfig, source.tree), source)
    shared = {name: tree[name] for name in field_types(BaseExperimentConfig) if name in tree}
    check_keys(BaseExperimentConfig, shared, source)
    return build(BaseExperimentConfig, shared, source)


def _report_idle(
    config: BaseExperimentConfig, source: Source, *, by_workflow: bool, warn: bool = True
) -> None:
    """No key is silently without effect: a likely mistake is rejected, others are logged."""
    for name in unused_sections(config, source) if warn else []:
        why = "actor.kl_ctl and actor.kl_loss_coef are 0, so no reference model is loaded"
        logger.warning("%s: %s has no effect: %s", source.position((name,)), name, why)
    for idle in idle_keys(config, source):
        if (idle.by_workflow and not by_workflow) or not (idle.refuse or warn):
            continue
        if _is_the_same_without(config, source, idle.key):
            continue
        if idle.refuse:
            raise source.error(idle.key, f"{idle}; remove it")
        logger.warning("%s: %s", source.position(idle.key), idle)


def _is_the_same_without(config: BaseExperimentConfig, source: Source, key: KeyPath) -> bool:
    """Whether the key, or a section around it, has the value it would get if left out."""
    for length in range(len(key), 0, -1):
        tree = copy.deepcopy(source.tree)
        parent = tree
        for name in key[: length - 1]:
            parent = parent[name]
        del parent[key[length - 1]]
        try:
            if _load(dataclasses.replace(source, tree=tree), type(config)) == config:
                return True
        except ConfigError:  # it is required
            pass
    return False


def experiment_class(argv: list[str]) -> type[BaseExperimentConfig]:
    """The class to load `argv` with, by the file's `trainer` key: `ppo` (default), `sft`, ..."""
    return trainer_class(read_source(list(argv)))


def dump_yaml(config: BaseExperimentConfig) -> str:
    """The whole config, with defaults and without secrets, as a file that loads to an equal one."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(without_secrets(dataclasses.asdict(config))))


def _load(source: Source, cls: type[Config]) -> Config:
    check_keys(cls, source.tree, source)
    if source.tree.get("allocation_mode"):
        source = _allocated(source, cls)
    tree = _interpolate(with_defaults(cls, source.tree), source)
    check_keys(cls, tree, source)  # again: `${...}` may have inserted a whole section
    return build(cls, tree, source)


def _allocated(source: Source, cls: type[Config]) -> Source:
    """With the back ends of `allocation_mode` in the sections that leave theirs out."""
    text = _interpolate(with_defaults(cls, source.tree), source)["allocation_mode"]
    try:
        sections = AllocationMode.from_str(str(text)).sections()
    except ValueError as error:
        raise source.error(("allocation_mode",), f"allocation_mode: {error}") from None
    tree, positions = dict(source.tree), dict(source.positions)
    for role, keys in sections.items():
        section: Any = tree.get(role) or {}
        hint = field_types(cls).get(role)
        if hint is None or "backend" not in field_types(section_class(hint) or cls):
            raise source.error(
                ("allocation_mode",),
                f"allocation_mode: {keys['backend']!r} is for {role}, which is no engine of this "
                "trainer; name the section it is for, like archon[actor]:d1",
            )
        if isinstance(section, Mapping):  # else `build` says what is wrong with it
            written = cast("Mapping[str, Any]", section)
            tree[role] = {**keys, **written}
            for key in keys.keys() - written.keys():
                positions[role, key] = source.position(("allocation_mode",))
    return Source(source.path, tree, positions)


def _interpolate(tree: dict[str, Any], source: Source) -> dict[str, Any]:
    if _is_plain(tree):
        return copy.deepcopy(tree)
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        found = OmegaConf.to_container(OmegaConf.create(_to_resolve(tree)), resolve=True)
        return _laid_over(tree, cast("dict[str, Any]", found))  # a dict stays one
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        reason = str(error).strip().splitlines()[0]
        raise source.error(tuple(key.split(".")), f"{key}: {reason}") from None
    except RecursionError:
        raise ConfigError(f"{source.path}: ${{...}} references form a cycle") from None


_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")


def _to_resolve(tree: dict[str, Any]) -> dict[str, Any]:
    """The `${...}` of `tree` and what they name: OmegaConf takes longer for a whole tree than all
    else that is done with a file.
    """
    part = _not_plain(tree)
    texts = str(part)
    if "${" in _REFERENCE.sub("", texts):
        return tree  # relative to its place, nested, or a call: it may need anything
    for name in _REFERENCE.findall(texts):
        _add(name.split("."), tree, part)
    return part


def _not_plain(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _not_plain(cast("dict[str, Any]", value)) if isinstance(value, dict) else value
        for key, value in tree.items()
        if not _is_plain(value)
    }


def _add(key: list[str], tree: dict[str, Any], part: dict[str, Any]) -> None:
    """Add the value of `key`, or as much of the way to it as there is, to `part` of `tree`."""
    for name in key[:-1]:
        if not isinstance(tree.get(name), dict):
            break
        tree, part = tree[name], part.setdefault(name, {})
    else:
        name = key[-1]
    if name in tree:
        part[name] = tree[name]


def _laid_over(tree: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """`tree` with the values of `part`, a copy."""
    both: dict[str, Any] = {}
    for key, value in tree.items():
        found: Any = part.get(key, value)
        if isinstance(value, dict) and isinstance(found, dict):
            both[key] = _laid_over(cast("dict[str, Any]", value), cast("dict[str, Any]", found))
        else:
            both[key] = copy.deepcopy(found)
    return both


def _is_plain(value: Any) -> bool:
    """Whether OmegaConf would leave it as it is: nothing to interpolate, and nothing it refuses."""
    if isinstance(value, str):
        return "${" not in value
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return all(isinstance(key, str) and _is_plain(item) for key, item in items)
    if isinstance(value, list):
        return all(map(_is_plain, cast("list[Any]", value)))
    return value is None or isinstance(value, bool | int | float)
