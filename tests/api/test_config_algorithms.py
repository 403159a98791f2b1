"""Algorithms as combinations of keys: each known one loads, each senseless one gives its reason."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest
from config_files import complaint, load

from areal.algorithm import KL_ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES
from areal.api.cli_args import (
    DPOActorConfig,
    PPOActorConfig,
    RejectionSamplingConfig,
    dump_yaml,
    load_expr_config,
)
from areal.api.config.section import field_types

GROUP = "actor.reward_norm={mean_level: group, std_level: group}"
DECOUPLED = "actor.use_decoupled_loss=true"
TOKEN_CLAMP = "actor.rejection_sampling={action: clamp, upper: 2.0}"
KPOP = "actor.rejection_sampling={metric: binary_kl, upper: 2.0}"
ICEPOP = "actor.rejection_sampling={lower: 0.5, upper: 5.0}"
MIS = "actor.rejection_sampling={level: sequence, agg: sum, upper: 2.0}"
OVERLONG = "actor.overlong_reward_penalty=true"
KEEP = "dynamic_filter_fn=keep_mixed_groups"

# algorithm -> the keys that make it, and the loss they select.
ALGORITHMS = {
    "grpo": (["actor.adv_norm={}", GROUP], "ppo"),
    "dr_grpo": (["actor.reward_norm={mean_level: group, std_level: null}"], "ppo"),
    "lite_ppo": (["actor.reward_norm={mean_level: group, std_level: batch}"], "ppo"),
    "rloo": (
        ["actor.reward_norm={mean_level: group, mean_leave1out: true, std_level: null}"],
        "ppo",
    ),
    "reinforce++": (["actor.adv_norm={}", "actor.kl_ctl=0.001", "ref={}"], "ppo"),
    "reinforce++_baseline": (
        [
            "actor.reward_norm={mean_level: group, std_level: null}",
            "actor.adv_norm={}",
            "actor.kl_loss_coef=0.001",
            "actor.kl_estimator=k2",
            "ref={}",
        ],
        "ppo",
    ),
    "ppo": (["critic={}", "actor.gae_lambda=0.95", "actor.discount=0.99"], "ppo"),
    "vapo_lambda": (
        ["critic={}", "actor.gae_lambda=vapo", "actor.gae_lambda_kwargs.alpha=0.05"],
        "ppo",
    ),
    "turn_gae": (["critic={}", "actor.gae_timestep_unit=turn"], "ppo"),
    "dapo": (
        [
            GROUP,
            "actor.eps_clip_higher=0.28",
            OVERLONG,
            "actor.overlong_tokens=8",
            "actor.overlong_penalty_factor=1.0",
            "dynamic_bs=true",
            KEEP,
        ],
        "ppo",
    ),
    "gspo": ([GROUP, "actor.importance_sampling_level=sequence", "actor.eps_clip=3e-4"], "gspo"),
    "sapo": ([GROUP, "actor.use_sapo_loss=true"], "sapo"),
    "cispo": (
        [GROUP, "actor.use_cispo_loss=true", "actor.eps_clip=1", "actor.eps_clip_higher=4"],
        "cispo",
    ),
    "m2po": ([GROUP, DECOUPLED, "actor.m2_threshold=0.04"], "ppo"),
    "dual_clip": ([GROUP, "actor.c_clip=3.0"], "ppo"),
    "tis": ([GROUP, DECOUPLED, TOKEN_CLAMP], "ppo"),
    "icepop": ([GROUP, DECOUPLED, ICEPOP], "ppo"),
    "kpop": ([GROUP, DECOUPLED, KPOP], "ppo"),
    "mis": ([GROUP, DECOUPLED, MIS], "ppo"),
    "loglinear": ([GROUP, DECOUPLED, "actor.prox_logp_method=loglinear"], "ppo"),
    "prox_metrics": ([GROUP, DECOUPLED, "actor.prox_logp_method=metrics"], "ppo"),
    "reuse_train_logp": (
        [DECOUPLED, "actor.prox_logp_method=reuse_train_logp", "actor.ppo_n_minibatches=1"],
        "ppo",
    ),
    "kl_adaptive": (["actor.kl_ctl=0.1", "actor.kl_target=6.0", "ref={}"], "ppo"),
    "distillation": ([GROUP, "teacher.path=big"], "ppo"),
    "distillation_only": (["teacher={path: big, rl_loss_weight: 0}"], "ppo"),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_accepted(tmp_path: Path, name: str) -> None:
    overrides, policy_loss = ALGORITHMS[name]
    assert load(tmp_path, "ppo", *overrides).actor.policy_loss == policy_loss


OWN_LOSS = "actor.policy_loss=my_package.losses.mine"

# The keys, the key the message begins with, and its reason.
SENSELESS = [
    # losses
    (
        ["actor.policy_loss=cispo"],
        "actor.policy_loss cispo is chosen by use_cispo_loss: true",
    ),
    (
        ["actor.policy_loss=gspo", "actor.use_sapo_loss=true"],
        "actor.policy_loss gspo is chosen by importance_sampling_level: sequence",
    ),
    (
        ["actor.policy_loss=mine"],
        "actor.policy_loss must be the import path of a function, like my_package.losses.my_loss",
    ),
    ([OWN_LOSS, "actor.eps_clip=0.1"], "actor.eps_clip must be left out with policy_loss"),
    ([OWN_LOSS, "actor.eps_clip_higher=0"], "actor.eps_clip_higher must be left out with policy_l"),
    ([OWN_LOSS, "actor.c_clip=3"], "actor.c_clip must be left out with policy_loss"),
    ([OWN_LOSS, "actor.use_sapo_loss=true"], "actor.use_sapo_loss must be left out with policy_l"),
    (
        [OWN_LOSS, "actor.importance_sampling_level=sequence"],
        "actor.importance_sampling_level must be left out with policy_loss",
    ),
    (
        ["actor.policy_loss_kwargs={a: 1}"],
        "actor.policy_loss_kwargs are arguments of a function: name it in policy_loss",
    ),
    (
        ["actor.use_sapo_loss=true", "actor.use_cispo_loss=true", "actor.eps_clip_higher=4"],
        "actor.use_sapo_loss and use_cispo_loss are two losses: set one of them",
    ),
    (
        ["actor.use_sapo_loss=true", DECOUPLED],
        "actor.use_decoupled_loss must be false with use_sapo_loss: its gate is defined around the "
        "policy that sampled",
    ),
    (
        ["actor.use_sapo_loss=true", "actor.eps_clip_higher=0.3"],
        "actor.eps_clip_higher must be left out with use_sapo_loss: its gate replaces the clip",
    ),
    (
        ["actor.use_sapo_loss=true", "actor.c_clip=3"],
        "actor.c_clip must be left out with use_sapo_loss",
    ),
    (
        ["actor.use_sapo_loss=true", "actor.importance_sampling_level=sequence"],
        "actor.importance_sampling_level must be 'token' with use_sapo_loss",
    ),
    (
        ["actor.use_cispo_loss=true"],
        "actor.eps_clip_higher must be set with use_cispo_loss",
    ),
    (
        ["actor.use_cispo_loss=true", "actor.eps_clip_higher=0"],
        "actor.eps_clip_higher must be above 0 with use_cispo_loss",
    ),
    (
        [
            "actor.use_cispo_loss=true",
            "actor.eps_clip_higher=4",
            "actor.importance_sampling_level=sequence",
        ],
        "actor.importance_sampling_level must be 'token' with use_cispo_loss",
    ),
    (
        ["actor.use_cispo_loss=true", "actor.eps_clip_higher=4", "actor.c_clip=3"],
        "actor.c_clip must be left out with use_cispo_loss",
    ),
    (["actor.sapo_tau_pos=0"], "actor.sapo_tau_pos must be above 0, got 0.0"),
    # the proximal policy
    (
        ["actor.m2_threshold=0.04"],
        "actor.use_decoupled_loss must be true for m2_threshold to act: it compares the proximal "
        "policy with the one that sampled",
    ),
    (
        ["actor.m2_threshold=0.04", "actor.recompute_logprob=true"],
        "actor.use_decoupled_loss must be true for m2_threshold to act",
    ),
    (["actor.m2_threshold=0", DECOUPLED], "actor.m2_threshold must be above 0"),
    (
        ["actor.m2_threshold=0.04", DECOUPLED, "actor.prox_logp_method=loglinear"],
        "actor.m2_threshold needs prox_logp_method 'recompute': 'loglinear' finds the proximal "
        "policy too late to choose tokens by it",
    ),
    (
        [ICEPOP],
        "actor.use_decoupled_loss must be true for rejection_sampling to act",
    ),
    *(
        (
            [f"actor.prox_logp_method={method}"],
            f"actor.use_decoupled_loss must be true for prox_logp_method '{method}' to act",
        )
        for method in ("loglinear", "metrics", "reuse_train_logp")
    ),
    (
        [DECOUPLED, "actor.prox_logp_method=reuse_train_logp"],
        "actor.ppo_n_minibatches must be 1 with prox_logp_method 'reuse_train_logp': later "
        "minibatches are trained on other weights",
    ),
    *(
        (
            [
                DECOUPLED,
                f"actor.prox_logp_method={method}",
                "actor.recompute_logprob=true",
                "actor.ppo_n_minibatches=1",
            ],
            f"actor.recompute_logprob must be false with prox_logp_method '{method}'",
        )
        for method in ("loglinear", "reuse_train_logp")
    ),
    # rejection sampling
    (
        [DECOUPLED, "actor.rejection_sampling={metric: kl_k2, action: clamp}"],
        "actor.rejection_sampling.metric must be 'ratio' with action 'clamp', got 'kl_k2'",
    ),
    (
        [DECOUPLED, "actor.rejection_sampling={agg: max}"],
        "actor.rejection_sampling.agg aggregates over a sequence: set level 'sequence'",
    ),
    (
        [DECOUPLED, "actor.rejection_sampling={upper: 0.9}"],
        "actor.rejection_sampling.upper must be at least 1 with metric 'ratio'",
    ),
    (
        [DECOUPLED, "actor.rejection_sampling={lower: 1.5}"],
        "actor.rejection_sampling.lower must lie between 0 and 1 with metric 'ratio'",
    ),
    *(
        (
            [DECOUPLED, f"actor.rejection_sampling={{metric: {metric}, lower: 0.1}}"],
            f"actor.rejection_sampling.lower must be left out with metric '{metric}': it would "
            "reject the tokens on which the policies agree",
        )
        for metric in ("kl_k2", "kl_k3", "binary_kl")
    ),
    # normalisation
    (
        ["actor.reward_norm={mean_level: null, std_level: null}"],
        "actor.reward_norm.mean_level and std_level are both null, which changes nothing",
    ),
    (
        ["actor.adv_norm={mean_level: null, mean_leave1out: true}"],
        "actor.adv_norm.mean_leave1out needs a mean: set mean_level",
    ),
    *(
        (
            [f"actor.{norm}={{mean_level: group}}", "gconfig.n_samples=1"],
            f"gconfig.n_samples must be at least 2 when actor.{norm} compares the samples",
        )
        for norm in ("reward_norm", "adv_norm")
    ),
    # advantages
    (
        ["actor.gae_lambda_kwargs={alpha: 0.1}"],
        "actor.gae_lambda_kwargs are arguments of a function: name it in gae_lambda, which is 1.0",
    ),
    (["actor.gae_lambda=1.1"], "actor.gae_lambda must lie between 0 and 1, got 1.1"),
    (["actor.gae_lambda=nan"], "actor.gae_lambda must lie between 0 and 1, got nan"),
    (["actor.gae_lambda=''"], "actor.gae_lambda must be a number or a name"),
    (["actor.gae_lambda=true"], "actor.gae_lambda must be a number or text, got true"),
    (["actor.gae_lambda=null"], "actor.gae_lambda must be a number or text, got null"),
    (["actor.gae_timestep_unit=step"], "actor.gae_timestep_unit must be one of token, turn"),
    # DAPO
    ([OVERLONG], "actor.overlong_tokens must be set with overlong_reward_penalty"),
    (
        [OVERLONG, "actor.overlong_tokens=8"],
        "actor.overlong_penalty_factor must be set with overlong_reward_penalty",
    ),
    (
        ["actor.overlong_tokens=8"],
        "actor.overlong_reward_penalty must be true for overlong_tokens to act, got False",
    ),
    (
        ["actor.overlong_penalty_factor=1"],
        "actor.overlong_reward_penalty must be true for overlong_penalty_factor to act",
    ),
    (
        [OVERLONG, "actor.overlong_tokens=33", "actor.overlong_penalty_factor=1"],
        "actor.overlong_tokens must not exceed max_new_tokens (32), got 33",
    ),
    (
        ["dynamic_bs=true"],
        "dynamic_bs needs dynamic_filter_fn: without a filter every prompt is accepted, got True",
    ),
    # KL
    (
        ["actor.kl_ctl=0.1"],
        "ref must be set for a KL penalty (`ref: {}` is the model that training starts from); "
        "actor.kl_ctl=0.1, actor.kl_loss_coef=0.0",
    ),
    (["actor.kl_loss_coef=0.1"], "ref must be set for a KL penalty"),
    (
        ["actor.kl_target=6"],
        "actor.kl_ctl must be above 0 with kl_target, which adapts it from there, got 0.0",
    ),
    (
        ["actor.kl_target=6", "actor.kl_loss_coef=0.1", "ref={}"],
        "actor.kl_ctl must be above 0 with kl_target",
    ),
    (
        ["actor.kl_loss_coef=0.1", "actor.kl_estimator=k1", "ref={}"],
        "actor.kl_estimator must be k2 or k3 with kl_loss_coef: the gradient of k1 does not depend "
        "on the reference model, got 'k1'",
    ),
    (["actor.kl_ctl=-1"], "actor.kl_ctl must be at least 0, got -1.0"),
    (["actor.kl_horizon=0"], "actor.kl_horizon must be at least 1, got 0"),
    # roles
    (
        [GROUP, "critic={}"],
        "critic and actor.reward_norm by group are two baselines: remove critic (GRPO), or "
        "reward_norm (PPO)",
    ),
    (
        ["actor.reward_norm={mean_level: null, std_level: group}", "critic={}"],
        "critic and actor.reward_norm by group are two baselines",
    ),
    (
        ["critic.ppo_n_minibatches=9"],
        "critic.ppo_n_minibatches must not exceed the samples of a step, "
        "train_dataset.batch_size * gconfig.n_samples = 8, got 9",
    ),
    (
        ["critic.is_critic=false"],
        "critic.is_critic must be true: a critic gives values, got False",
    ),
    (
        ["actor.is_critic=true"],
        "actor.is_critic must be false: this trainer needs a language model",
    ),
    (["teacher={}"], "teacher.path must be set: the model to learn from"),
    (
        ["teacher={path: big, rl_loss_weight: 0, distill_loss_weight: 0}"],
        "teacher.distill_loss_weight must be above 0, or the teacher has no effect: remove the "
        "section to train without one (rl_loss_weight is 0.0), got 0.0",
    ),
    (
        ["teacher={path: big, distill_loss_weight: 0}"],
        "teacher.distill_loss_weight must be above 0, or the teacher has no effect",
    ),
    (
        ["teacher={path: big, distill_loss_weight: -1}"],
        "teacher.distill_loss_weight must be above 0, got -1.0",
    ),
    (
        ["teacher={path: big, rl_loss_weight: 0}", "critic={}"],
        "critic must be left out, teacher.rl_loss_weight is 0: nothing reads the advantages",
    ),
    (
        ["teacher={path: big, rl_loss_weight: 0}", "actor.kl_ctl=0.1", "ref={}"],
        "actor.kl_ctl must be 0, teacher.rl_loss_weight is 0",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "says"), SENSELESS, ids=[" ".join(overrides) for overrides, _ in SENSELESS]
)
def test_senseless_combination_is_refused_with_the_reason(
    tmp_path: Path, overrides: list[str], says: str
) -> None:
    place, _, message = complaint(tmp_path, "ppo", *overrides).partition(": ")
    assert message.startswith(says), message
    assert place == "command line" or place.startswith(str(tmp_path))


def test_a_loss_by_import_path(tmp_path: Path) -> None:
    actor = load(tmp_path, "ppo", OWN_LOSS, "actor.policy_loss_kwargs={floor: -5}").actor
    assert actor.policy_loss == "my_package.losses.mine"
    assert actor.policy_loss_kwargs == {"floor": -5}


@pytest.mark.parametrize("name", ["gspo", "grpo"])
def test_what_was_chosen_is_written_down_and_loads_again(tmp_path: Path, name: str) -> None:
    config = load(tmp_path, "ppo", *ALGORITHMS[name][0])
    file = tmp_path / "written.yaml"
    file.write_text(dump_yaml(config))
    assert load_expr_config([str(file)], type(config))[0] == config


def test_kpop_can_be_configured(tmp_path: Path) -> None:
    """The documented metric is one the validator knows (and the reference's does not)."""
    rejection = load(tmp_path, "ppo", DECOUPLED, KPOP).actor.rejection_sampling
    assert (rejection.metric, rejection.action, rejection.upper) == ("binary_kl", "mask", 2.0)


def test_decoupled_loss_needs_no_rejection_section_for_its_weight(tmp_path: Path) -> None:
    """No key turns the weight pi_prox / pi_behave off, neither alone nor by leaving one out."""
    actor = load(tmp_path, "ppo", DECOUPLED).actor
    assert actor.use_decoupled_loss
    assert actor.rejection_sampling is None
    assert not [f.name for f in dataclasses.fields(actor) if "behave" in f.name]
    assert "disabled" not in typing.get_args(field_types(RejectionSamplingConfig)["action"])


def test_kl_estimator_defaults_to_one_that_works(tmp_path: Path) -> None:
    def estimator(*overrides: str) -> str:
        return load(tmp_path, "ppo", *overrides).actor.kl_estimator

    assert estimator() == "k1"
    assert estimator("actor.kl_ctl=0.1", "ref={}") == "k1"
    assert estimator("actor.kl_loss_coef=0.1", "ref={}") == "k3"
    assert estimator("actor.kl_ctl=0.1", "actor.kl_estimator=k2", "ref={}") == "k2"


@pytest.mark.parametrize(
    ("written", "value"), [("0.95", 0.95), ("'0.5'", 0.5), ("vapo", "vapo"), ("my.fn", "my.fn")]
)
def test_gae_lambda_is_a_number_or_a_name(tmp_path: Path, written: str, value) -> None:
    assert load(tmp_path, "ppo", f"actor.gae_lambda={written}").actor.gae_lambda == value


def test_choices_are_the_rows_of_the_algorithm_tables() -> None:
    selected = {policy_loss for _, policy_loss in ALGORITHMS.values()}
    assert selected == set(POLICY_LOSSES)
    estimators, none = typing.get_args(field_types(PPOActorConfig)["kl_estimator"])
    assert none is type(None)
    assert set(typing.get_args(estimators)) == set(KL_ESTIMATORS)
    assert set(typing.get_args(field_types(DPOActorConfig)["loss_type"])) == set(PREFERENCE_LOSSES)


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"ppo"}))
def test_a_shipped_loss_is_named_by_its_key_not_as_policy_loss(tmp_path: Path, name: str):
    told = complaint(tmp_path, "ppo", f"actor.policy_loss={name}")
    assert f"policy_loss {name} is chosen by" in told


# A decoupled loss corrects any other.
OF_SHIPPED = [
    name
    for name in field_types(PPOActorConfig)
    if name.startswith("use_") and name.endswith("_loss") and name != "use_decoupled_loss"
]


@pytest.mark.parametrize("key", OF_SHIPPED)
def test_a_loss_of_ones_own_refuses_the_keys_of_shipped_ones(tmp_path: Path, key: str):
    needed = ["actor.eps_clip_higher=4"] if key == "use_cispo_loss" else []
    own = "actor.policy_loss=my.losses.mine"
    told = complaint(tmp_path, "ppo", own, f"actor.{key}=true", *needed)
    assert f"{key} must be left out" in told
