"""ref, critic, teacher, and the trainers of preferences: what each takes from the actor."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import complaint, load

from areal.api.cli_args import TrainEngineConfig, dump_yaml, experiment_class, load_expr_config

ALL_ROLES = (
    "actor.kl_ctl=0.1",
    "actor.temperature=0.7",
    "gconfig.temperature=0.7",
    "actor.dtype=bfloat16",
    "actor.mb_spec.max_tokens_per_mb=512",
    "actor.logprobs_chunk_size=64",
    "ref={}",
    "critic={}",
    "teacher.path=big",
)


def test_roles_take_what_they_leave_out_from_the_actor(tmp_path: Path) -> None:
    config = load(tmp_path, "ppo", *ALL_ROLES)
    assert list(config.models()) == ["actor", "ref", "critic", "teacher"]
    assert (config.ref.path, config.critic.path, config.teacher.path) == ("tiny", "tiny", "big")
    for role in (config.ref, config.teacher):
        assert (role.backend, role.dtype) == ("archon:d1", "bfloat16")
        assert role.mb_spec == config.actor.mb_spec
    assert config.critic.dtype == "bfloat16"
    assert config.critic.mb_spec == config.actor.mb_spec
    assert config.critic.is_critic
    assert config.critic.optimizer == config.actor.optimizer
    assert config.critic.optimizer is not config.actor.optimizer


def test_roles_keep_what_they_say(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "ppo",
        *ALL_ROLES,
        "ref={path: start, dtype: float32, mb_spec: {n_mbs: 3}}",
        "critic={path: value, optimizer: {lr: 1e-2}, mb_spec: {n_mbs: 2}, dtype: float32}",
    )
    assert (config.ref.path, config.ref.dtype, config.ref.mb_spec.n_mbs) == ("start", "float32", 3)
    assert (config.critic.path, config.critic.optimizer.lr) == ("value", 1e-2)
    assert (config.critic.mb_spec.n_mbs, config.critic.dtype) == (2, "float32")


def test_frozen_engine_measures_as_the_actor_does(tmp_path: Path) -> None:
    config = load(tmp_path, "ppo", *ALL_ROLES)
    engine = config.ref.engine_config(config.actor)
    assert type(engine) is TrainEngineConfig
    assert (engine.path, engine.optimizer, engine.is_critic) == ("tiny", None, False)
    assert (engine.temperature, engine.logprobs_chunk_size) == (0.7, 64)


def test_dump_with_every_role_loads_to_an_equal_config(tmp_path: Path) -> None:
    config = load(tmp_path, "ppo", *ALL_ROLES)
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_yaml(config))
    assert load_expr_config([str(copy)], experiment_class([str(copy)]))[0] == config


def test_a_teacher_on_servers_is_no_model_of_an_engine(tmp_path: Path) -> None:
    teacher = "teacher={path: big, engine_type: rollout}"
    config = load(tmp_path, "ppo", teacher, "rollout.backend=native:d2", "actor.dtype=float32")
    assert list(config.models()) == ["actor"] and list(config.all_models()) == ["actor", "teacher"]
    assert (config.teacher.backend, config.teacher.dtype) == ("native:d2", "float32")
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_yaml(config))
    assert load_expr_config([str(copy)], experiment_class([str(copy)]))[0] == config
    view = config.of_teacher()
    assert (view.actor.path, view.rollout.num_servers) == ("big", 2)
    assert config.actor.path == "tiny"


def test_roles_are_absent_by_default(tmp_path: Path) -> None:
    config = load(tmp_path, "ppo")
    assert (config.ref, config.critic, config.teacher) == (None, None, None)
    assert list(config.models()) == ["actor"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["ref.path=''", "actor.kl_ctl=1"], "ref.path must name a model folder, got ''"),
        (["ref.backend=native:d1", "actor.kl_ctl=1"], "ref.backend 'native:d1' is for inference"),
        (["teacher={path: $AREAL_UNSET/x}"], "teacher.path uses $AREAL_UNSET, which is not set"),
        (["teacher={path: big, beta: 1}"], "teacher.beta: unknown key; "),
        (
            ["ref={offload: true, backend: 'megatron:d1'}", "actor.kl_ctl=1"],
            "ref.offload must be false with backend megatron",
        ),
        (
            ["actor.backend=fsdp:d1", "actor.offload=true", "actor.fsdp.offload_params=true"],
            "actor.offload must be false with fsdp.offload_params",
        ),
        (
            ["teacher={path: big, backend: 'vllm:d1'}"],
            "teacher.backend 'vllm:d1' is for inference",
        ),
        (
            ["teacher={path: big, engine_type: rollout, backend: 'fsdp:d1'}"],
            "teacher.backend 'fsdp:d1' is for training",
        ),
        (
            ["teacher={path: big, engine_type: rollout, mb_spec: {n_mbs: 2}}"],
            "teacher.mb_spec must be left out when teacher.engine_type is rollout",
        ),
        (
            ["teacher={path: b, engine_type: rollout, scheduling_spec: [{}, {}]}"],
            "teacher.scheduling_spec must have one entry, or one for each of the 1 servers",
        ),
        (
            [
                "teacher={path: b, engine_type: rollout}",
                "actor.temperature=0.7",
                "gconfig.temperature=0.7",
            ],
            "actor.temperature must be 1 when teacher.engine_type is rollout",
        ),
        (["critic.eps_clip=0"], "critic.eps_clip must be above 0, got 0.0"),
        (["critic.ppo_n_minibatches=0"], "critic.ppo_n_minibatches must be at least 1, got 0"),
        (["critic.kl_ctl=1"], "critic.kl_ctl: unknown key; it belongs at actor.kl_ctl"),
    ],
)
def test_wrong_value_in_a_role(tmp_path: Path, overrides: list[str], says: str) -> None:
    assert says in complaint(tmp_path, "ppo", *overrides)


def test_reward_model(tmp_path: Path) -> None:
    config = load(tmp_path, "rw")
    assert (config.trainer, config.train_dataset.type) == ("rw", "rw")
    assert config.actor.is_critic


def test_dpo_compares_with_the_model_it_starts_from(tmp_path: Path) -> None:
    config = load(tmp_path, "dpo")
    assert (config.trainer, config.train_dataset.type) == ("dpo", "dpo")
    assert (config.actor.beta, config.actor.loss_type) == (0.1, "sigmoid")
    assert config.ref.path == "tiny"
    assert list(config.models()) == ["actor", "ref"]
    other = load(tmp_path, "dpo", "ref.path=start", "actor.loss_type=ipo")
    assert (other.ref.path, other.actor.loss_type) == ("start", "ipo")
    assert load(tmp_path, "dpo", "ref=null").ref.path == "tiny"


@pytest.mark.parametrize(
    ("trainer", "override", "says"),
    [
        ("rw", "actor.is_critic=false", "actor.is_critic must be true: a reward model gives a"),
        ("rw", "actor.optimizer=null", "actor.optimizer must be set to train"),
        ("rw", "train_dataset.type=dpo", "train_dataset.type must be 'rw' for this trainer"),
        ("rw", "ref={}", "ref: unknown key"),
        ("rw", "allocation_mode=native:d1+d1", "'native:d1' is for rollout, which is no engine"),
        ("dpo", "actor.is_critic=true", "actor.is_critic must be false: this trainer needs a"),
        ("dpo", "actor.beta=0", "actor.beta must be above 0, got 0.0"),
        ("dpo", "actor.loss_type=hinge", "actor.loss_type must be one of sigmoid, ipo"),
        ("dpo", "actor.eps_clip=1", "actor.eps_clip: unknown key"),
        ("dpo", "allocation_mode=fsdp[critic]:d1", "'fsdp:d1' is for critic, which is no engine"),
        ("sft", "actor.is_critic=true", "actor.is_critic must be false: this trainer needs a"),
        ("sft", "critic={}", "critic: unknown key"),
    ],
)
def test_wrong_value_for_a_trainer(tmp_path: Path, trainer: str, override: str, says: str) -> None:
    assert says in complaint(tmp_path, trainer, override)
