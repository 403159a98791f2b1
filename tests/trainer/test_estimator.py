"""Advantages with a critic, a reference model and turns, by hand; the adaptive KL coefficient."""

from __future__ import annotations

import pytest
import torch
from tiny import write_tiny_model
from tiny_ppo import advantages, group, open_actor

from areal.api.config.train_engine import NormConfig
from areal.infra.train_controller import divide_rows
from areal.rollout.trajectory import decode, encode
from areal.trainer.episodes import describe_batch
from areal.trainer.ppo.batch import collect
from areal.utils import stats_tracker
from areal.utils.data import pack


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(autouse=True)
def fresh_stats():
    stats_tracker.export()


def one_answer(reward: float = 1.0) -> dict:
    """Prompt of 2 and 3 generated tokens: predicted at positions 1, 2 and 3 of 5."""
    return group(2, [3], [reward])


def test_values_make_the_advantages(folder):
    values = torch.tensor([[9.0, 0.5, 0.25, 0.75, 0.1]])
    actor = open_actor(folder, discount=0.9, gae_lambda=0.8)
    data = advantages(actor, [one_answer()], values=values)
    last = 1 - 0.75
    middle = 0.9 * 0.75 - 0.25 + 0.72 * last
    first = 0.9 * 0.25 - 0.5 + 0.72 * middle
    assert data["advantages"][0].tolist() == pytest.approx([0, first, middle, last, 0])
    returns = data["advantages"] + values * data["loss_mask"]
    torch.testing.assert_close(data["returns"], returns)


def test_a_graded_answer_has_ended_also_when_it_was_cut_off(folder):
    """Only one whose grade is not taken goes on with the value after it."""
    values = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.4]])
    whole = one_answer()
    cut = one_answer() | {"seq_no_eos": torch.tensor([True])}
    plain, masked = open_actor(folder), open_actor(folder, mask_no_eos_with_zero=True)
    assert advantages(plain, [whole], values=values)["returns"][0, 3] == pytest.approx(1.0)
    assert advantages(plain, [cut], values=values)["returns"][0, 3] == pytest.approx(1.0)
    assert advantages(masked, [cut], values=values)["returns"][0, 3] == pytest.approx(0.4)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_as_a_reward(folder, estimator: str):
    actor = open_actor(folder, kl_ctl=0.1, kl_estimator=estimator)
    traj = one_answer()
    logp = advantages(open_actor(folder), [traj])["logprobs"]
    d = torch.tensor([[5.0, 0.5, -0.25, 1.0, 5.0]])  # the ends are off the mask
    data = advantages(actor, [traj], ref_logp=logp - d)
    kl = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[estimator][0, 1:4]
    assert data["kl_rewards"][0].tolist() == pytest.approx([0, *(-0.1 * kl).tolist(), 0], abs=1e-6)
    expected = 1 - 0.1 * kl.flip(0).cumsum(0).flip(0)  # outcome and all KL from here on
    assert data["advantages"][0, 1:4].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    stats = stats_tracker.export()
    assert stats["actor/kl_ref/avg"] == pytest.approx(kl.sum().item(), abs=1e-6)
    assert stats["actor/kl_ctl"] == pytest.approx(0.1)


def test_the_adaptive_coefficient_acts_one_step_later(folder):
    actor = open_actor(folder, kl_ctl=0.1, kl_target=0.5, kl_horizon=10)
    traj = one_answer()
    logp = advantages(open_actor(folder), [traj])["logprobs"]
    far = logp - 1.0  # 3 nats in the answer, six times the target
    first = advantages(actor, [traj], ref_logp=far)["kl_rewards"]
    second = advantages(actor, [traj], ref_logp=far)["kl_rewards"]
    assert first.sum().item() == pytest.approx(-0.3)
    assert second.sum().item() == pytest.approx(-0.3 * (1 + 0.2 / 10))
    assert actor.kl_control.state_dict()["value"] == pytest.approx(0.1 * 1.02**2)
    assert open_actor(folder, kl_ctl=0.1).kl_control is None


def test_turns_are_the_steps_of_gae(folder):
    traj = group(1, [5], [1.0])
    traj["turn_ids"] = torch.tensor([[-1, 0, 0, -1, 1, 1]], dtype=torch.int32)
    traj["loss_mask"] = torch.tensor([[0, 1, 1, 0, 1, 1]], dtype=torch.int32)
    values = torch.tensor([[0.5, 9.0, 9.0, 0.2, 9.0, 9.0]])
    actor = open_actor(folder, gae_timestep_unit="turn", gae_lambda=0.5, discount=0.9)
    data = advantages(actor, [traj], values=values)
    second = 1 - 0.2
    first = 0.9 * 0.2 - 0.5 + 0.45 * second
    expected = [first, first, 0, second, second, 0]
    assert data["advantages"][0].tolist() == pytest.approx(expected)
    del traj["turn_ids"]
    with pytest.raises(ValueError, match=r"gae_timestep_unit=turn needs the key 'turn_ids'"):
        advantages(actor, [traj], values=values)


