"""Runs the experiment of a config: loads data sets and tokenizer, and runs the trainer by name.

Used by `areal train` and `areal demo`; a script with its own objects uses the trainers directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from areal.api.config.experiment import BaseExperimentConfig, PPOConfig
from areal.api.config.run import DatasetConfig
from areal.dataset import get_custom_dataset
from areal.models.vision.processor import find_processor
from areal.run.fingerprint import trainer_name
from areal.run.model_paths import actor_section, pin_models
from areal.run.paths import RunPaths
from areal.run.run import StepObserver
from areal.run.watchdog import watched
from areal.trainer import offline
from areal.trainer.episodes import refuse_images
from areal.trainer.offline import DPOTrainer, RWTrainer, SFTTrainer
from areal.trainer.preflight import check_rows, run_trial
from areal.trainer.rl_trainer import PPOTrainer
from areal.utils.startup import stage
from areal.utils.tokenizer import load_hf_tokenizer

Rows = Sequence[dict[str, Any]]

TRAINERS = {"ppo": PPOTrainer, "sft": SFTTrainer, "rw": RWTrainer, "dpo": DPOTrainer}


def run_experiment(config: BaseExperimentConfig, on_step: StepObserver | None = None) -> None:
    paths = RunPaths.of(config)
    # The watchdog starts first: loading a data set may hang too.
    with paths.made(), watched(config.watchdog.seconds, stacks_file=paths.stacks):
        pin_models(config, paths)
        train, valid = load_datasets(config)
        refuse_image_rows(config, train, valid)
        check_rows(config, train, load_hf_tokenizer(config.tokenizer_path))
        with TRAINERS[trainer_name(config)](config, train, valid) as trainer:
            trainer.train(on_step=on_step)


def try_experiment(config: BaseExperimentConfig, say: Callable[[str], None]) -> None:
    """One group of episodes against a stub model: see preflight.py."""
    train, valid = load_datasets(config)
    refuse_image_rows(config, train, valid)
    run_trial(config, train, load_hf_tokenizer(config.tokenizer_path), say)


def refuse_image_rows(config: BaseExperimentConfig, train: Rows, valid: Rows | None) -> None:
    """ValueError if rows have images, and the config's workflow or trainer is text-only."""
    if not isinstance(config, PPOConfig):
        offline.refuse_images(config, "train_dataset", train)
        offline.refuse_images(config, "valid_dataset", valid or [])
    else:
        refuse_images(config, None, None, train, is_eval=False)
        refuse_images(config, None, None, valid or [], is_eval=True)


def load_datasets(config: BaseExperimentConfig) -> tuple[Rows, Rows | None]:
    """The training rows and, if configured, the validation rows."""
    with stage(f"tokenizer {config.tokenizer_path}"):
        tokenizer = load_hf_tokenizer(config.tokenizer_path)
        processor = find_processor(actor_section(config).path, tokenizer)
    train, valid = _load_dataset(config.train_dataset, tokenizer, processor), None
    if config.valid_dataset is not None:
        valid = _load_dataset(config.valid_dataset, tokenizer, processor)
    return train, valid


def _load_dataset(section: DatasetConfig, tokenizer: Any, processor: Any) -> Rows:
    with stage(f"data set {section.path}, {section.split}"):
        return get_custom_dataset(section.split, section, tokenizer, processor)
