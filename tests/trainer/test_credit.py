"""Credit per episode: an episode of several rows weighs as one row, in losses and normalisers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import write_tiny_model
from tiny_ppo import (
    GRPO,
    PLAIN_SGD,
    advantages,
    group,
    open_actor,
    open_critic,
    two_groups,
    weights_of,
    with_own_logprobs,
)

from areal.api.config.ppo import TeacherConfig
from areal.api.config.train_engine import MicroBatchSpec, NormConfig
from areal.api.io_struct import EPISODE_KEY
from areal.trainer.ppo.batch import collect, loss_weight
from areal.utils import stats_tracker
from areal.utils.data import select_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(autouse=True)
def fresh_stats():
    stats_tracker.export()


def copied(trajectory: dict[str, Any], copies: list[int]) -> dict[str, Any]:
    """The same episodes, each exported as several equal rows."""
    rows = [row for row, count in enumerate(copies) for _ in range(count)]
    return {**select_rows(trajectory, rows), EPISODE_KEY: torch.tensor(rows)}


OBJECTIVES = {
    "grpo": dict(reward_norm=GRPO),
    "rloo": dict(reward_norm=NormConfig(mean_level="group", std_level=None, mean_leave1out=True)),
    "advantages over the batch": dict(adv_norm=NormConfig(mean_level="batch", std_level="batch")),
    "gspo": dict(reward_norm=GRPO, importance_sampling_level="sequence"),
    "sapo": dict(reward_norm=GRPO, use_sapo_loss=True),
    "cispo": dict(reward_norm=GRPO, use_cispo_loss=True, eps_clip_higher=5.0),
    "KL loss": dict(reward_norm=GRPO, kl_loss_coef=0.3),
}


def trained(folder, trajectories: list[dict], teacher: TeacherConfig | None = None, **options):
    """Weights and statistics after one step, in micro-batches of a few rows."""
    actor = open_actor(
        folder,
        ppo_n_minibatches=1,
        optimizer=PLAIN_SGD,
        mb_spec=MicroBatchSpec(max_tokens_per_mb=20),
        teacher=teacher,
        **options,
    )
    data = advantages(actor, with_own_logprobs(actor, trajectories))
    data |= {key: data["logprobs"] * 0.5 for key in ("ref_logp", "teacher_logp")}
    actor.ppo_update(data)
    return weights_of(actor), stats_tracker.export()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_rows_of_an_episode_share_its_weight(folder, name: str):
    """The step is the same whether an episode is exported as one row or as several equal ones."""
    wanted, single = trained(folder, two_groups(), **OBJECTIVES[name])
    trajectories = [
        copied(trajectory, copies)
        for trajectory, copies in zip(two_groups(), ([5, 1, 2], [1, 3], [1, 1]), strict=True)
    ]
    found, several = trained(folder, trajectories, **OBJECTIVES[name])
    assert several["actor/loss"] == pytest.approx(single["actor/loss"], rel=1e-4, abs=1e-6)
    for key, weight in found.items():
        torch.testing.assert_close(weight, wanted[key], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("rl_loss_weight", [0.0, 1.0])
def test_a_teacher_too(folder, rl_loss_weight: float):
    teacher = TeacherConfig(
        path=str(folder), rl_loss_weight=rl_loss_weight, distill_loss_weight=0.5
    )
    trajectory = two_groups()[0]
    wanted, _ = trained(folder, [trajectory], teacher, reward_norm=GRPO)
    found, _ = trained(folder, [copied(trajectory, [4, 1, 2])], teacher, reward_norm=GRPO)
    for key, weight in found.items():
        torch.testing.assert_close(weight, wanted[key], rtol=1e-4, atol=2e-6)


def test_the_critic_too(folder):
    def step(trajectory: dict[str, Any]) -> dict[str, torch.Tensor]:
        critic = open_critic(folder, ppo_n_minibatches=1, optimizer=PLAIN_SGD)
        data = collect([trajectory])
        data["values"] = critic.compute_values(data)
        data["returns"] = torch.ones_like(data["values"]) * data["rewards"][:, None]
        critic.ppo_update(data)
        return {name: tensor.clone() for name, tensor in critic.engine.hf_weights()}

    wanted, found = step(two_groups()[0]), step(copied(two_groups()[0], [4, 1, 2]))
    for key, weight in found.items():
        torch.testing.assert_close(weight, wanted[key], rtol=1e-4, atol=2e-6)


def test_credit_by_hand(folder):
    """Two episodes: rewards 1 in two rows of 2 and 4 tokens, 0 in one row of 3 tokens."""
    trajectory = group(2, [2, 4, 3], [1.0, 1.0, 0.0]) | {EPISODE_KEY: torch.tensor([7, 7, 2])}
    actor = open_actor(
        folder,
        reward_norm=NormConfig(mean_level="group", std_level=None),
        adv_norm=NormConfig(mean_level="batch", std_level=None),
    )
    data = advantages(actor, [trajectory])
    assert data["credit"][:, 0].tolist() == [0.5, 0.5, 1.0]
    assert loss_weight(data).item() == (2 + 4) / 2 + 3
    # The baseline is the mean of two episodes, 0.5, so tokens have 0.5, 0.5 and -0.5. Their mean by
    # credit is (0.5 * 3 - 0.5 * 3) / 6 = 0; by rows it would be 1/6, by tokens 1/6 as well.
    for row, advantage in enumerate([0.5, 0.5, -0.5]):
        learned = data["advantages"][row][data["loss_mask"][row]]
        assert learned.tolist() == pytest.approx([advantage] * len(learned))


def test_single_rows_have_no_credit_of_their_own():
    """So nothing changes for them, not even by rounding."""
    trajectories = [
        trajectory | {EPISODE_KEY: torch.arange(n)}
        for trajectory, n in zip(two_groups(), (3, 2, 2), strict=True)
    ]
    for batch in (two_groups(), trajectories):
        data = collect(batch)
        assert "credit" not in data
        assert loss_weight(data).item() == data["loss_mask"].sum().item()
