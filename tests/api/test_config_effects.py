"""No key is silently without effect: what is written and not read is refused, or warned about."""

from __future__ import annotations

import fnmatch
import logging
from pathlib import Path
from typing import Any

import pytest
from config_files import FILES

from areal.api.cli_args import ConfigError, dump_yaml, load_experiment, load_expr_config
from areal.api.config.effects import ROWS, rows_of
from areal.api.config.experiment import PPOConfig
from areal.api.config.section import field_types, section_class
from areal.api.config.trainers import EXPERIMENTS
from areal.api.workflow_api import RolloutWorkflow
from areal.workflow import WORKFLOWS
from areal.workflow.resolve import find_workflow

# Keys that every run reads, or that their section refuses where it does not.
ALWAYS = """
experiment_name trial_name trainer allocation_mode seed total_train_epochs total_train_steps
total_train_n_seqs
tokenizer_path cluster.* scheduler.type train_dataset.* saver.freq_* recover.mode watchdog.seconds
stats_logger.tensorboard.path perf_tracer.enabled perf_tracer.profile_steps
rollout.api_url rollout.use_lora {trained}.path {trained}.backend {trained}.init_from_scratch
{trained}.is_critic
{trained}.batch_invariant {trained}.enable_tree_training {trained}.mb_spec.* {trained}.dtype
{trained}.gradient_checkpointing {trained}.freeze_vision_tower {trained}.use_lora
{trained}.target_modules {trained}.fsdp.*
{trained}.megatron.* {trained}.archon.enable_compile {trained}.archon.num_replicas
{trained}.archon.fp8_forward {trained}.archon.fp8_config.mode
{trained}.scheduling_strategy.* {trained}.setup_timeout {trained}.ppo_n_minibatches
{trained}.optimizer.type {trained}.optimizer.lr {trained}.optimizer.weight_decay
{trained}.optimizer.beta1 {trained}.optimizer.lr_scheduler_type {trained}.optimizer.warmup_steps
{trained}.optimizer.gradient_clipping
{frozen}.path {frozen}.backend {frozen}.dtype {frozen}.mb_spec.* {frozen}.scheduling_strategy.*
teacher.rl_loss_weight teacher.distill_loss_weight teacher.engine_type
critic.eps_clip critic.value_error critic.mask_no_eos_with_zero
actor.beta actor.loss_type actor.policy_loss actor.policy_loss_kwargs actor.kl_ctl
actor.kl_loss_coef actor.kl_target actor.recompute_logprob
gconfig.n_samples gconfig.max_new_tokens gconfig.min_new_tokens gconfig.max_tokens gconfig.greedy
gconfig.temperature gconfig.stop_token_ids gconfig.ignore_eos gconfig.stop gconfig.frequency_penalty
gconfig.presence_penalty gconfig.repetition_penalty gconfig.logit_bias
gconfig.seed gconfig.lora_name gconfig.use_beam_search gconfig.drop_incomplete_group
rollout.backend rollout.max_concurrent_rollouts rollout.consumer_batch_size
rollout.max_head_offpolicyness rollout.max_failure_ratio rollout.request_timeout
rollout.request_retries rollout.dump_to_file rollout.workers rollout.recompute_kv
rollout.return_routed_experts
rollout.scheduling_strategy.*
dynamic_bs dynamic_filter_fn
"""


def always() -> list[str]:
    roles = {"{trained}": ("actor", "critic"), "{frozen}": ("ref", "teacher")}
    patterns = []
    for text in ALWAYS.split():
        mark = next((mark for mark in roles if mark in text), None)
        patterns += [text.replace(mark, role) for role in roles[mark]] if mark else [text]
    return patterns


def leaves(cls: type, prefix: str = "") -> list[str]:
    found = []
    for name, hint in field_types(cls).items():
        section = section_class(hint)
        found += leaves(section, f"{prefix}{name}.") if section else [prefix + name]
    return found


KEYS = sorted({key for cls in EXPERIMENTS.values() for key in leaves(cls)})


def test_every_key_says_when_it_has_an_effect() -> None:
    undecided = [
        key
        for key in KEYS
        if not rows_of(key) and not any(fnmatch.fnmatchcase(key, one) for one in always())
    ]
    assert not undecided, f"add a row to areal/api/config/effects.py, or to ALWAYS: {undecided}"
    patterns = [*always(), *(key for row in ROWS for key in row.keys)]
    stale = [one for one in patterns if not fnmatch.filter([*KEYS, *SECTIONS], one)]
    assert not stale, f"no such key any more: {stale}"


SECTIONS = (
    "rollout.agent.limits",
    "workflow_kwargs.key",
    "env_kwargs.key",
    "mcp_servers.key",
)  # optional, and of any shape


def test_no_shipped_workflow_is_an_agent() -> None:
    for name, path in WORKFLOWS.items():
        assert "." not in name and path.startswith("areal.workflow.")
        assert issubclass(find_workflow(name), RolloutWorkflow)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    """Load a file with overrides as the command line does; the warnings it gave."""

    def load(trainer: str, *overrides: str) -> list[str]:
        file = tmp_path / f"{trainer}.yaml"
        file.write_text(FILES[trainer])
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="areal"):
            load_experiment([str(file), *overrides])
        return [record.getMessage() for record in caplog.records]

    return load


