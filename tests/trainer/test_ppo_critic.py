"""PPOCritic over the real engine: its update against the definition, and what it learns."""

from __future__ import annotations

import pytest
import torch
from tiny import write_tiny_model
from tiny_ppo import PLAIN_SGD, group, open_critic, two_groups, weights_of

from areal.algorithm.loss import HUBER_DELTA
from areal.api.config.train_engine import MicroBatchSpec
from areal.trainer.ppo.batch import collect
from areal.utils import stats_tracker


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(autouse=True)
def fresh_stats():
    stats_tracker.export()


def with_returns(critic, trajs: list[dict]) -> dict:
    data = collect(trajs)
    returns = torch.randn(data["loss_mask"].shape, generator=torch.Generator().manual_seed(1))
    return data | {"values": critic.compute_values(data), "returns": returns}


def test_the_update_is_the_gradient_of_the_clipped_error(folder):
    options = dict(ppo_n_minibatches=1, optimizer=PLAIN_SGD, eps_clip=0.1)
    critic = open_critic(folder, **options, mb_spec=MicroBatchSpec(max_tokens_per_mb=12))
    data = with_returns(critic, two_groups())
    data["values"] += 0.3  # as if the values had moved since: some are clipped
    critic.ppo_update(data)
    stats = stats_tracker.export()

    plain = open_critic(folder, **options)

    def loss_fn(values, mb):
        old, returns, mask = mb["values"], mb["returns"], mb["loss_mask"]
        near = torch.minimum(torch.maximum(values, old - 0.1), old + 0.1)
        error = torch.maximum((values - returns) ** 2, (near - returns) ** 2) / 2
        return error[mask].mean()

    expected = plain.engine.train_batch(data, loss_fn, lambda mb: mb["loss_mask"].sum())
    assert stats["critic/loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert 0 < stats["critic/clip_ratio"] < 1
    wanted = weights_of(plain)
    for name, weight in weights_of(critic).items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-4, atol=1e-6)


def test_values_learn_the_returns(folder):
    critic = open_critic(folder, ppo_n_minibatches=2, optimizer={"lr": 3e-2})
    history = []
    for _ in range(25):
        critic.ppo_update(with_returns(critic, two_groups()))
        stats = stats_tracker.export()
        history.append(stats["critic/explained_variance"])
        assert stats["critic/update_successful__count"] == 2
    assert history[-1] > 0.8 > history[0]


def test_the_config_chooses_the_error(folder):
    """Returns of 100 are far beyond the bound from which a Huber error grows in proportion."""
    losses = {}
    for name in ("squared", "huber"):
        critic = open_critic(folder, ppo_n_minibatches=1, value_error=name)
        data = with_returns(critic, two_groups())
        data["returns"] = torch.full_like(data["returns"], 100.0)
        critic.ppo_update(data)
        losses[name] = stats_tracker.export()["critic/loss"]
    assert losses["squared"] == pytest.approx(100**2 / 2, rel=0.05)
    assert losses["huber"] == pytest.approx(HUBER_DELTA * (100 - HUBER_DELTA / 2), rel=0.05)


def test_answers_cut_off_by_length_can_be_left_out(folder):
    critic = open_critic(folder, mask_no_eos_with_zero=True, ppo_n_minibatches=3)
    trajs = [group(2, [3, 4], [0.0, 0.0]) | {"seq_no_eos": torch.tensor([True, True])}]
    before = weights_of(critic)
    critic.ppo_update(with_returns(critic, trajs))  # every minibatch is empty: none is stepped
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(critic).items())
    trajs[0]["seq_no_eos"] = torch.tensor([True, False])
    critic.ppo_update(with_returns(critic, trajs))
    assert stats_tracker.export()["critic/n_tokens"] == 4
    del trajs[0]["seq_no_eos"]
    with pytest.raises(ValueError, match=r"critic\.mask_no_eos_with_zero needs .*seq_no_eos"):
        critic.ppo_update(with_returns(critic, trajs))
