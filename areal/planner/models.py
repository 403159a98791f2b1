"""Where is a model's config.json? In its folder, the hub's cache, or the planner's own list.

The hub is not queried: a plan takes less than two seconds, also without a network.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal.api.config.experiment import BaseExperimentConfig
from areal.planner.scale import known_models
from areal.utils.hub import hub_name, look_up
from areal.utils.model_files import read_hf_config


def model_configs(config: BaseExperimentConfig) -> dict[str, Mapping[str, Any]]:
    """Of each role."""
    models = config.all_models()
    default = models["actor"].path
    return {
        role: model_config(section.path or default or "", key=f"{role}.path")
        for role, section in models.items()
    }


def model_config(path: str, *, key: str) -> Mapping[str, Any]:
    """The config.json of a folder or hub name; ValueError, with `key`, if it is not known."""
    name = hub_name(path)
    known = known_models()
    if name is not None and name.repo in known:
        return known[name.repo]
    if name is None and not Path(path).is_dir():
        raise ValueError(f"{key}: folder {path!r} does not exist; a plan reads its config.json")
    folder = look_up(path, key=key, weights=False, deadline_s=None).folder
    if folder is None:
        raise ValueError(
            f"{key}: {path!r} is not in the hub's cache, and the planner does not know it: give a "
            f"folder with its config.json, or one of {', '.join(known)}"
        )
    try:
        return read_hf_config(folder)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{key}: {error}") from None