AGENT = "workflow=my.Agent"


@pytest.mark.parametrize(
    ("trainer", "overrides", "says"),
    [
        ("ppo", ["vllm.max_model_len=512"], "vllm.max_model_len has no effect: rollout.backend is"),
        ("ppo", ["sglang={context_length: 9}"], "sglang.context_length has no effect: rollout.ba"),
        ("ppo", ["rollout.backend=vllm:d1", "native.max_running=8"], "native.max_running has no"),
        ("ppo", ["actor.weight_update_mode=direct", "native.threads=2"], "so there is no server"),
        ("sft", ["actor.grad_reduce_dtype=bfloat16"], "backend is one rank, which sums nothing"),
        ("sft", ["scheduler.placement=SPREAD"], "scheduler.placement has no effect: scheduler.ty"),
        ("sft", ["actor.scheduling_spec=[{cpu: 2}]"], "this model runs in the controller itself"),
        (
            "sft",
            ["actor.backend=archon:d2", "actor.scheduling_spec=[{mem: 2}]"],
            "only Ray reserves mem",
        ),
        ("sft", ["actor.request_timeout=60"], "actor.request_timeout has no effect"),
        ("ppo", ["rollout.scheduling_spec=[{cpu: 2}]"], "rollout.scheduling_spec has no effect"),
        ("sft", ["saver.keep=2"], "saver.keep has no effect: saver never fires"),
        ("sft", ["recover={freq_steps: 5, mode: off}"], "recover.freq_steps has no effect"),
        ("sft", ["evaluator.freq_steps=5"], "evaluator.freq_steps has no effect: there is no"),
        ("sft", ["valid_dataset.path=arithmetic"], "valid_dataset.path has no effect: evaluator"),
        (
            "sft",
            ["valid_dataset={path: arithmetic, shuffle: true}", "evaluator.freq_steps=5"],
            "valid_dataset.shuffle has no effect: an evaluation takes every row once, in order",
        ),
        ("ppo", ["eval_gconfig.max_new_tokens=9"], "eval_gconfig.max_new_tokens has no effect"),
        ("sft", ["stats_logger.wandb.project=p"], "stats_logger.wandb.mode is disabled"),
        ("sft", ["perf_tracer.save_interval=2"], "perf_tracer.enabled is false"),
        ("ppo", [AGENT, "rollout.agent.subproc_max_workers=2"], "mode is not subproc"),
        ("ppo", [AGENT, "rollout.agent.limits={memory_gb: 2}"], "mode is not subproc"),
        ("ppo", [AGENT, "rollout.agent.set_reward_finish_timeout=9"], "mode is not online"),
        ("ppo", ["gconfig.skip_special_tokens=false"], "workflow 'rlvr' reads tokens"),
        ("ppo", ["rollout.agent.mode=online", "reward_fn=math_verify"], "clients run the episodes"),
        ("ppo", ["env=my.Env"], "env has no effect: no workflow is env"),
        (
            "ppo",
            ["env=my.Env", "workflow=env", "reward_fn=math_verify"],
            "rewards are the environment",
        ),
        ("ppo", ["gconfig={greedy: true, top_p: 0.9, n_samples: 2}"], "gconfig.greedy is true"),
        ("rw", ["actor.temperature=0.5"], "actor.temperature has no effect: is_critic is true"),
        ("ppo", ["critic.logprobs_chunk_size=64"], "critic.logprobs_chunk_size has no effect"),
        ("ppo", ["rollout.lora_name=mine"], "rollout.lora_name has no effect: no adapter is sent"),
        ("sft", ["actor.lora_rank=8"], "actor.lora_rank has no effect: use_lora is false"),
        (
            "sft",
            ["actor.weight_update_mode=disk"],
            "the weights of this model are sent to no server",
        ),
        (
            "ppo",
            ["critic.weight_update_mode=disk"],
            "the weights of this model are sent to no server",
        ),
        ("sft", ["actor.archon.ac_mode=full"], "gradient_checkpointing is false"),
        ("sft", ["actor.offload=true"], "actor.offload has no effect: no other model is in its"),
        (
            "sft",
            ["actor.archon={selective_ac_option: '2', ac_mode: full}"],
            "actor.archon.selective_ac_option has no effect",
        ),
        ("sft", ["actor.archon.pp_layers_per_stage=2"], "backend has no pipeline"),
        ("sft", ["actor.optimizer={type: sgd, beta2: 0.9}"], "actor.optimizer.beta2 has no effect"),
        ("sft", ["actor.optimizer.min_lr_ratio=0.1"], "lr_scheduler_type is constant"),
        (
            "sft",
            ["actor.optimizer={warmup_steps: 2, warmup_steps_proportion: 0.1}"],
            "actor.optimizer.warmup_steps_proportion has no effect",
        ),
        ("ppo", ["actor.max_new_tokens=64"], "overlong_reward_penalty is false"),
        (
            "ppo",
            ["actor.reward_norm={mean_level: group, std_level: null, eps: 1e-3}"],
            "actor.reward_norm.eps has no effect: std_level is null",
        ),
        (
            "ppo",
            ["teacher={path: t, rl_loss_weight: 0}", "actor.discount=0.9"],
            "actor.discount has no effect: teacher.rl_loss_weight is 0",
        ),
    ],
)
def test_a_key_a_shared_file_may_carry_is_warned_about(
    warnings: Any, trainer: str, overrides: list[str], says: str
) -> None:
    messages = warnings(trainer, *overrides)
    assert any(says in message for message in messages), messages
    assert all(message.startswith("command line: ") for message in messages)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["actor.use_sapo_loss=true", "actor.eps_clip=0.3"], "actor.eps_clip has no effect: the g"),
        (["actor.sapo_tau_pos=2"], "actor.sapo_tau_pos has no effect: use_sapo_loss is false"),
        (["actor.kl_estimator=k2"], "actor.kl_estimator has no effect: kl_ctl and kl_loss_coef"),
        (["actor.kl_ctl=0.1", "ref={}", "actor.kl_horizon=9"], "kl_target is not set; remove it"),
        (["rollout.agent.mode=subproc"], "rollout.agent.mode has no effect: workflow 'rlvr' is"),
        (
            ["workflow=multi_turn", "rollout.agent.turn_discount=0.9"],
            "workflow 'multi_turn' is not an agent: its own is workflow_kwargs.turn_discount",
        ),
    ],
)
def test_a_key_that_must_be_a_mistake_is_refused(
    warnings: Any, overrides: list[str], says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        warnings("ppo", *overrides)
    assert says in str(error.value)
    assert str(error.value).startswith("command line: ")


@pytest.mark.parametrize(
    ("trainer", "overrides"),
    [
        ("ppo", ["rollout.backend=vllm:d1", "vllm.max_model_len=512"]),
        ("ppo", ["teacher={path: t, engine_type: rollout, backend: 'vllm:d1'}", "vllm.seed=3"]),
        ("ppo", ["vllm={max_num_seqs: 256}", "sglang={mem_fraction_static: 0.9}"]),  # defaults
        ("ppo", ["rollout.agent.turn_discount=0.9", AGENT]),
        ("ppo", ["rollout.agent={mode: subproc, subproc_max_workers: 2}", AGENT]),
        ("ppo", ["rollout.agent={mode: online, port: 9000, set_reward_finish_timeout: 60}"]),
        ("ppo", ["actor.use_sapo_loss=true", "actor.sapo_tau_pos=2"]),
        ("ppo", ["actor.kl_ctl=0.1", "ref={}", "actor.kl_estimator=k2"]),
        ("ppo", ["actor.temperature=${gconfig.temperature}", "critic.temperature=1.0"]),
        ("ppo", ["ref={scheduling_strategy: {type: colocation, target: actor}}", "actor.kl_ctl=1"]),
        ("sft", ["valid_dataset=null", "evaluator={freq_steps: 5, eval_before_train: true}"]),
        ("sft", ["valid_dataset={path: arithmetic, batch_size: 9}", "evaluator.freq_steps=5"]),
        ("sft", ["recover={mode: auto, freq_steps: 5, keep: 3}"]),
        ("sft", ["actor.use_lora=true", "actor.lora_rank=8"]),
        ("ppo", ["actor.offload=true", "ref={offload: true}", "actor.kl_ctl=1"]),
        ("ppo", ["actor.use_lora=true", "rollout.lora_name=mine"]),
        ("sft", ["actor.backend=archon:d2", "actor.scheduling_spec=[{cpu: 2}]"]),
        ("sft", ["actor.gradient_checkpointing=true", "actor.archon.ac_mode=full"]),
    ],
)
def test_a_key_that_is_read_is_silent(warnings: Any, trainer: str, overrides: list[str]) -> None:
    assert warnings(trainer, *overrides) == []


@pytest.mark.parametrize("trainer", FILES)
def test_a_whole_config_loads_in_silence(
    trainer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a run has written to its folder has every key, at its default or not."""
    file = tmp_path / "c.yaml"
    file.write_text(FILES[trainer])
    config, _ = load_experiment([str(file)])
    file.write_text(dump_yaml(config))
    with caplog.at_level(logging.WARNING, logger="areal"):
        assert load_experiment([str(file)])[0] == config
    assert caplog.records == []


def test_a_script_brings_its_own_workflow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(FILES["ppo"] + "rollout: {agent: {mode: subproc, turn_discount: 0.9}}\n")
    with caplog.at_level(logging.WARNING, logger="areal"):
        load_expr_config(["train.py", str(file)], PPOConfig)
    assert caplog.records == []


def test_the_line_of_the_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(FILES["ppo"] + "vllm:\n  max_model_len: 512\n")
    with caplog.at_level(logging.WARNING, logger="areal"):
        load_experiment([str(file)])
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{file}:7: vllm.max_model_len has no effect")
