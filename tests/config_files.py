"""Small config files for tests of the configuration: one per trainer, and what loading one says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal.api.cli_args import ConfigError, experiment_class, load_expr_config

_ROOT = "experiment_name: e\ntrial_name: t\n"
FILES = {
    "ppo": _ROOT
    + """\
train_dataset: {path: arithmetic, batch_size: 4}
gconfig: {n_samples: 2, max_new_tokens: 32}
actor: {path: tiny, optimizer: {lr: 1e-3}}
""",
    "sft": _ROOT
    + """\
trainer: sft
train_dataset: {path: arithmetic}
actor: {path: tiny, optimizer: {lr: 1e-3}}
""",
    "rw": _ROOT
    + """\
trainer: rw
train_dataset: {path: Anthropic/hh-rlhf}
actor: {path: tiny, is_critic: true, optimizer: {lr: 1e-3}}
""",
    "dpo": _ROOT
    + """\
trainer: dpo
train_dataset: {path: Anthropic/hh-rlhf}
actor: {path: tiny, optimizer: {lr: 1e-3}}
""",
}


def load(folder: Path, trainer: str, *overrides: str) -> Any:
    """The config of `trainer` with `overrides` (`key=value`)."""
    file = folder / f"{trainer}.yaml"
    file.write_text(FILES[trainer])
    argv = [str(file), *overrides]
    return load_expr_config(argv, experiment_class(argv))[0]


def complaint(folder: Path, trainer: str, *overrides: str) -> str:
    """The one line that refuses `overrides`."""
    try:
        load(folder, trainer, *overrides)
    except ConfigError as error:
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError(f"{trainer} with {overrides} was accepted")
