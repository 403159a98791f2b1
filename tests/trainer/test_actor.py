"""PPOActor over the real engine: advantages by hand, the update against the definition."""

from __future__ import annotations

import pytest
import torch
from tiny import write_tiny_model
from tiny_ppo import (
    GRPO,
    PLAIN_SGD,
    advantages,
    group,
    open_actor,
    two_groups,
    weights_of,
    with_own_logprobs,
)

from areal.algorithm.loss import LossInputs, ppo_clip_loss
from areal.api.config.ppo import RejectionSamplingConfig
from areal.api.config.train_engine import MicroBatchSpec, NormConfig
from areal.utils import stats_tracker


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(autouse=True)
def fresh_stats():
    stats_tracker.export()


def test_every_generated_token_carries_its_groups_advantage(folder):
    actor = open_actor(folder, reward_norm=NormConfig(mean_level="group", std_level=None))
    data = advantages(actor, two_groups())
    expected = [2 / 3, -1 / 3, -1 / 3, -0.5, 0.5, 0.0, 0.0]
    for row, advantage in enumerate(expected):
        learned = data["advantages"][row][data["loss_mask"][row]]
        assert learned.tolist() == pytest.approx([advantage] * len(learned))
    assert (data["advantages"][~data["loss_mask"]] == 0).all()


def test_everything_known_of_a_token_moves_together(folder):
    traj = group(2, [3], [1.0])
    traj["versions"] = torch.tensor([[-1, -1, 4, 5, 6]], dtype=torch.int32)
    traj["turn_ids"] = torch.tensor([[-1, -1, 0, 0, 1]], dtype=torch.int32)
    data = advantages(open_actor(folder), [traj])
    assert data["loss_mask"].tolist() == [[False, True, True, True, False]]
    assert data["versions"].tolist() == [[-1, 4, 5, 6, -1]]
    assert data["turn_ids"].tolist() == [[-1, 0, 0, 1, -1]]
    assert data["logprobs"][0, 1:4].tolist() == traj["logprobs"][0, 2:].tolist()
    assert data["tot_rewards"].tolist() == [[0, 0, 0, 1, 0]]


def test_only_answers_the_workflow_calls_cut_off_lose_their_reward(folder):
    trajs = [group(2, [2, 5], [1.0, 1.0])]  # the second fills the padded width, and ended with EOS
    actor = open_actor(folder, mask_no_eos_with_zero=True)
    assert advantages(actor, trajs)["tot_rewards"].sum(1).tolist() == [1.0, 1.0]
    trajs[0]["seq_no_eos"] = torch.tensor([True, False])
    assert advantages(actor, trajs)["tot_rewards"].sum(1).tolist() == [0.0, 1.0]
    del trajs[0]["seq_no_eos"]
    with pytest.raises(ValueError, match="seq_no_eos"):
        advantages(actor, trajs)


def test_overlong_answers_pay(folder):
    actor = open_actor(
        folder,
        overlong_reward_penalty=True,
        overlong_tokens=4,
        overlong_penalty_factor=1.0,
        max_new_tokens=8,
    )
    data = advantages(actor, [group(2, [4, 6, 8], [1.0, 1.0, 1.0])])
    assert data["tot_rewards"].sum(1).tolist() == [1.0, 0.5, 0.0]


def test_advantages_are_normalised_over_loss_tokens(folder):
    actor = open_actor(folder, adv_norm=NormConfig())
    data = advantages(actor, two_groups())
    learned = data["advantages"][data["loss_mask"]]
    assert learned.mean().item() == pytest.approx(0, abs=1e-6)
    assert learned.std().item() == pytest.approx(1, abs=1e-4)


