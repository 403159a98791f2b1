"""Pins the hub names of a config to commits and fetches them, before anything starts.

    pin_models(config, paths)      # in place: `org/name` becomes `org/name@commit`
    fetch_models(config)           # download what this machine needs

A run keeps the commits it began with: models.json in its folder maps names to commits, so that it
resumes with the same models even if their branches have moved. Ranks and servers get the pinned
name, and use the cache of their machine or download it there.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from areal.api.config.train_engine import TrainEngineConfig
from areal.engine.train.fit import check_models
from areal.utils import logging
from areal.utils.fs import atomic_write_text
from areal.utils.hub import hub_name, model_folder, pin
from areal.utils.model_files import read_hf_config, read_json

if TYPE_CHECKING:
    from areal.api.config.experiment import BaseExperimentConfig
    from areal.run.paths import RunPaths

logger = logging.getLogger("Hub")


def actor_section(config: BaseExperimentConfig) -> TrainEngineConfig:
    """The section of the actor, which every experiment has."""
    actor = config.models()["actor"]
    assert isinstance(actor, TrainEngineConfig)
    return actor


def model_paths(config: BaseExperimentConfig) -> dict[str, str]:
    """Role -> folder or hub name of its model; by default the actor's."""
    actor = actor_section(config)
    return {role: section.path or actor.path for role, section in config.all_models().items()}


def pin_models(config: BaseExperimentConfig, paths: RunPaths) -> None:
    """Idempotent."""
    commits = recorded_commits(paths)
    pinned = dict(commits)

    def commit_of(path: str, key: str) -> str:
        name = hub_name(path)
        if name is None or name.is_pinned:
            return path
        if path not in pinned:
            pinned[path] = pin(path, key=key).rpartition("@")[2]
            logger.info("%s: %s is at commit %s", key, path, pinned[path])
        return str(name.at(pinned[path]))

    models = config.all_models()
    for role, path in model_paths(config).items():
        models[role].path = commit_of(path, f"{role}.path")
    config.tokenizer_path = commit_of(config.tokenizer_path, "tokenizer_path")
    if pinned != commits:
        atomic_write_text(paths.models, json.dumps(pinned, indent=1) + "\n")


def fetch_models(config: BaseExperimentConfig) -> None:
    """ValueError, before weights are downloaded, for a model that its engine does not support.

    With Ray, ranks and servers fetch weights on their own machines.
    """
    model_folder(config.tokenizer_path, key="tokenizer_path", weights=False)
    paths = model_paths(config)
    hf_configs = {
        role: read_hf_config(model_folder(path, key=f"{role}.path", weights=False))
        for role, path in paths.items()
    }
    check_models(config, hf_configs)
    if config.scheduler.type == "local":
        for role, section in config.all_models().items():
            drawn = isinstance(section, TrainEngineConfig) and section.init_from_scratch
            model_folder(paths[role], key=f"{role}.path", weights=not drawn)


def recorded_commits(paths: RunPaths) -> dict[str, str]:
    """Name -> commit of the run that is resumed; empty for a new one."""
    if not paths.config.exists() or not paths.models.exists():
        return {}
    return read_json(paths.models)
