"""Sections built in Python: the same checks as from a file, with the field's name in front."""

from __future__ import annotations

import ast
import dataclasses
import inspect

import pytest

from areal.api import cli_args
from areal.api.cli_args import (
    GenerationHyperparameters,
    GRPOConfig,
    OptimizerConfig,
    PPOActorConfig,
    PPOConfig,
    RecoverConfig,
    RejectionSamplingConfig,
    SaverConfig,
)

SECTIONS = [
    value
    for value in (getattr(cli_args, name) for name in cli_args.__all__)
    # Those of scheduler_api are contracts too, and may be built by position.
    if dataclasses.is_dataclass(value) and value.__module__.startswith("areal.api.config.")
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda cls: cls.__name__)
def test_every_field_has_its_help_and_a_keyword(section: type) -> None:
    """The string under a field is its help; documentation is made from it."""
    body = ast.parse(inspect.getsource(section)).body[0].body
    for field, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            text = below.value if isinstance(below, ast.Expr) else None
            assert isinstance(text, ast.Constant), f"{section.__name__}.{field.target.id}"
    assert all(field.kw_only for field in dataclasses.fields(section))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: OptimizerConfig(lr=0.0), "lr must be above 0, got 0.0"),
        (lambda: OptimizerConfig(beta2=1.0), "beta2 must lie in [0, 1), got 1.0"),
        (lambda: OptimizerConfig(warmup_steps=-1), "warmup_steps must be at least 0, got -1"),
        (lambda: SaverConfig(freq_steps=0), "freq_steps must be at least 1, got 0"),
        (lambda: RecoverConfig(mode="on"), "freq_steps (or freq_epochs, freq_secs) must be set"),
        (lambda: GenerationHyperparameters(top_p=0.0), "top_p must lie in (0, 1], got 0.0"),
        (lambda: GenerationHyperparameters(temperature=float("inf")), "temperature must be above"),
        (lambda: RejectionSamplingConfig(lower=6.0), "lower must be below upper (5.0), got 6.0"),
        (lambda: PPOActorConfig(path=""), "path must name a model folder, got ''"),
        (lambda: PPOActorConfig(path="m", c_clip=0.5), "c_clip must be above 1, got 0.5"),
        (lambda: PPOActorConfig(path="m", gae_lambda=1.5), "gae_lambda must lie between 0 and 1"),
    ],
)
def test_a_section_checks_itself(build, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        build()
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("metric", ["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"])
def test_every_documented_rejection_metric_is_accepted(metric: str) -> None:
    assert RejectionSamplingConfig(metric=metric, upper=2.0).metric == metric


def test_clamping_needs_a_ratio() -> None:
    with pytest.raises(ValueError, match="metric must be 'ratio' with action 'clamp', got 'kl_k1'"):
        RejectionSamplingConfig(action="clamp", metric="kl_k1")


def test_each_timer_section_has_its_own_clocks() -> None:
    saver, recover = SaverConfig(freq_secs=60.0), RecoverConfig()
    assert saver.ever_fires
    assert not recover.ever_fires


def test_grpo_is_ppo() -> None:
    assert GRPOConfig is PPOConfig