def test_the_update_is_the_gradient_of_the_ppo_loss_over_all_tokens(folder):
    """Also of the tokens it does not compute: they stay in the denominator."""
    options = dict(reward_norm=GRPO, ppo_n_minibatches=1, optimizer=PLAIN_SGD)
    actor = open_actor(folder, **options, mb_spec=MicroBatchSpec(max_tokens_per_mb=12))
    data = advantages(actor, with_own_logprobs(actor, two_groups()))
    before = weights_of(actor)
    actor.ppo_update(data)
    stats = stats_tracker.export()
    assert stats["actor/computed_seqs_ratio"] == pytest.approx(5 / 7)

    plain = open_actor(folder, **options)

    def loss_fn(logprobs, entropy, mb):
        inputs = LossInputs(logprobs, mb["logprobs"], mb["advantages"], mb["loss_mask"])
        return ppo_clip_loss(inputs, eps_clip=0.2)[0]

    expected = plain.engine.train_batch(data, loss_fn, lambda mb: mb["loss_mask"].sum())
    for name in ("loss", "grad_norm"):
        assert stats[f"actor/{name}"] == pytest.approx(expected[name], rel=1e-4, abs=1e-7)
    wanted = weights_of(plain)
    for name, weight in weights_of(actor).items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-5, atol=1e-6)
        assert not torch.equal(weight, before[name])


def test_on_policy_ratios_are_one_in_the_first_minibatch(folder):
    actor = open_actor(folder, reward_norm=GRPO, ppo_n_minibatches=1)
    actor.ppo_update(advantages(actor, with_own_logprobs(actor, two_groups())))
    stats = stats_tracker.export()
    for bound in ("min", "max"):
        assert stats[f"actor/importance_weight/{bound}"] == pytest.approx(1, abs=1e-5)
    assert stats["actor/clip_ratio"] == 0


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, {"prox": "sampled", "behave": "sampled"}),
        ({"recompute_logprob": True}, {"prox": "computed", "behave": "computed"}),
        ({"use_decoupled_loss": True}, {"prox": "computed", "behave": "sampled"}),
        (
            {"use_decoupled_loss": True, "prox_logp_method": "loglinear"},
            {"prox": "absent", "behave": "sampled"},
        ),
    ],
)
def test_which_policy_plays_which_part(folder, options: dict, keys: dict[str, str]):
    actor = open_actor(folder, **options)
    trajs = two_groups()
    data = advantages(actor, trajs)
    sampled = advantages(open_actor(folder), trajs)["logprobs"]
    values = {"sampled": sampled, "computed": actor.compute_logp(data)}
    if keys["prox"] == "absent":
        assert "prox_logp" not in data
    else:
        assert torch.equal(data["prox_logp"], values[keys["prox"]])
    assert torch.equal(data["logprobs"], values[keys["behave"]])
    # Before training each token's entropy is known where a pass has computed log-probabilities.
    assert ("entropy" in data) == ("computed" in keys.values())
    if "entropy" in data:
        assert data["entropy"].shape == data["logprobs"].shape
        assert (data["entropy"][data["loss_mask"]] > 0).all()


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_an_update_tells_what_its_own_pass_computed_of_tokens(folder, shares_prefixes: bool):
    actor = open_actor(
        folder,
        reward_norm=GRPO,
        ppo_n_minibatches=2,
        optimizer={**PLAIN_SGD, "lr": 1e-9},  # the second minibatch meets nearly the same weights
        mb_spec=MicroBatchSpec(max_tokens_per_mb=12),
        enable_tree_training=shares_prefixes,
    )
    data = advantages(actor, two_groups())
    expected = actor.engine.forward_batch(data, with_entropy=True).unbind(dim=-1)
    found = actor.ppo_update(data)
    shown = data["group_ids"] == 0
    assert 0 < shown.sum() < len(shown)
    for name, value in zip(("train_logp", "entropy"), expected, strict=True):
        torch.testing.assert_close(found[name][shown], value[shown])
        assert found[name][~shown].isnan().all()


def test_an_update_does_not_repeat_what_an_earlier_pass_computed(folder):
    actor = open_actor(folder, reward_norm=GRPO, recompute_logprob=True)
    assert actor.ppo_update(advantages(actor, two_groups())) == {}


