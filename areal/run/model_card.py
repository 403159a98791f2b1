"""The model card of a finished run: README.md with recipe, data set and curve, from its folder.

Values come from config.yaml and run.db. Folders of the machine are left out: a model that is not
named by a hub appears by the last part of its path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import yaml

from areal import __version__
from areal.api.redact import hide_secrets
from areal.run.database import open_read_only, read_steps
from areal.run.paths import RunPaths
from areal.utils.hub import hub_name

_MAX_ROWS = 12
_CURVES = ("rollout/reward", "eval/reward", "loss", "eval/loss")
_ALGORITHM = (
    *("eps_clip", "eps_clip_higher", "kl_ctl", "kl_loss_coef", "importance_sampling_level"),
    *("use_decoupled_loss", "ppo_n_minibatches", "beta", "loss_type", "use_lora", "lora_rank"),
)


def model_card(paths: RunPaths) -> str:
    """Markdown with the hub's metadata in front."""
    config = _read_config(paths)
    with closing(open_read_only(paths.database)) as connection:
        steps = [(step, stats) for step, stats in read_steps(connection) if step >= 0]
    parts = [_metadata(config), f"# {config['experiment_name']}", _summary(config, len(steps))]
    parts += ["## Recipe", _table(("key", "value"), _recipe(config).items())]
    parts += ["## Curve", _curve(steps)]
    return hide_secrets("\n\n".join(parts) + "\n")


def _read_config(paths: RunPaths) -> dict[str, Any]:
    try:
        config = yaml.safe_load(paths.config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        config = None
    if not isinstance(config, dict) or not {"trainer", "actor", "train_dataset"} <= config.keys():
        raise ValueError(f"{paths.config} is damaged: expected the config that the run wrote there")
    return config


def _metadata(config: Mapping[str, Any]) -> str:
    base, data = str(config["actor"]["path"]), str(config["train_dataset"]["path"])
    front: dict[str, Any] = {"library_name": "transformers", "tags": ["areal", config["trainer"]]}
    if (name := hub_name(base)) is not None:
        front["base_model"] = name.repo
    if (name := hub_name(data)) is not None:
        front["datasets"] = [name.repo]
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---"


def _summary(config: Mapping[str, Any], num_steps: int) -> str:
    base, data = (_public(config[key]["path"]) for key in ("actor", "train_dataset"))
    return (
        f"`{base}` after {num_steps} steps of trainer `{config['trainer']}` on `{data}`, by areal "
        f"{__version__}."
    )


def _recipe(config: Mapping[str, Any]) -> dict[str, Any]:
    actor, data = config["actor"], config["train_dataset"]
    values = {
        "trainer": config["trainer"],
        "actor.path": _public(actor["path"]),
        "actor.backend": actor["backend"],
        "train_dataset.path": _public(data["path"]),
        "train_dataset.batch_size": data["batch_size"],
        "actor.optimizer.type": actor["optimizer"]["type"],
        "actor.optimizer.lr": actor["optimizer"]["lr"],
        "seed": config["seed"],
    }
    if config["trainer"] == "ppo":
        rollout, sampling = config["rollout"], config["gconfig"]
        values |= {
            "reward_fn": config["reward_fn"],
            "workflow": config["workflow"],
            "gconfig.n_samples": sampling["n_samples"],
            "gconfig.max_new_tokens": sampling["max_new_tokens"],
            "gconfig.temperature": sampling["temperature"],
            "rollout.max_head_offpolicyness": rollout["max_head_offpolicyness"],
            "actor.reward_norm": actor["reward_norm"],
            "actor.adv_norm": actor["adv_norm"],
        }
    values |= {f"actor.{name}": actor[name] for name in _ALGORITHM if actor.get(name) is not None}
    return values


def _curve(steps: list[tuple[int, dict[str, float]]]) -> str:
    """At most `_MAX_ROWS` steps, the first and the last among them."""
    names = [name for name in _CURVES if any(name in stats for _, stats in steps)]
    if not names:
        return "No statistics were recorded."
    last = len(steps) - 1
    num_rows = min(len(steps), _MAX_ROWS)
    shown = sorted({round(row * last / max(num_rows - 1, 1)) for row in range(num_rows)})
    rows = [
        (str(steps[index][0] + 1), *(_number(steps[index][1].get(name)) for name in names))
        for index in shown
    ]
    return _table(("step", *names), rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.replace("|", "\\|").split())


def _public(path: Any) -> str:
    name = hub_name(str(path))
    return name.repo if name is not None else str(path).rstrip("/").rpartition("/")[2]
