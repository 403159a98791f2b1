"""What a training step should reach: predicted from the lengths that it had.

predict = predictor_of(config, has_gpu=True)             # trainer ppo
predict(stats)    # {"tokens_per_second_predicted": ...}, or {} where no profile applies
predict = rows_predictor_of(config, has_gpu=True)        # trainers sft, rw and dpo
predict([212, 180, 96])                                  # tokens of each sequence
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any, TypeVar

from areal.api.config.experiment import BaseExperimentConfig, PPOConfig
from areal.planner.devices import Device, find_device, load_device, num_gpus
from areal.planner.models import model_configs
from areal.planner.offline import offline_trainers, rows_step_s
from areal.planner.plan import plan_setup, setup_of
from areal.planner.workload import Workload, workload_of
from areal.utils import logging

logger = logging.getLogger("Planner")

Prediction = dict[str, float]
Predict = Callable[[Mapping[str, float]], Prediction]
PredictRows = Callable[[Sequence[int]], Prediction]
ConfigT = TypeVar("ConfigT", bound=BaseExperimentConfig)
PlannedT = TypeVar("PlannedT")


def predictor_of(config: PPOConfig, *, has_gpu: bool) -> Predict:
    """Nothing is predicted for a device without a profile or a model without a plan."""
    setup = _planned(config, setup_of, has_gpu)
    if setup is None:
        return _nothing
    load, _ = workload_of(config, {})
    shares = num_gpus() == 1 and not config.scheduler.by_ray
    gpus = 1 if has_gpu and shares and setup.training_devices == 1 else None
    if gpus == 1 and setup.teacher is not None:  # all three on one device
        return _nothing

    def predict(stats: Mapping[str, float]) -> Prediction:
        return _speed(plan_setup(setup, _seen_load(load, stats), gpus=gpus).tokens_per_s)

    return predict


def rows_predictor_of(config: BaseExperimentConfig, *, has_gpu: bool) -> PredictRows:
    """The same, of a step on given rows."""
    trainers = _planned(config, offline_trainers, has_gpu)
    if trainers is None:
        return _nothing

    def predict(lengths: Sequence[int]) -> Prediction:
        load = _rows_load(lengths)
        return _speed(sum(lengths) / rows_step_s(trainers, load))

    return predict


def _planned(
    config: ConfigT,
    plan: Callable[[ConfigT, Mapping[str, Mapping[str, Any]], Device], PlannedT],
    has_gpu: bool,
) -> PlannedT | None:
    name = find_device() if has_gpu else "cpu"
    if name is None:
        return None
    try:
        return plan(config, model_configs(config), load_device(name))
    except (ValueError, OSError) as error:  # also a model that only other machines have
        logger.info("no speed is predicted: %s", error)
        return None


def _nothing(seen: Any) -> Prediction:
    return {}


def _speed(tokens_per_s: float) -> Prediction:
    return {"tokens_per_second_predicted": tokens_per_s}


def _rows_load(lengths: Sequence[int]) -> Workload:
    """Sequences with the mean, the spread and the longest of `lengths`."""
    seen = [max(length, 2) for length in lengths]
    return Workload(
        prompts=len(seen),
        samples=1,
        prompt=1,
        output=fmean(seen) - 1,
        max_output=max(seen) - 1,
        spread=min(pstdev(map(math.log, seen)), 3.0),
    )


def _seen_load(load: Workload, stats: Mapping[str, float]) -> Workload:
    """The load with the lengths of a step that was trained on."""
    samples = max(stats["rollout/samples"], 1)
    output = min(max(stats["rollout/output_len"], 1.0), load.max_output)
    prompt = max(round(stats["tokens"] / samples - output), 1)
    prompts = max(round(samples / load.samples), 1)
    return replace(load, prompts=prompts, prompt=prompt, output=output)
