"""Keys of AReaL's config files that areal does not have: a pattern of the dotted key -> why.

The loader gives the reason when it rejects such a key, `areal convert` when it drops one. A reason
that begins with "use" names what to write instead. The first pattern that matches counts.
"""

from __future__ import annotations

import fnmatch

# Keys that AReaL's files repeat in sections -> their only position here.
AT_ROOT = {
    "experiment_name": "experiment_name",
    "trial_name": "trial_name",
    "fileroot": "cluster.fileroot",
    "tokenizer_path": "tokenizer_path",
}

_BY_RUN = "the run sets it"
_BY_SBATCH = "use areal launch slurm --sbatch=--NAME=VALUE for options of sbatch"

_ABSENT = {
    # Root
    "enable_offload": "use offload in the sections of models (actor, ref, critic, teacher)",
    "memory_profiler*": "there is no memory profiler",
    "launcher*": "use areal launch local, ray or slurm, with its options",
    "post_exit_hook": "run a command after areal train instead",
    "sglang": "only trainer ppo generates, so only its files have servers",
    "vllm": "only trainer ppo generates, so only its files have servers",
    # Models
    "*.attn_impl": "the engine chooses its attention kernel",
    "*.use_kernels": "the engine chooses its kernels",
    "*.pad_to_maximum": "sequences are packed, so nothing is padded",
    "*.disable_dropout": "dropout is always off",
    "*.optimizer_dtype": "the optimizer's weights and moments are always float32",
    "*.optimizer.offload": "use fsdp.offload_params, which moves the optimizer too",
    "*.peft_type": "adapters are always LoRA",
    "*.log_agent_stats*": "statistics of agents are always recorded",
    "*.enable_delta_weight_update": "use weight_update_mode: delta",
    "*.weight_update_delta_method": "weight_update_mode: delta finds changes itself",
    "*.weight_update_anchor_interval": "weight_update_mode: delta writes full weights itself",
    "*.admin_api_key": "it comes from the environment variable AREAL_ADMIN_API_KEY",
    "*._version": "there is one version of each engine",
    "critic.init_critic_from_actor": "a critic starts from actor.path unless it has a path",
    "actor.behave_imp_weight_cap": "use rejection_sampling with action: mask and upper: CAP",
    "actor.behave_imp_weight_mode": "use rejection_sampling (level, action, metric)",
    "*.mb_spec.granularity": "pairs and groups are never split",
    "*.mb_spec.n_mbs_divisor": "micro-batches are counted by n_mbs and max_tokens_per_mb alone",
    "*_norm.group_size": "groups are normalised by their real sizes",
    "*.optimizer.*loss_scale*": "losses are not scaled",
    "*.optimizer.hysteresis": "losses are not scaled",
    "*.fsdp.wrap_policy*": "every block is wrapped",
    "*.fsdp.memory_efficient_load": "every rank reads only its own shard",
    "*.fsdp.per_layer_optim_step": "use fsdp.offload_params to keep the optimizer off the GPU",
    "*.fsdp.optim_step_prefetch_layers": "it belongs to per_layer_optim_step",
    "*.fsdp.shard_vision_across_sp": "every context parallel rank computes the whole tower",
    "*.archon.attn_type": "the engine chooses its attention kernel (enable_tree_training: trees)",
    "*.archon.offload_params": "use backend fsdp with fsdp.offload_params",
    "*.archon.ac_preserve_rng_state": "blocks draw no random numbers, as dropout is always off",
    "*.archon.reshard_after_forward_policy": "a pipeline keeps gathered weights, others do not",
    "*.archon.fp8_config.include_experts": "experts are computed in the model's dtype",
    "*.archon.fp8_config.use_triton": "the engine chooses its kernels",
    "*.archon.use_deterministic_algorithms": "use batch_invariant for equal bits in any batch",
    "*.archon.moe_router_dtype": "routers compute in float32",
    # Rollout
    "rollout.queue_size": "the queue follows max_head_offpolicyness",
    "rollout.enable_rollout_tracing": "use perf_tracer.enabled, and rollout.dump_to_file for texts",
    "rollout.deterministic_sampling": "use gconfig.seed",
    "rollout.serialize_group_samples": "the samples of a group always run at the same time",
    "rollout.check_trajectory_format": "every trajectory is checked",
    "rollout.pause_grace_period": "an update waits for exactly the requests that are in flight",
    "rollout.routing_strategy": "requests go where prompts are cached, else to the idlest",
    "rollout.provider_api_key": _BY_RUN,
    "rollout.model": "servers serve actor.path",
    "rollout.agent.engine_max_tokens": "use gconfig.max_tokens",
    "rollout.agent.message_preprocessors": "use prefix_matcher, or change messages in the agent",
    # Servers
    "sglang.model_path": _BY_RUN,
    "sglang.skip_tokenizer_init": "a server may be asked for texts, as for stop words",
    "sglang.enable_metrics": "it is always on",
    "sglang.log_level*": "use sglang.extra_args: [--log-level, LEVEL]",
    "sglang.*lora*": "the run serves the adapters of actor.use_lora",
    "vllm.*lora*": "the run serves the adapters of actor.use_lora",
    "sglang.tp_size": "use t in rollout.backend",
    "sglang.dp_size": "use d in rollout.backend",
    "vllm.model": _BY_RUN,
    "vllm.worker_extension_cls": "areal's own is loaded",
    "vllm.tensor_parallel_size": "use t in rollout.backend",
    # The run
    "cluster.name_resolve*": "processes of a run find each other through the controller",
    "cluster.cluster_name": "there are no settings by cluster",
    "saver.mode": "a checkpoint is complete before the next step begins",
    "recover.no_save_optim": "a run resumes exactly, with its optimizer",
    "recover.no_load_optim": "a run resumes exactly, with its optimizer",
    "perf_tracer.session_tracer*": "use perf_tracer.enabled, and areal export for episodes",
    "*_dataset.pin_memory": "it has no effect",
    "*_dataset.num_workers": "rows are loaded by the controller itself",
    "*_dataset.num_dataset_workers": "rows are loaded by the controller itself",
    "*_dataset.scheduling_spec": "rows are loaded by the controller itself",
    "*_dataset.setup_timeout": "rows are loaded by the controller itself",
    "*.scheduling_spec.port_count": "workers open no ports for calls",
    "*.scheduling_spec.task_type": "every entry describes a worker",
    "*.scheduling_spec.cmd": "workers are started by the scheduler",
    "*.scheduling_spec.nodelist": _BY_SBATCH,
    "*.scheduling_spec.exclude": _BY_SBATCH,
    "*.scheduling_spec.image": "workers run in the environment of the controller",
    "*.scheduling_spec.container_*": "workers run in the environment of the controller",
    "*.scheduling_spec.additional_bash_cmds": "workers run in the environment of the controller",
    "*.scheduling_spec.slurm*": _BY_SBATCH,
    "*.scheduling_spec.srun*": _BY_SBATCH,
    "*.scheduling_strategy.fork": "colocated models share a process, a server has its own",
}
# Sections with more keys there than are worth naming. The loader rather looks for a typing error.
_SECTIONS = {
    "*.megatron.*": "megatron-core runs with areal's settings of it",
    "ref.*": "a model that is not trained takes this from the actor",
    "teacher.*": "a model that is not trained takes this from the actor",
    "stats_logger.*": "the tracker reads it from its own login or environment",
}


def why_absent(key: str) -> str | None:
    """The reason for a dotted key; None if AReaL does not have it either."""
    return _first(_ABSENT, key)


def why_dropped(key: str) -> str | None:
    """The same for a file that is known to be AReaL's."""
    return _first(_ABSENT, key) or _first(_SECTIONS, key)


def _first(reasons: dict[str, str], key: str) -> str | None:
    return next((why for at, why in reasons.items() if fnmatch.fnmatchcase(key, at)), None)
