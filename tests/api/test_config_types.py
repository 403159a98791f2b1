"""Every section refuses what its fields cannot hold, from a file and when it is built in Python."""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from config_files import FILES, complaint, load

from areal.api.cli_args import (
    GRPOConfig,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    load_expr_config,
)
from areal.api.config.section import field_types, is_section, item_class, section_class
from areal.api.config.trainers import EXPERIMENTS
from areal.api.scheduler_api import SchedulingSpec, SchedulingStrategy

SCALARS = (bool, int, float, str)


def sections(cls: type) -> Iterator[type]:
    yield cls
    for hint in field_types(cls).values():
        inner = section_class(hint) or item_class(hint)
        if inner is not None:
            yield from sections(inner)


SECTIONS = sorted({s for root in EXPERIMENTS.values() for s in sections(root)}, key=str)


@pytest.fixture(scope="module")
def instances(tmp_path_factory) -> dict[type, Any]:
    """A valid object of every section."""
    folder = tmp_path_factory.mktemp("configs")
    found: dict[type, Any] = {}
    for trainer in FILES:
        more = ["critic={}", "teacher={path: t}"] if trainer == "ppo" else []
        collect(load(folder, trainer, "valid_dataset={path: v}", *more), found)
    return found | {cls: cls() for cls in SECTIONS if cls not in found}


def collect(config: Any, found: dict[type, Any]) -> None:
    found[type(config)] = config
    for name in field_types(type(config)):
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            collect(value, found)


def test_every_class_of_the_tree_is_a_section():
    plain = [cls.__name__ for cls in SECTIONS if not is_section(cls)]
    assert not plain, f"decorate these with @config_section: {plain}"


def fields_of(*kinds: str) -> list[tuple[type, str]]:
    found = []
    for cls in SECTIONS:
        found += [(cls, name) for name, hint in field_types(cls).items() if kind(hint) in kinds]
    assert found
    return found


def kind(hint: Any) -> str:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = (
        [arg for arg in typing.get_args(hint) if arg is not type(None)] if is_union else [hint]
    )
    if typing.get_origin(options[0]) is Literal:
        return "choice"
    return options[0].__name__ if len(options) == 1 and options[0] in SCALARS else "other"


def accepted(
    instances: dict[type, Any], fields: list[tuple[type, str]], values: list[Any], says: str
) -> list[str]:
    """Whatever is not refused with a message that names the field and `says` what is wrong."""
    faults = []
    for (cls, name), value in itertools.product(fields, values):
        try:
            dataclasses.replace(instances[cls], **{name: value})
        except ValueError as error:
            if says.format(name=name) in str(error):
                continue
        faults.append(f"{cls.__name__}.{name} = {value!r}")
    return faults


def test_a_choice_is_one_of_the_choices(instances):
    values = ["invalid", "", 3, ["group"], 1.5]
    assert not accepted(instances, fields_of("choice"), values, "{name} must be ")


def test_a_number_is_a_number(instances):
    values = [True, "many", [1], {"a": 1}, b"5", 1j]
    assert not accepted(instances, fields_of("int"), values, "{name} must be a whole number, got")
    assert not accepted(instances, fields_of("float"), values, "{name} must be a number, got")


def test_a_number_is_finite(instances):
    values = [float("nan"), float("inf"), -float("inf")]
    assert not accepted(instances, fields_of("int", "float"), values, "{name}")


def test_true_or_false(instances):
    values = [1, 0.0, "yes", None]
    assert not accepted(instances, fields_of("bool"), values, "{name} must be true or false, got")


def test_a_text_is_a_text(instances):
    values = [1.5, True, ["a"], b"a"]
    assert not accepted(instances, fields_of("str"), values, "{name} must be text, got")


def test_conversions_lose_nothing():
    assert OptimizerConfig(lr=1).lr == 1.0 and OptimizerConfig(warmup_steps="5").warmup_steps == 5
    assert OptimizerConfig(warmup_steps=1e3).warmup_steps == 1000
    with pytest.raises(ValueError, match="warmup_steps must be a whole number, got 0.5"):
        OptimizerConfig(warmup_steps=0.5)


def test_a_section_of_another_kind():
    with pytest.raises(
        ValueError, match="optimizer must be of class OptimizerConfig, got NormConfig"
    ):
        dataclasses.replace(_actor(), optimizer=NormConfig())
    with pytest.raises(ValueError, match="scheduling_spec must be of class SchedulingSpec, got"):
        dataclasses.replace(_actor(), scheduling_spec=[{"cpu": 1}])
    spec = SchedulingSpec(cpu=2)
    assert dataclasses.replace(_actor(), scheduling_spec=[spec]).scheduling_spec == [spec]


def _actor() -> PPOActorConfig:
    return PPOActorConfig(path="tiny")


def test_positional_sections_are_checked_too():
    assert SchedulingStrategy("colocation", "actor").target == "actor"
    with pytest.raises(ValueError, match="type must be one of separation, colocation"):
        SchedulingStrategy("apart")


def test_a_root_that_a_user_extends_is_checked_as_a_whole(tmp_path):
    @dataclasses.dataclass(kw_only=True)
    class Extended(GRPOConfig):
        judge_retries: int = 3

    file = tmp_path / "ppo.yaml"
    file.write_text(FILES["ppo"])
    config, _ = load_expr_config([str(file), "judge_retries=5"], Extended)
    assert config.judge_retries == 5
    with pytest.raises(ValueError, match="judge_retries must be a whole number, got 'many'"):
        load_expr_config([str(file), "judge_retries=many"], Extended)
    with pytest.raises(ValueError, match="judge_retries must be a whole number, got true"):
        dataclasses.replace(config, judge_retries=True)
    with pytest.raises(ValueError, match="seed must be a whole number, got true"):
        dataclasses.replace(config, seed=True)


@pytest.mark.parametrize(
    "override, says",
    [
        ("actor.reward_norm.mean_level=invalid", "actor.reward_norm.mean_level must be one of"),
        ("actor.reward_bias=.inf", "actor.reward_bias must be a finite number, got inf"),
        ("actor.reward_bias=1e999", "actor.reward_bias must be a finite number, got inf"),
        ("actor.gae_lambda=.nan", "actor.gae_lambda must lie between 0 and 1, got nan"),
        ("actor.gae_lambda=true", "actor.gae_lambda must be a number or text, got true"),
        ("teacher={path: t, rl_loss_weight: .inf}", "teacher.rl_loss_weight must be"),
        ("actor.eps_clip=true", "actor.eps_clip must be a number, got true"),
    ],
)
def test_in_a_file(tmp_path: Path, override: str, says: str):
    assert says in complaint(tmp_path, "ppo", override)
