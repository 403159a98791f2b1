"""The actor's update under every objective, against its definition in plain torch."""

from __future__ import annotations

import pickle

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

from areal.algorithm.off_policy import loglinear_prox, m2po_keep
from areal.api.config.ppo import PPOActorConfig, TeacherConfig
from areal.api.config.train_engine import MicroBatchSpec
from areal.trainer.ppo.actor import PolicyObjective
from areal.utils import stats_tracker

ONE_STEP = dict(ppo_n_minibatches=1, optimizer=PLAIN_SGD, reward_norm=GRPO)
CUT = MicroBatchSpec(max_tokens_per_mb=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(autouse=True)
def fresh_stats():
    stats_tracker.export()


def noise(like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def step_by_definition(folder, data, token_loss, **options):
    """Weights and loss of one step on `token_loss(logp, mb)` `[T]`, averaged over the mask."""
    plain = open_actor(folder, **ONE_STEP, **options)

    def loss_fn(logprobs, entropy, mb):
        mask = mb["loss_mask"]
        return token_loss(logprobs, mb).masked_fill(~mask, 0).sum() / mask.sum()

    stats = plain.engine.train_batch(data, loss_fn, lambda mb: mb["loss_mask"].sum())
    return weights_of(plain), stats["loss"]


def assert_same_step(actor, data, expected_weights, expected_loss) -> dict[str, float]:
    actor.ppo_update(data)
    stats = stats_tracker.export()
    assert stats["actor/loss"] == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
    for name, weight in weights_of(actor).items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=1e-4, atol=1e-6)
    return stats


def ratio(logp, mb, prox="prox_logp"):
    return (logp - mb[prox]).masked_fill(~mb["loss_mask"], 0).exp()


def test_gspo(folder):
    actor = open_actor(folder, **ONE_STEP, importance_sampling_level="sequence", mb_spec=CUT)
    data = advantages(actor, with_own_logprobs(actor, two_groups()))

    def gspo(logp, mb):
        out = torch.zeros_like(logp)
        for start, end in mb["cu_seqlens"].unfold(0, 2, 1).tolist():
            mask = mb["loss_mask"][start:end]
            mean = (logp[start:end] - mb["prox_logp"][start:end])[mask].mean()
            out[start:end] = -mean.exp() * mb["advantages"][start:end][mask].mean()
        return out

    assert_same_step(actor, data, *step_by_definition(folder, data, gspo))


def test_sapo(folder):
    actor = open_actor(folder, **ONE_STEP, use_sapo_loss=True, sapo_tau_neg=1.3, mb_spec=CUT)
    data = advantages(actor, two_groups())

    def sapo(logp, mb):
        tau = torch.where(mb["advantages"] > 0, 1.0, 1.3)
        return -4 / tau * torch.sigmoid(tau * (ratio(logp, mb) - 1)) * mb["advantages"]

    assert_same_step(actor, data, *step_by_definition(folder, data, sapo))


def test_cispo(folder):
    options = dict(use_cispo_loss=True, eps_clip=1.0, eps_clip_higher=0.5)
    actor = open_actor(folder, **ONE_STEP, **options, mb_spec=CUT)
    data = advantages(actor, two_groups())

    def cispo(logp, mb):
        return -ratio(logp, mb).clamp(0, 1.5).detach() * mb["advantages"] * logp

    stats = assert_same_step(actor, data, *step_by_definition(folder, data, cispo))
    assert 0 <= stats["actor/clip_ratio"] < 1


def test_kl_as_a_loss_term_reaches_rows_without_advantage(folder):
    actor = open_actor(folder, **ONE_STEP, kl_loss_coef=0.5, kl_estimator="k2", mb_spec=CUT)
    trajs = with_own_logprobs(actor, two_groups())
    logp = advantages(actor, trajs)["logprobs"]
    data = advantages(actor, trajs, ref_logp=logp + noise(logp))

    def loss(logp, mb):
        kl = (logp - mb["ref_logp"]).masked_fill(~mb["loss_mask"], 0) ** 2 / 2
        return -ratio(logp, mb) * mb["advantages"] + 0.5 * kl

    stats = assert_same_step(actor, data, *step_by_definition(folder, data, loss))
    assert stats["actor/computed_seqs_ratio"] == 1
    assert stats["actor/kl_loss/avg"] > 0


@pytest.mark.parametrize("rl_weight", [0.0, 0.7])
def test_a_teacher(folder, rl_weight: float):
    teacher = TeacherConfig(path="unused", rl_loss_weight=rl_weight, distill_loss_weight=0.2)
    actor = open_actor(folder, **ONE_STEP, teacher=teacher, mb_spec=CUT)
    trajs = with_own_logprobs(actor, two_groups())
    logp = advantages(actor, trajs)["logprobs"]
    data = advantages(actor, trajs, teacher_logp=logp + noise(logp))

    def alone(logp, mb):
        gain = (mb["teacher_logp"] - logp).detach()
        return -0.2 * ratio(logp, mb, "logprobs") * gain.masked_fill(~mb["loss_mask"], 0)

    def beside(logp, mb):
        rl = -ratio(logp, mb) * mb["advantages"]
        return 0.7 * rl + 0.2 * (logp - mb["teacher_logp"])

    definition = beside if rl_weight else alone
    stats = assert_same_step(actor, data, *step_by_definition(folder, data, definition))
    assert "actor/teacher_kl/avg" in stats


DECOUPLED = dict(use_decoupled_loss=True)


def decoupled_loss(logp, mb, prox):
    weight = (prox - mb["logprobs"]).masked_fill(~mb["loss_mask"], 0).exp()
    clipped = (logp - prox).masked_fill(~mb["loss_mask"], 0).exp()
    return -weight.detach() * clipped * mb["advantages"]


@pytest.mark.parametrize("method", ["recompute", "loglinear", "metrics", "reuse_train_logp"])
def test_four_ways_to_the_proximal_policy(folder, method: str):
    options = dict(**DECOUPLED, eps_clip=1e9)
    actor = open_actor(folder, **ONE_STEP, **options, prox_logp_method=method, mb_spec=CUT)
    actor.engine.set_version(6)  # the tokens are of version 3
    data = advantages(actor, two_groups())
    assert ("prox_logp" in data) == (method in ("recompute", "metrics"))

    def loss(logp, mb):
        if method == "loglinear":
            prox = loglinear_prox(logp, mb["logprobs"], mb["versions"], 6)
        else:  # at the first step all others are the weights being trained
            prox = logp.detach()
        return decoupled_loss(logp, mb, prox)

    expected = step_by_definition(folder, data, loss, **options)
    stats = assert_same_step(actor, data, *expected)
    errors = {key for key in stats if "logp_error" in key}
    assert bool(errors) == (method == "metrics")
    if method == "metrics":
        assert (
            stats["actor/prox/rollout/logp_error/avg"]
            > stats["actor/prox/loglinear/logp_error/avg"]
        )


def test_m2po_drops_the_same_tokens_however_the_minibatch_is_cut(folder):
    options = dict(**DECOUPLED, m2_threshold=0.04)
    data, finals = None, []
    for spec in (MicroBatchSpec(), MicroBatchSpec(max_tokens_per_mb=1)):
        actor = open_actor(folder, **ONE_STEP, **options, mb_spec=spec)
        data = advantages(actor, two_groups())
        actor.ppo_update(data)
        finals.append(weights_of(actor))
        stats = stats_tracker.export()
        assert 0 < stats["actor/rejected_ratio"] < 1
    for name in finals[0]:
        torch.testing.assert_close(finals[0][name], finals[1][name], rtol=1e-5, atol=1e-7)

    keep = m2po_keep(data["prox_logp"], data["logprobs"], data["loss_mask"], threshold=0.04)

    def loss(logp, mb):
        return decoupled_loss(logp, mb, mb["prox_logp"]) * mb["keep"]

    weights, _ = step_by_definition(folder, data | {"keep": keep}, loss, **DECOUPLED)
    for name in weights:
        torch.testing.assert_close(finals[0][name], weights[name], rtol=1e-4, atol=1e-6)


OWN = dict(policy_loss="sample_losses.clipped_with_metrics", policy_loss_kwargs={"high": 0.5})


@pytest.mark.parametrize("spec", [MicroBatchSpec(), CUT])
@pytest.mark.parametrize("backend", ["archon:d1", "fsdp:d1"])
def test_a_loss_by_import_path(folder, spec, backend):
    actor = open_actor(folder, **ONE_STEP, **OWN, mb_spec=spec, backend=backend)
    data = advantages(actor, two_groups())

    def clipped(logp, mb):
        r = ratio(logp, mb)
        return torch.maximum(-r * mb["advantages"], -r.clamp(0.8, 1.5) * mb["advantages"])

    stats = assert_same_step(actor, data, *step_by_definition(folder, data, clipped))
    assert 0 <= stats["actor/outside_ratio"] <= 1 and stats["actor/ratio/max"] > 0
    assert stats["actor/computed_seqs_ratio"] == 1  # nobody knows what it does without advantages


def test_a_loss_by_import_path_is_weighted_by_the_decoupled_objective(folder):
    own = dict(policy_loss="sample_losses.clipped", policy_loss_kwargs={"low": 1.0, "high": 1e9})
    actor = open_actor(folder, **ONE_STEP, **DECOUPLED, **own, mb_spec=CUT)
    data = advantages(actor, two_groups())

    def loss(logp, mb):
        return decoupled_loss(logp, mb, mb["prox_logp"])

    assert_same_step(actor, data, *step_by_definition(folder, data, loss, **DECOUPLED))


def test_a_loss_of_its_own_teaches_rows_without_advantage(folder):
    actor = open_actor(folder, **ONE_STEP, policy_loss="sample_losses.towards_all_samples")
    data = advantages(actor, [group(3, [2, 4], [1.0, 1.0])])
    assert (data["advantages"] == 0).all()
    assert_same_step(actor, data, *step_by_definition(folder, data, lambda logp, mb: -logp))


def test_the_objective_travels_by_the_path_of_its_loss():
    """What stands behind the path cannot be pickled itself."""
    config = PPOActorConfig(path="tiny", policy_loss="sample_losses.one_half")
    back = pickle.loads(pickle.dumps(PolicyObjective(config)))
    assert back.config == config
    assert not back.is_zero_without_advantage


def test_a_metric_does_not_take_the_name_of_another_statistic(folder):
    actor = open_actor(folder, **ONE_STEP, policy_loss="sample_losses.with_another_entropy")
    with pytest.raises(ValueError, match="the metric 'entropy' is reserved"):
        actor.ppo_update(advantages(actor, two_groups()))


@pytest.mark.parametrize(
    "options, says",
    [
        (
            dict(policy_loss="sample_losses.nothing"),
            "actor.policy_loss: module 'sample_losses' has",
        ),
        (
            dict(policy_loss="sample_losses.of_two_arguments"),
            r"actor.policy_loss: sample_losses.of_two_arguments\(inputs, scale\) cannot be called "
            r"as fn\(inputs, \*\*policy_loss_kwargs\): missing a required .*argument: 'scale'",
        ),
        (
            dict(policy_loss="sample_losses.clipped", policy_loss_kwargs={"hihg": 1}),
            "got an unexpected keyword argument 'hihg'; actor.policy_loss_kwargs is",
        ),
    ],
)
def test_a_loss_that_cannot_be_called_is_refused_at_the_start(options, says):
    with pytest.raises(ValueError, match=says):
        PolicyObjective(PPOActorConfig(path="tiny", **options))
