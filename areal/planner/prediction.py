"""What a training step should reach: predicted from the lengths that it had.

predict = predictor_of(config, has_gpu=True)
predict(stats)    # {"tokens_per_second_predicted": ...}, or {} where no profile applies
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from areal.api.config.experiment import PPOConfig
from areal.planner.devices import find_device, load_device, num_gpus
from areal.planner.models import model_configs
from areal.planner.plan import plan_setup, setup_of
from areal.planner.workload import Workload, workload_of
from areal.utils import logging

logger = logging.getLogger("Planner")

Predict = Callable[[Mapping[str, float]], dict[str, float]]


def predictor_of(config: PPOConfig, *, has_gpu: bool) -> Predict:
    """Nothing is predicted for a device without a profile or a model without a plan."""
    name = find_device() if has_gpu else "cpu"
    if name is None:
        return _nothing
    try:
        setup = setup_of(config, model_configs(config), load_device(name))
    except (ValueError, OSError) as error:  # also a model that only other machines have
        logger.info("no speed is predicted: %s", error)
        return _nothing
    load, _ = workload_of(config, {})
    shares = num_gpus() == 1 and not config.scheduler.by_ray
    gpus = 1 if has_gpu and shares and setup.training_devices == 1 else None

    def predict(stats: Mapping[str, float]) -> dict[str, float]:
        plan = plan_setup(setup, _seen_load(load, stats), gpus=gpus)
        return {"tokens_per_second_predicted": plan.tokens_per_s}

    return predict


def _nothing(stats: Mapping[str, float]) -> dict[str, float]:
    return {}


def _seen_load(load: Workload, stats: Mapping[str, float]) -> Workload:
    """The load with the lengths of a step that was trained on."""
    samples = max(stats["rollout/samples"], 1)
    output = min(max(stats["rollout/output_len"], 1.0), load.max_output)
    prompt = max(round(stats["tokens"] / samples - output), 1)
    prompts = max(round(samples / load.samples), 1)
    return replace(load, prompts=prompts, prompt=prompt, output=output)
