"""`areal plan config.yaml`: memory, speed and duration of a run, before it starts. No torch.

`--measure` writes the profile of this machine's device instead, and is the one option that loads
torch. `--scale` prints a table of models and numbers of GPUs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.api.config.experiment import BaseExperimentConfig
    from areal.planner.devices import Device

_SIMULATED_STEPS = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predicts peak memory of each process, tokens per second, idle time, staleness and the "
        "duration of a run, says what the largest loss is and what would help, and proposes a "
        "better split of the GPUs. Exit code 2 if the run cannot fit."
    )
    parser.add_argument("file", nargs="?", metavar="config.yaml", help="the file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as actor.backend=archon:d4"
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="h200, h100, a100, cpu, or the file of a profile; default: this machine's",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="default: as many as are laid out")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="of a prompt, on average")
    parser.add_argument(
        "--image-tokens", type=int, metavar="N", help="of a prompt's tokens, those of its images"
    )
    parser.add_argument("--output-tokens", type=float, metavar="N", help="of an answer, on average")
    parser.add_argument(
        "--length-spread",
        type=float,
        metavar="X",
        help="standard deviation of the logarithm of an answer's length; default 0.5",
    )
    parser.add_argument(
        "--environment-seconds", type=float, metavar="S", help="an episode waits, on average"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="if the config sets no number")
    parser.add_argument(
        "--simulate", action="store_true", help="also run a discrete-event model of the run"
    )
    parser.add_argument(
        "--failures-per-hour", type=float, default=0.0, metavar="X", help="of each server"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the simulation")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--measure",
        metavar="FILE",
        help="measure this machine's device, write its profile to FILE, and end",
    )
    parser.add_argument(
        "--scale", action="store_true", help="print models of 7B to 235B on 8 to 1024 GPUs, and end"
    )


def run(args: argparse.Namespace) -> int:
    if args.measure:
        return _measure(args)
    if args.scale:
        return _scale(args)
    if args.file is None:
        raise ValueError("name a config file, like `areal plan config.yaml --device h200`")
    return _plan(args)


def _plan(args: argparse.Namespace) -> int:
    from areal.api.cli_args import load_experiment
    from areal.api.config.experiment import PPOConfig
    from areal.engine.train.fit import check_models
    from areal.planner.devices import load_device
    from areal.planner.layouts import best_split
    from areal.planner.models import model_configs
    from areal.planner.plan import plan_setup, refusal, setup_of
    from areal.planner.report import as_json, describe
    from areal.planner.simulate import Spec, simulate, steps_for
    from areal.planner.workload import workload_of

    _check_numbers(args)
    experiment, _ = load_experiment([args.file, *args.overrides])
    device = load_device(args.device or _this_device())
    if not isinstance(experiment, PPOConfig):
        return _plan_offline(args, experiment, device)
    config = experiment
    load, assumed = workload_of(config, _given(args))
    models = model_configs(config)
    check_models(config, models, runs_here=False)
    assumed += _sight_assumed(args, models)
    setup = setup_of(config, models, device)
    plan = plan_setup(setup, load, gpus=args.gpus)
    simulated = None
    if args.simulate:
        spec = Spec.of(plan, setup, failures_per_hour=args.failures_per_hour)
        steps = steps_for(spec.load, load.steps or _SIMULATED_STEPS)
        simulated = simulate(spec, steps=min(steps, _SIMULATED_STEPS), seed=args.seed)
    results = (plan, assumed, best_split(setup, load, plan.gpus), simulated)
    lines = [json.dumps(as_json(*results), indent=1)] if args.json else describe(*results)
    print("\n".join(lines))
    why = refusal(plan.memory, device)
    if why is not None:
        raise ValueError(why)
    return 0


def _plan_offline(args: argparse.Namespace, config: BaseExperimentConfig, device: Device) -> int:
    """Of trainers without generation: sft, rw, dpo."""
    from areal.engine.train.fit import check_models
    from areal.planner.models import model_configs
    from areal.planner.offline import offline_load, plan_offline
    from areal.planner.plan import refusal
    from areal.planner.report import describe_offline, offline_json

    if args.simulate:
        raise ValueError("--simulate: a run of this trainer generates nothing")
    load, assumed = offline_load(config, _given(args))
    models = model_configs(config)
    check_models(config, models, runs_here=False)
    assumed += _sight_assumed(args, models)
    plan = plan_offline(config, models, device, load, gpus=args.gpus)
    lines = describe_offline(plan, assumed)
    print(json.dumps(offline_json(plan, assumed), indent=1) if args.json else "\n".join(lines))
    why = refusal(plan.memory, device)
    if why is not None:
        raise ValueError(why)
    return 0


def _sight_assumed(args: argparse.Namespace, models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """ValueError for images of a model that sees none."""
    sees = "vision_config" in models["actor"]
    if args.image_tokens and not sees:
        raise ValueError(
            "--image-tokens: actor.path has no vision tower (no vision_config in its config.json)"
        )
    return ["prompts without images (--image-tokens)"] if sees and not args.image_tokens else []


def _this_device() -> str:
    from areal.planner.devices import find_device, known_devices

    found = find_device()
    if found is None:
        raise ValueError(
            "--device: no known GPU is in this machine; name one of "
            f"{', '.join(known_devices())}, or the file of a profile"
        )
    return found


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("gpus", "prompt_tokens", "image_tokens", "output_tokens", "steps"):
        value = getattr(args, name)
        if value is not None and not value >= 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value:g}")
    if not 0 <= args.failures_per_hour <= 60:
        raise ValueError(
            f"--failures-per-hour must lie between 0 and 60, got {args.failures_per_hour:g}"
        )


def _given(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "prompt": args.prompt_tokens,
        "image": args.image_tokens,
        "output": args.output_tokens,
        "spread": args.length_spread,
        "environment_s": args.environment_seconds,
        "steps": args.steps,
    }


def _measure(args: argparse.Namespace) -> int:
    from areal.planner.measure import measure_profile
    from areal.utils.fs import atomic_write_text

    file = Path(args.measure)
    if file.suffix != ".json":
        raise ValueError(f"--measure: the file of a profile ends in .json, got {args.measure!r}")
    text = measure_profile()
    atomic_write_text(file, text)
    print(f"{file}: use it with `areal plan --device {file}`")
    return 0


def _scale(args: argparse.Namespace) -> int:
    from areal.planner.devices import load_device
    from areal.planner.report import scale_table
    from areal.planner.scale import scale_rows

    print("\n".join(scale_table(scale_rows(load_device(args.device or "h200")))))
    return 0