def test_the_decoupled_loss_weighs_tokens_also_without_a_rejection_section(folder):
    actor = open_actor(folder, use_decoupled_loss=True, reward_norm=GRPO, ppo_n_minibatches=1)
    data = advantages(actor, two_groups())
    actor.ppo_update(data)
    stats = stats_tracker.export()
    taught = data["loss_mask"] & (data["advantages"] != 0)
    weight = (data["prox_logp"] - data["logprobs"]).exp()[taught]
    assert stats["actor/behave_weight/max"] == pytest.approx(weight.max().item(), rel=1e-4)
    assert stats["actor/behave_weight/avg"] == pytest.approx(weight.mean().item(), rel=1e-4)
    half_squares = weight.log().square() / 2
    assert stats["actor/behave_kl/avg"] == pytest.approx(half_squares.mean().item(), rel=1e-3)


def test_rejected_tokens_teach_nothing(folder):
    everything = RejectionSamplingConfig(level="sequence", metric="kl_k2", upper=1e-9)
    actor = open_actor(
        folder,
        use_decoupled_loss=True,
        rejection_sampling=everything,
        reward_norm=GRPO,
        optimizer=PLAIN_SGD,
    )
    before = weights_of(actor)
    actor.ppo_update(advantages(actor, two_groups()))
    assert stats_tracker.export()["actor/rejected_ratio"] == 1
    after = weights_of(actor)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_loglinear_uses_the_engines_version(folder):
    actor = open_actor(
        folder,
        use_decoupled_loss=True,
        prox_logp_method="loglinear",
        reward_norm=GRPO,
        ppo_n_minibatches=1,
    )
    data = advantages(actor, two_groups())  # tokens of version 3
    actor.engine.set_version(4)
    actor.ppo_update(data)
    assert stats_tracker.export()["actor/behave_weight/max"] == pytest.approx(1)  # prox = behave
    actor.engine.set_version(6)
    actor.ppo_update(data)
    assert stats_tracker.export()["actor/behave_weight/max"] != pytest.approx(1)


def test_one_schedule_step_and_one_optimizer_step_per_minibatch(folder):
    actor = open_actor(folder, ppo_n_minibatches=3, optimizer={"lr": 1.0, "warmup_steps": 4})
    assert actor.engine.optimizer.lr == pytest.approx(1 / 5)
    actor.ppo_update(advantages(actor, two_groups()))
    assert actor.engine.optimizer.lr == pytest.approx(2 / 5)
    assert stats_tracker.export()["actor/update_successful__count"] == 3


def test_a_batch_without_any_signal_still_takes_its_steps(folder):
    actor = open_actor(folder, reward_norm=GRPO, optimizer=PLAIN_SGD, ppo_n_minibatches=2)
    before = weights_of(actor)
    actor.ppo_update(advantages(actor, [group(2, [2, 3], [1.0, 1.0])]))
    assert stats_tracker.export()["actor/grad_norm"] == 0
    assert all(torch.equal(w, before[name]) for name, w in weights_of(actor).items())


def test_equal_runs_give_equal_bits(folder):
    finals = []
    for _ in range(2):
        actor = open_actor(folder, reward_norm=GRPO, ppo_n_minibatches=2)
        for step in range(3):
            trajs = [group(3, [4, 2, 5], [1.0, 0.0, 0.5], seed=step), *two_groups()]
            actor.ppo_update(advantages(actor, trajs))
        finals.append(weights_of(actor))
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


def test_good_answers_become_likelier(folder):
    actor = open_actor(folder, reward_norm=GRPO, ppo_n_minibatches=1)
    trajs = [group(3, [4, 4], [1.0, 0.0], seed=9)]
    first = actor.compute_logp(trajs[0])
    for _ in range(5):
        actor.ppo_update(advantages(actor, with_own_logprobs(actor, trajs)))
    gain = ((actor.compute_logp(trajs[0]) - first) * trajs[0]["loss_mask"].roll(-1, 1)).sum(1)
    assert gain[0] > 0 > gain[1]
