"""Which keys that a user wrote have no effect in this run?

`ROWS` lists keys that have an effect only together with others. A key that was written, differs
from its default and is not read in this run is rejected if it can only be a mistake; it gets a
warning if a file shared by several runs may well carry it (`vllm:` beside `sglang:`, a tracker that
is switched off). Keys in no row always have an effect, or their section checks them.

`by_workflow` rows depend on the workflow, which a script may pass to `train()` instead of the one
in the file: they apply only to the command line, which runs what the file names.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.api.alloc_mode import ModelAllocation, ParallelStrategy
from areal.api.config.experiment import BaseExperimentConfig
from areal.api.config.inference_servers import NativeServerConfig, SGLangConfig, vLLMConfig
from areal.api.config.section import field_types, section_class
from areal.api.config.source import (
    KeyPath,
    Node,
    Source,
)

if TYPE_CHECKING:
    from areal.api.config.experiment import BaseExperimentConfig


@dataclass(frozen=True, slots=True)
class KeyContext:
    """Argument of a reason: a config, and the section that contains the key."""

    config: Any
    role: str  # name of the section
    written: frozenset[str]  # sections and keys at the root of the file

    @property
    def section(self) -> Any:
        return getattr(self.config, self.role)

    @property
    def layout(self) -> ParallelStrategy:
        return ModelAllocation.from_str(self.section.backend).parallel


# Why a key is idle, after "has no effect: "; None if it is not.
Reason = Callable[[KeyContext], str | None]


@dataclass(frozen=True, slots=True)
class Row:
    keys: tuple[str, ...]  # dotted; `*` matches any text
    reason: Reason
    refuse: bool = False
    by_workflow: bool = False


@dataclass(frozen=True, slots=True)
class IdleKey:
    key: KeyPath
    why: str
    refuse: bool
    by_workflow: bool

    def __str__(self) -> str:
        return f"{'.'.join(self.key)} has no effect: {self.why}"


def idle_keys(config: BaseExperimentConfig, source: Source) -> Iterator[IdleKey]:
    """Keys of `source` that this `config` does not read and that differ from their default.

    Values derived from other keys may be included: the caller compares with a config loaded
    without the key.
    """
    unused = unused_sections(config, source)
    read = {name: value for name, value in source.tree.items() if name not in unused}
    for key in _leaves(type(config), read, ()):
        if _value(config, key) == _default(type(config), key):
            continue
        context = KeyContext(config, key[0], frozenset(source.tree))
        for row in rows_of(".".join(key)):
            why = row.reason(context)
            if why is not None:
                yield IdleKey(key, why, row.refuse, row.by_workflow)
                break


def unused_sections(config: BaseExperimentConfig, source: Source) -> list[str]:
    """Sections of the file that the config leaves out: a `ref` that nothing needs."""
    written = [name for name, value in source.tree.items() if value is not None]
    return [name for name in written if getattr(config, name) is None]


def rows_of(name: str) -> list[Row]:
    """Rows that apply to the key `name`, the most specific first."""
    return [row for row in ROWS if any(fnmatch.fnmatchcase(name, key) for key in row.keys)]


def _unless(holds: Callable[[KeyContext], bool], why: str) -> Reason:
    return lambda context: None if holds(context) else why


def _evaluates(context: KeyContext) -> bool:
    evaluator = context.config.evaluator
    return evaluator.ever_fires or evaluator.eval_before_train


def _has_agent(context: KeyContext) -> bool:
    # Short names and areal.workflow.* are workflows of the package, none of which is an agent.
    name = context.config.workflow
    is_shipped = "." not in name or name.startswith("areal.workflow.")
    return context.config.rollout.agent.mode == "online" or not is_shipped


def _workflows(context: KeyContext) -> set[str]:
    return {context.config.workflow, context.config.eval_workflow or context.config.workflow}


def _in_controller(context: KeyContext) -> bool:
    return context.config.hosts()[context.role] == "controller"


def _takes_turns(context: KeyContext) -> bool:
    if context.role in context.config.served_models():
        return True  # refused there
    hosts = context.config.hosts()
    return context.config.trainer == "ppo" or list(hosts.values()).count(hosts[context.role]) > 1


def _learns_by_reward(context: KeyContext) -> bool:
    teacher = context.config.teacher
    return teacher is None or teacher.rl_loss_weight > 0


def _engine_reason(engine: str) -> Reason:
    def reason(context: KeyContext) -> str | None:
        config = context.config
        backends = {"rollout": config.rollout.backend}
        backends |= {role: model.backend for role, model in config.served_models().items()}
        if any(ModelAllocation.from_str(one).backend == engine for one in backends.values()):
            return None
        return " and ".join(f"{role}.backend is {one!r}" for role, one in backends.items())

    return reason


def _spec_reason(context: KeyContext) -> str | None:
    if context.role in context.config.served_models():
        return None if context.config.scheduler.by_ray else "scheduler.type is local"
    if _in_controller(context):
        return "this model runs in the controller itself"
    by_ray = context.config.scheduler.by_ray
    asks = any(spec.mem is not None for spec in context.section.scheduling_spec)
    return "only Ray reserves mem" if asks and not by_ray else None


def _std_reason(name: str) -> Reason:
    def reason(context: KeyContext) -> str | None:
        norm = getattr(context.section, name)
        return None if norm.std_level is not None else "std_level is null, so nothing is divided"

    return reason


_OBJECTIVE = "teacher.rl_loss_weight is 0: nothing reads the advantages"
_TRACKERS = ("wandb", "swanlab", "trackio")
_TRAINED = ("actor", "critic")


def _of_launched_servers() -> tuple[str, ...]:
    """Keys of servers that the run starts. The client has to know the context of any."""
    sections = {"native": NativeServerConfig, "vllm": vLLMConfig, "sglang": SGLangConfig}
    return tuple(
        f"{name}.{key.name}"
        for name, section in sections.items()
        for key in dataclasses.fields(section)
        if key.name not in ("max_model_len", "context_length")
    )


def _of_trained(*keys: str) -> tuple[str, ...]:
    return tuple(f"{role}.{key}" for role in _TRAINED for key in keys)


ROWS: tuple[Row, ...] = (
    # Placement
    Row(
        ("scheduler.placement",),
        _unless(lambda p: p.config.scheduler.by_ray, "scheduler.type is local"),
    ),
    Row(
        tuple(f"{role}.scheduling_spec" for role in (*_TRAINED, "ref", "teacher")),
        _spec_reason,
    ),
    Row(
        _of_trained("request_timeout"),
        _unless(lambda p: not _in_controller(p), "this model runs in the controller itself"),
    ),
    Row(
        ("rollout.scheduling_spec",),
        _unless(lambda p: p.config.scheduler.by_ray, "scheduler.type is local"),
    ),
    # Saving and evaluation
    Row(
        ("valid_dataset.*", "eval_gconfig.*", "eval_workflow"),
        _unless(_evaluates, "evaluator never fires (set evaluator.freq_steps, for example)"),
    ),
    Row(
        ("valid_dataset.shuffle", "valid_dataset.drop_last"),
        lambda p: "an evaluation takes every row once, in order",
    ),
    Row(
        ("evaluator.*",),
        # `valid_dataset: null` switches evaluation off.
        _unless(
            lambda p: p.config.valid_dataset is not None or "valid_dataset" in p.written,
            "there is no valid_dataset",
        ),
    ),
    Row(
        ("saver.keep",),
        _unless(lambda p: p.config.saver.ever_fires, "saver never fires (set saver.freq_steps)"),
    ),
    Row(
        ("recover.*",),
        _unless(lambda p: p.config.recover.mode == "on", "recover.mode is disabled"),
    ),
    Row(
        ("perf_tracer.save_interval",),
        _unless(lambda p: p.config.perf_tracer.enabled, "perf_tracer.enabled is false"),
    ),
    *(
        Row(
            (f"stats_logger.{name}.*",),
            _unless(
                lambda p, name=name: getattr(p.config.stats_logger, name).mode != "disabled",
                f"stats_logger.{name}.mode is disabled",
            ),
        )
        for name in _TRACKERS
    ),
    # The inference servers
    Row(("native.*",), _engine_reason("native")),
    Row(("vllm.*",), _engine_reason("vllm")),
    Row(("sglang.*",), _engine_reason("sglang")),
    Row(
        ("rollout.scheduling_spec", *_of_launched_servers()),
        _unless(lambda p: not p.config.rollout.api_url, "rollout.api_url names running servers"),
    ),
    Row(
        ("native.threads", "rollout.setup_timeout"),
        _unless(
            lambda p: p.config.actor.weight_update_mode != "direct",
            "actor.weight_update_mode is direct, so there is no server",
        ),
    ),
    Row(
        ("rollout.lora_name",),
        _unless(
            lambda p: p.config.actor.use_lora and p.config.rollout.takes_adapters,
            "no adapter is sent (actor.use_lora, for stock servers also rollout.use_lora)",
        ),
    ),
    # Agents
    Row(
        ("rollout.agent.turn_discount",),
        lambda p: (
            "workflow 'multi_turn' is not an agent: its own is workflow_kwargs.turn_discount"
            if not _has_agent(p) and p.config.workflow == "multi_turn"
            else None
        ),
        refuse=True,
        by_workflow=True,
    ),
    Row(
        ("rollout.agent.*",),
        lambda p: None if _has_agent(p) else f"workflow {p.config.workflow!r} is not an agent",
        refuse=True,
        by_workflow=True,
    ),
    Row(
        ("rollout.agent.subproc_max_workers", "rollout.agent.limits", "rollout.agent.limits.*"),
        _unless(
            lambda p: p.config.rollout.agent.mode == "subproc",
            "rollout.agent.mode is not subproc",
        ),
    ),
    Row(
        ("rollout.agent.set_reward_finish_timeout",),
        _unless(
            lambda p: p.config.rollout.agent.mode == "online",
            "rollout.agent.mode is not online",
        ),
    ),
    Row(
        ("gconfig.skip_special_tokens", "eval_gconfig.skip_special_tokens"),
        lambda p: None if _has_agent(p) else f"workflow {p.config.workflow!r} reads tokens",
        by_workflow=True,
    ),
    Row(
        ("workflow", "workflow_kwargs", "workflow_kwargs.*", "reward_fn"),
        _unless(
            lambda p: p.config.rollout.agent.mode != "online" or _evaluates(p),
            "rollout.agent.mode is online: clients run the episodes",
        ),
    ),
    Row(
        ("env", "env_kwargs", "env_kwargs.*", "mcp_servers", "mcp_servers.*"),
        _unless(lambda p: "env" in _workflows(p), "no workflow is env"),
        by_workflow=True,
    ),
    Row(
        ("reward_fn",),
        _unless(lambda p: _workflows(p) != {"env"}, "workflow env: rewards are the environment's"),
        by_workflow=True,
    ),
    Row(
        ("gconfig.top_p", "gconfig.top_k", "gconfig.min_p"),
        _unless(lambda p: not p.config.gconfig.greedy, "gconfig.greedy is true"),
    ),
    Row(
        ("eval_gconfig.top_p", "eval_gconfig.top_k", "eval_gconfig.min_p"),
        _unless(lambda p: not p.config.eval_gconfig.greedy, "eval_gconfig.greedy is true"),
    ),
    # Models
    Row(
        _of_trained("temperature", "logprobs_chunk_size"),
        _unless(
            lambda p: not p.section.is_critic, "is_critic is true: it gives values, not tokens"
        ),
    ),
    Row(
        ("*.offload",),
        _unless(_takes_turns, "no other model is in its processes, and this trainer never waits"),
    ),
    Row(
        _of_trained("lora_rank", "lora_alpha"),
        _unless(lambda p: p.section.use_lora, "use_lora is false"),
    ),
    Row(
        _of_trained("weight_update_mode"),
        _unless(
            lambda p: p.config.trainer == "ppo" and p.role == "actor",
            "the weights of this model are sent to no server",
        ),
    ),
    Row(
        _of_trained("archon.ac_mode"),
        _unless(lambda p: p.section.gradient_checkpointing, "gradient_checkpointing is false"),
    ),
    Row(
        _of_trained("archon.selective_ac_option"),
        _unless(
            lambda p: p.section.gradient_checkpointing and p.section.archon.ac_mode == "selective",
            "it belongs to gradient_checkpointing: true with archon.ac_mode selective",
        ),
    ),
    Row(
        _of_trained("archon.ac_memory_budget"),
        _unless(
            lambda p: (
                p.section.gradient_checkpointing and p.section.archon.ac_mode == "memory_budget"
            ),
            "it belongs to gradient_checkpointing: true with archon.ac_mode memory_budget",
        ),
    ),
    Row(
        _of_trained("archon.fp8_config.exclude_modules"),
        _unless(lambda p: p.section.archon.trains_in_fp8, "archon.fp8_config.mode is disabled"),
    ),
    Row(
        _of_trained("archon.pp_*"),
        _unless(lambda p: p.layout.pipeline_parallel_size > 1, "backend has no pipeline (p2 ...)"),
    ),
    Row(
        _of_trained("grad_reduce_dtype"),
        _unless(lambda p: p.layout.world_size > 1, "backend is one rank, which sums nothing"),
    ),
    Row(
        _of_trained("optimizer.beta2", "optimizer.eps"),
        _unless(lambda p: p.section.optimizer.type == "adam", "optimizer.type is sgd"),
    ),
    Row(
        _of_trained("optimizer.min_lr_ratio"),
        _unless(
            lambda p: p.section.optimizer.lr_scheduler_type != "constant",
            "optimizer.lr_scheduler_type is constant",
        ),
    ),
    Row(
        _of_trained("optimizer.warmup_steps_proportion"),
        _unless(
            lambda p: p.section.optimizer.warmup_steps is None, "optimizer.warmup_steps is set"
        ),
    ),
    # From rewards to the loss
    Row(
        ("actor.eps_clip",),
        _unless(
            lambda p: not p.config.actor.use_sapo_loss, "the gate of use_sapo_loss replaces it"
        ),
        refuse=True,
    ),
    Row(
        ("actor.sapo_tau_*",),
        _unless(lambda p: p.config.actor.use_sapo_loss, "use_sapo_loss is false"),
        refuse=True,
    ),
    Row(
        ("actor.kl_estimator",),
        _unless(lambda p: p.config.actor.needs_ref, "kl_ctl and kl_loss_coef are 0"),
        refuse=True,
    ),
    Row(
        ("actor.kl_horizon",),
        _unless(lambda p: p.config.actor.kl_target is not None, "kl_target is not set"),
        refuse=True,
    ),
    Row(
        ("actor.max_new_tokens",),
        _unless(
            lambda p: p.config.actor.overlong_reward_penalty, "overlong_reward_penalty is false"
        ),
    ),
    *(
        Row((f"actor.{name}.eps", f"actor.{name}.std_unbiased"), _std_reason(name))
        for name in ("reward_norm", "adv_norm")
    ),
    Row(
        (
            "actor.eps_clip*",
            "actor.c_clip",
            "actor.importance_sampling_level",
            "actor.use_*_loss",
            "actor.m2_threshold",
            "actor.reward_*",
            "actor.overlong_*",
            "actor.mask_no_eos_with_zero",
            "actor.discount",
            "actor.gae_*",
            "actor.adv_norm.*",
            "actor.prox_logp_method",
            "actor.rejection_sampling.*",
            "gconfig.reward_normalization",
        ),
        _unless(_learns_by_reward, _OBJECTIVE),
    ),
)


def _leaves(cls: type, tree: Mapping[str, Node], key: KeyPath) -> Iterator[KeyPath]:
    """The keys the user wrote; lists and free-form sections are leaves."""
    for name, value in tree.items():
        section = section_class(field_types(cls)[name])
        if section is not None and isinstance(value, Mapping):
            yield from _leaves(section, value, (*key, name))
        else:
            yield (*key, name)


def _value(config: Any, key: KeyPath) -> Any:
    """After interpolation, and as the section stores it."""
    for name in key:
        config = getattr(config, name)
    return config


def _default(cls: type, key: KeyPath) -> Any:
    """The key's default; MISSING if it is required."""
    for name in key[:-1]:
        section = section_class(field_types(cls)[name])
        assert section is not None  # every name but the last is a section
        cls = section
    field = next(field for field in dataclasses.fields(cls) if field.name == key[-1])
    if field.default_factory is dataclasses.MISSING or section_class(field_types(cls)[key[-1]]):
        return field.default
    return field.default_factory()
