"""The config of an evaluation: the keys of training, from a suite, a file or the evaluated run.

    --suite NAME     the suite's keys; the model is the target, the rest has its defaults
    --config FILE    the keys of a training config
    neither          the target is a run: its own config, so that the score is that of its evaluator

Then `--reward`, `--agent`, `--n` and `--seed`, then `key=value` overrides. Out: a PPOConfig of
which only evaluation's part matters (valid_dataset, eval_gconfig, eval_workflow, reward_fn,
rollout, native). Loads no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from areal.api.cli_args import load_expr_config
from areal.api.config.experiment import PPOConfig
from areal.api.config.loader import load_experiment
from areal.api.config.section import ConfigError
from areal.api.scratch import ScratchFolder
from areal.evaluation.suites import Suite, find_suite
from areal.evaluation.targets import Target
from areal.run.paths import RunPaths

_IN_FLIGHT = 64  # problems, where no config says otherwise
_NO_MODEL = "model"  # in place of a path, for targets without one


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says, the same for all targets."""

    suite: str | None = None
    config: str | None = None
    reward: str | None = None
    agent: str | None = None
    num_samples: int | None = None
    seed: int | None = None
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    config: PPOConfig
    suite: str  # its name
    votes: bool  # whether maj@k has a meaning


def load_settings(target: Target, options: Options) -> Settings:
    suite = None if options.suite is None else find_suite(options.suite)
    tree = _base(target, options, suite)
    if options.reward is not None:
        tree["reward_fn"] = options.reward
    if options.agent is not None and target.kind != "oracle":
        tree["eval_workflow"] = options.agent
    if options.seed is not None:
        tree["seed"] = options.seed
    if options.num_samples is not None:
        sampling = tree["eval_gconfig"] = dict(tree.get("eval_gconfig") or {})
        sampling["n_samples"] = options.num_samples
        if options.num_samples > 1:
            sampling["greedy"] = False
    config = _load(tree, options.overrides)
    _check(config, options, suite)
    return Settings(config, _name(config, suite), suite is None or suite.votes)


def run_config(paths: RunPaths) -> PPOConfig:
    """The config that a run of trainer ppo was started with."""
    tree = _read(paths.config)
    if tree.get("trainer", "ppo") != "ppo":
        raise ValueError(f"{paths.root} is a run of trainer {tree['trainer']}: it has no rewards")
    return _load(tree, ())


def _base(target: Target, options: Options, suite: Suite | None) -> dict[str, Any]:
    if suite is not None and options.config is not None:
        raise ValueError("--suite and --config both say what is evaluated: give one of them")
    if suite is not None:
        # A config needs training rows; their batch size is also how many problems run at once.
        train = {**suite.rows, "batch_size": _IN_FLIGHT}
        return _defaults(target) | suite.keys() | {"train_dataset": train}
    if options.config is not None:
        load_experiment([options.config])  # reports mistakes with their place in the file
        return _read(Path(options.config))
    if target.run is None:
        raise ValueError(
            f"{target.name}: --suite says what a model is evaluated on (only a run has a "
            "validation set of its own)"
        )
    tree = _read(RunPaths(target.run).config)
    if tree.get("trainer", "ppo") != "ppo" or not tree.get("valid_dataset"):
        raise ValueError(
            f"{target.name}: this run has no episodes on a validation set (trainer "
            f"{tree.get('trainer')}, valid_dataset {tree.get('valid_dataset')}): give --suite"
        )
    return tree


def _defaults(target: Target) -> dict[str, Any]:
    path = target.path if target.kind in ("model", "native") else _NO_MODEL
    return {
        "trainer": "ppo",
        "experiment_name": "eval",
        "trial_name": "eval",
        "actor": {"path": path, "optimizer": {"lr": 1e-6}},
    }


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{file}: expected the keys of a config, found {tree!r:.60}")
    return tree


def _load(tree: dict[str, Any], overrides: tuple[str, ...]) -> PPOConfig:
    with ScratchFolder("eval") as scratch:
        file = scratch / "config.yaml"
        # Without an evaluator its keys would have no effect, and each would get a warning.
        tree = {**tree, "evaluator": {"freq_steps": 1}}
        file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
        try:
            return load_expr_config([str(file), *overrides], PPOConfig)[0]
        except ConfigError as error:  # the file is gone when the message is read
            raise ValueError(re.sub(rf"{re.escape(str(file))}(:\d+)?: ", "", str(error))) from error


def _check(config: PPOConfig, options: Options, suite: Suite | None) -> None:
    if config.valid_dataset is None:
        raise ValueError("valid_dataset: it is not set, so there is nothing to evaluate on")
    named = any(text.lstrip("+").startswith("reward_fn=") for text in options.overrides)
    if suite is not None and suite.reward_fn is None and options.reward is None and not named:
        raise ValueError(
            f"--suite {options.suite}: a file needs a reward: --reward NAME, or the import path of "
            "a function"
        )
    sampling = config.eval_gconfig
    assert sampling is not None  # set by the config
    if sampling.n_samples > 1 and sampling.greedy:
        raise ValueError(
            f"eval_gconfig.greedy is true, so {sampling.n_samples} samples would be the same "
            "answer: add eval_gconfig.greedy=false, or --n 1"
        )


def _name(config: PPOConfig, suite: Suite | None) -> str:
    assert config.valid_dataset is not None
    return config.valid_dataset.path if suite is None else suite.name