def test_lambda_as_a_function_of_the_answer(folder):
    values = torch.zeros(2, 7)
    values[:, 1:4] = 0.5
    trajs = [group(2, [2, 5], [1.0, 1.0])]
    named = open_actor(folder, gae_lambda="vapo", gae_lambda_kwargs={"alpha": 0.5})
    got = advantages(named, trajs, values=values)["advantages"]
    for row, num_tokens in enumerate((2, 5)):
        fixed = open_actor(folder, gae_lambda=max(0.0, 1 - 1 / (0.5 * num_tokens)))
        expected = advantages(fixed, trajs, values=values)["advantages"]
        torch.testing.assert_close(got[row], expected[row])
    with pytest.raises(ValueError, match=r"actor\.gae_lambda: unknown name 'vap'.*'vapo'"):
        open_actor(folder, gae_lambda="vap")
    with pytest.raises(ValueError, match="gae_lambda_kwargs.alpha must be above 0, got -1"):
        open_actor(folder, gae_lambda="vapo", gae_lambda_kwargs={"alpha": -1})


def test_group_norm_of_advantages_uses_real_group_sizes(folder):
    actor = open_actor(folder, adv_norm=NormConfig(mean_level="group", std_level=None))
    trajs = [group(2, [1, 1, 1], [1.0, 0.0, 0.5]), group(2, [2], [7.0])]
    data = advantages(actor, trajs)
    rows = [data["advantages"][i][data["loss_mask"][i]].tolist() for i in range(4)]
    assert rows == [[0.5], [-0.5], [0.0], [0.0, 0.0]]


def rows_of_episodes(rewards_of_episodes: list[list[float]]) -> dict:
    """A group whose episodes exported one row for each of their rewards."""
    rewards = [reward for rewards in rewards_of_episodes for reward in rewards]
    ids = [i for i, rewards in enumerate(rewards_of_episodes) for _ in rewards]
    return group(2, [1] * len(rewards), rewards) | {"episode_ids": torch.tensor(ids).int()}


@pytest.mark.parametrize(
    "norm, expected",
    [
        (dict(mean_level="group", std_level=None), [0.5, 0.5, 0.5, -0.5, 0.0]),
        (
            dict(mean_level="group", std_level=None, mean_leave1out=True),
            [1.0, 1.0, 1.0, -1.0, 0.0],
        ),
        (dict(mean_level="batch", std_level=None), [1 / 3] * 3 + [-2 / 3, 1 / 3]),
        (
            dict(mean_level="group", std_level="group", eps=0.0),
            [0.5**0.5] * 3 + [-(0.5**0.5), 0.0],
        ),
    ],
)
def test_baselines_are_over_episodes_and_not_over_their_rows(folder, norm, expected):
    """An episode of three rows that earned 1 beside one of one row that earned 0, and a prompt
    whose only episode (as an older run stored it, without the key) earned 1."""
    actor = open_actor(folder, reward_norm=NormConfig(**norm))
    trajs = [rows_of_episodes([[1.0, 1.0, 1.0], [0.0]]), group(2, [1], [1.0])]
    data = advantages(actor, trajs)
    found = data["advantages"][data["loss_mask"]].tolist()
    assert found == pytest.approx(expected, abs=1e-6)


def test_each_episode_is_the_same_whether_it_exports_one_row_or_several(folder):
    actor = open_actor(folder, reward_norm=NormConfig(mean_level="group", std_level="group"))
    one = advantages(actor, [rows_of_episodes([[1.0], [0.0], [0.5]])])["advantages"][:, 1]
    many = advantages(actor, [rows_of_episodes([[1.0] * 4, [0.0] * 2, [0.5]])])
    assert many["advantages"][[0, 4, 6], 1].tolist() == pytest.approx(one.tolist())
    assert describe_batch(many, version=3)["rollout/reward"] == pytest.approx(0.5)


def test_mixed_levels_do_not_explode_on_a_group_of_equal_rewards(folder):
    trajs = [group(2, [1, 1], [1.0, 1.0]), group(2, [1, 1], [0.0, 1.0])]
    for mean_level in ("batch", None):
        actor = open_actor(folder, reward_norm=NormConfig(mean_level=mean_level, std_level="group"))
        assert advantages(actor, trajs)["advantages"].abs().max() <= 2


def test_the_number_of_an_episode_travels_with_its_row():
    """Through the ledger's bytes, the batch of a step, data-parallel parts and packing."""
    trajs = [rows_of_episodes([[1.0, 1.0], [0.0]]), rows_of_episodes([[1.0], [0.0, 0.0]])]
    data = collect([decode(encode(traj)) for traj in trajs])
    assert data["episode_ids"].tolist() == [0, 0, 1, 2, 3, 3]
    for rows in divide_rows(data, num_places=2):
        packed = pack(data, rows)
        assert packed["episode_ids"].tolist() == data["episode_ids"][rows].tolist()
