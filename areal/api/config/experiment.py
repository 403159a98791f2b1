"""The root of a config file: one class per trainer.

A value is written once. Sections get what they need from the root (batch size, model, sampling
options) in `__post_init__`; run name and folders exist only at the root. A section checks itself;
checks across sections are here, those about processes and devices in placement.py.
"""

from __future__ import annotations

import re
from copy import copy
from dataclasses import field, fields
from typing import Any, Literal

from areal.api.config.inference import (
    GenerationHyperparameters,
    InferenceEngineConfig,
)
from areal.api.config.inference_servers import (
    NativeServerConfig,
    SGLangConfig,
    vLLMConfig,
)
from areal.api.config.mcp import mcp_servers_of
from areal.api.config.placement import check_models, check_servers, check_teacher_servers
from areal.api.config.ppo import (
    FrozenModelConfig,
    PPOActorConfig,
    PPOCriticConfig,
    RefConfig,
    TeacherConfig,
)
from areal.api.config.run import (
    ClusterSpecConfig,
    DatasetConfig,
    EvaluatorConfig,
    PerfTracerConfig,
    RecoverConfig,
    RowType,
    SaverConfig,
    SchedulerConfig,
    StatsLoggerConfig,
    ValidDatasetConfig,
    WatchdogConfig,
)
from areal.api.config.section import config_section, expand_path, require, require_at_least
from areal.api.config.train_engine import TrainEngineConfig
from areal.api.scheduler_api import SchedulingStrategy

_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]*")


@config_section
class BaseExperimentConfig:
    """What every kind of training has in common."""

    experiment_name: str
    """Name of the experiment; with trial_name the folder of the run."""
    trial_name: str
    """Name of this run of the experiment."""
    cluster: ClusterSpecConfig = field(default_factory=ClusterSpecConfig)
    """Folders and machines of the run."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """How worker processes are started."""
    allocation_mode: str = ""
    """The `backend` of all engines in one string, like `native:d1+archon:d1`: sets those that are
    not written in their sections, and must agree with those that are. A part without an engine, the
    `d4` of `vllm:d4+d4`, is fsdp, or archon with p or e. `|` shares devices:
    `native[rollout]:d1+archon[actor]:d1|archon[critic]:d1`."""
    seed: int = 1
    """Fixes data order, sampling and initial weights."""
    total_train_epochs: int = 1
    """Passes over the data set."""
    total_train_steps: int | None = None
    """Stop after this many steps, if that is sooner."""
    total_train_n_seqs: int | None = None
    """Stop after the steps that take this many rows of train_dataset, if that is sooner."""
    tokenizer_path: str = ""
    """Folder or hub name of the tokenizer. Default: actor.path."""
    train_dataset: DatasetConfig
    """What is trained on."""
    valid_dataset: ValidDatasetConfig | None = None
    """What is evaluated on. null: no evaluation, whatever `evaluator` says."""
    saver: SaverConfig = field(default_factory=SaverConfig)
    """When checkpoints are saved."""
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    """When the model is evaluated on valid_dataset."""
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    """When recover points are written."""
    stats_logger: StatsLoggerConfig = field(default_factory=StatsLoggerConfig)
    """Where statistics go."""
    perf_tracer: PerfTracerConfig = field(default_factory=PerfTracerConfig)
    """Traces of the run's phases."""
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    """When a run that hangs is ended."""

    def __post_init__(self) -> None:
        for name in ("experiment_name", "trial_name"):
            value = getattr(self, name)
            require(
                _FOLDER_NAME.fullmatch(value) is not None,
                f"{name} becomes a folder: it must be letters, digits and . _ - + =, "
                "starting with a letter, digit or _",
                value,
            )
        require(0 <= self.seed < 2**32, "seed must lie between 0 and 2**32 - 1", self.seed)
        require_at_least(
            1, total_train_epochs=self.total_train_epochs, total_train_steps=self.total_train_steps
        )
        require(
            self.total_train_n_seqs is None
            or self.total_train_n_seqs >= self.train_dataset.batch_size,
            "total_train_n_seqs must be at least the rows of a step, train_dataset.batch_size "
            f"({self.train_dataset.batch_size})",
            self.total_train_n_seqs,
        )
        self.tokenizer_path = expand_path("tokenizer_path", self.tokenizer_path)

    @property
    def max_train_steps(self) -> int | None:
        """The smaller bound on steps, of those that are set."""
        bounds = [self.total_train_steps]
        if self.total_train_n_seqs is not None:
            bounds.append(self.total_train_n_seqs // self.train_dataset.batch_size)
        return min((bound for bound in bounds if bound is not None), default=None)

    def models(self) -> dict[str, TrainEngineConfig | FrozenModelConfig]:
        """Role -> its section, for every model of a training engine; the actor comes first."""
        sections = {field.name: getattr(self, field.name) for field in fields(self)}
        kinds = (TrainEngineConfig, FrozenModelConfig)
        models = {name: it for name, it in sections.items() if isinstance(it, kinds)}
        return {name: it for name, it in models.items() if name not in self.served_models()}

    def served_models(self) -> dict[str, FrozenModelConfig]:
        """Role -> its section, for every model besides the policy that is on servers."""
        return {}

    def all_models(self) -> dict[str, TrainEngineConfig | FrozenModelConfig]:
        return {**self.models(), **self.served_models()}

    def hosts(self) -> dict[str, str]:
        """Role -> the role whose processes host its model, or `controller`."""
        return {
            role: "controller"
            if self.scheduler.type == "local" and section.num_ranks == 1
            else section.scheduling_strategy.target or role
            for role, section in self.models().items()
        }

    def _inherit_from_trainer(self, actor: TrainEngineConfig, row_type: RowType) -> None:
        """Set the parts of the root that follow from the trainer and its model."""
        self.tokenizer_path = self.tokenizer_path or actor.path
        require(actor.optimizer is not None, "actor.optimizer must be set to train (lr: ...)", None)
        if row_type == "rw":
            require(
                actor.is_critic,
                "actor.is_critic must be true: a reward model gives a score, not tokens",
                actor.is_critic,
            )
        else:
            require(
                not actor.is_critic,
                "actor.is_critic must be false: this trainer needs a language model (a reward "
                "model is trained with trainer: rw, a critic has its own section)",
                actor.is_critic,
            )
        for name, dataset in (
            ("train_dataset", self.train_dataset),
            ("valid_dataset", self.valid_dataset),
        ):
            if dataset is not None:
                dataset.type = dataset.type or row_type
                require(
                    dataset.type == row_type,
                    f"{name}.type must be {row_type!r} for this trainer",
                    dataset.type,
                )


@config_section
class PPOConfig(BaseExperimentConfig):
    """Reinforcement learning with PPO or GRPO."""

    trainer: Literal["ppo"] = "ppo"
    """Which trainer `areal train` runs."""
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    """How training samples are drawn."""
    eval_gconfig: GenerationHyperparameters | None = None
    """How evaluation samples are drawn. Default: gconfig with one greedy sample."""
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    """How episodes are run."""
    native: NativeServerConfig = field(default_factory=NativeServerConfig)
    """The native inference server."""
    vllm: vLLMConfig = field(default_factory=vLLMConfig)
    """The vLLM server, for rollout.backend vllm."""
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    """The SGLang server, for rollout.backend sglang."""
    actor: PPOActorConfig
    """The trained policy."""
    ref: RefConfig | None = None
    """The reference model of actor.kl_ctl and actor.kl_loss_coef; not loaded when both are 0.
    `ref: {}` is the model that training starts from."""
    critic: PPOCriticConfig | None = None
    """The value model. Without one the value of every token is 0."""
    teacher: TeacherConfig | None = None
    """A model to learn from besides the reward."""
    workflow: str = "rlvr"
    """How one episode runs: a name, or the import path of a RolloutWorkflow or an agent."""
    workflow_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the workflow besides reward_fn, gconfig and tokenizer."""
    eval_workflow: str | None = None
    """The same for evaluation. Default: workflow."""
    env: str | None = None
    """The environment of workflow env: the import path of its class, or HUB:NAME of a hub."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's class, or of the hub's environment."""
    mcp_servers: dict[str, Any] = field(default_factory=dict)
    """MCP servers whose tools workflow env offers: name -> {command, args, env} or {url, headers};
    with shared: true one serves all episodes."""
    reward_fn: str = "gsm8k"
    """A name, or the import path of a reward function."""
    dynamic_bs: bool = False
    """Train on the accepted prompts of a batch instead of waiting for a full one. Needs
    dynamic_filter_fn."""
    dynamic_filter_fn: str | None = None
    """A name, or the import path of a function trajectory -> bool; prompts it rejects are not
    trained on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._inherit_from_trainer(self.actor, "rl")
        self._inherit_sampling()
        self._check_batch()
        require(
            self.env is not None or "env" not in (self.workflow, self.eval_workflow),
            "env must be set for workflow env: the import path of a class with reset and step, or "
            "HUB:NAME of a hub",
            None,
        )
        mcp_servers_of(self.mcp_servers)
        self._check_ref()
        self._check_critic()
        self._check_teacher()
        check_models(self)
        check_servers(self)

    def _inherit_sampling(self) -> None:
        if self.eval_gconfig is None:
            self.eval_gconfig = self.gconfig.new(
                greedy=True, n_samples=1, reward_normalization=False
            )
        require(
            not self.eval_gconfig.reward_normalization,
            "eval_gconfig.reward_normalization must be false: evaluation reports the rewards "
            "themselves",
            self.eval_gconfig.reward_normalization,
        )
        if self.actor.max_new_tokens is None:
            self.actor.max_new_tokens = self.gconfig.max_new_tokens
        require(
            (self.actor.overlong_tokens or 0) <= self.actor.max_new_tokens,
            f"actor.overlong_tokens must not exceed max_new_tokens ({self.actor.max_new_tokens})",
            self.actor.overlong_tokens,
        )
        require(
            self.actor.temperature == self.gconfig.temperature,
            f"actor.temperature must equal gconfig.temperature ({self.gconfig.temperature}; write "
            "${gconfig.temperature}), or log-probabilities disagree",
            self.actor.temperature,
        )

    def _check_batch(self) -> None:
        batch_size, group_size = self.train_dataset.batch_size, self.gconfig.n_samples
        rollout, actor = self.rollout, self.actor
        rollout.consumer_batch_size = rollout.consumer_batch_size or batch_size
        require(
            rollout.consumer_batch_size == batch_size,
            f"rollout.consumer_batch_size must equal train_dataset.batch_size ({batch_size}, "
            "which it takes when left out)",
            rollout.consumer_batch_size,
        )
        if rollout.max_concurrent_rollouts is None:
            rollout.max_concurrent_rollouts = batch_size * (rollout.max_head_offpolicyness + 1)
        require(
            actor.ppo_n_minibatches <= batch_size * group_size,
            "actor.ppo_n_minibatches must not exceed the samples of a step, "
            f"train_dataset.batch_size * gconfig.n_samples = {batch_size * group_size}",
            actor.ppo_n_minibatches,
        )
        for name in ("reward_norm", "adv_norm"):
            norm = getattr(actor, name)
            require(
                norm is None or not norm.compares_group or group_size >= 2,
                f"gconfig.n_samples must be at least 2 when actor.{name} compares the samples of "
                "a group (one alone has nothing to be compared with)",
                group_size,
            )
        require(
            group_size >= 2 or not self.gconfig.reward_normalization,
            "gconfig.n_samples must be at least 2 for gconfig.reward_normalization: one sample "
            "alone would always have a reward of 0",
            group_size,
        )
        require(
            self.dynamic_filter_fn is not None or not self.dynamic_bs,
            "dynamic_bs needs dynamic_filter_fn: without a filter every prompt is accepted",
            self.dynamic_bs,
        )

    def served_models(self) -> dict[str, FrozenModelConfig]:
        return {"teacher": self.teacher} if self.teacher and self.teacher.is_served else {}

    def of_teacher(self) -> PPOConfig:
        """This config as the teacher's servers see it: they serve its model, and get no weights."""
        teacher, actor, rollout = self.teacher, copy(self.actor), copy(self.rollout)
        assert teacher is not None and teacher.path is not None and teacher.backend is not None
        actor.path, actor.dtype = teacher.path, teacher.dtype
        actor.weight_update_mode, actor.use_lora = "disk", False
        rollout.backend, rollout.scheduling_spec = teacher.backend, teacher.scheduling_spec
        rollout.api_url, rollout.scheduling_strategy = [], SchedulingStrategy()
        rollout.use_lora = rollout.return_routed_experts = False
        view = copy(self)
        view.actor, view.rollout = actor, rollout
        return view

    @property
    def server(self) -> NativeServerConfig | vLLMConfig | SGLangConfig:
        """The section of the engine that rollout.backend chooses."""
        return getattr(self, self.rollout.engine)

    def time_shared_models(self) -> list[str]:
        """Roles whose models alternate with the inference server on the same devices."""
        target, hosts = self.rollout.scheduling_strategy.target, self.hosts()
        if target is None:
            return []
        return [role for role, host in hosts.items() if host == hosts[target]]

    def _check_ref(self) -> None:
        actor = self.actor
        if self.ref is None:
            found = f"actor.kl_ctl={actor.kl_ctl}, actor.kl_loss_coef={actor.kl_loss_coef}"
            require(
                not actor.needs_ref,
                "ref must be set for a KL penalty (`ref: {}` is the model that training starts "
                f"from); {found}",
                None,
            )
        elif actor.needs_ref:
            self.ref.inherit(actor)
        else:
            self.ref = None  # the loader warns

    def _check_critic(self) -> None:
        if self.critic is None:
            return
        self.critic.inherit(self.actor)
        norm = self.actor.reward_norm
        require(
            norm is None or not norm.compares_group,
            "critic and actor.reward_norm by group are two baselines: remove critic (GRPO), or "
            "reward_norm (PPO)",
            None,
        )
        samples = self.train_dataset.batch_size * self.gconfig.n_samples
        require(
            self.critic.ppo_n_minibatches <= samples,
            "critic.ppo_n_minibatches must not exceed the samples of a step, "
            f"train_dataset.batch_size * gconfig.n_samples = {samples}",
            self.critic.ppo_n_minibatches,
        )

    def _check_teacher(self) -> None:
        if self.teacher is None:
            return
        if self.teacher.is_served:
            self.teacher.inherit_servers(self.actor, self.rollout.backend)
            check_teacher_servers(self.of_teacher().rollout)
        else:
            self.teacher.inherit(self.actor)
        if self.teacher.rl_loss_weight == 0:
            reason = "teacher.rl_loss_weight is 0: nothing reads the advantages it changes"
            require(self.critic is None, f"critic must be left out, {reason}", None)
            require(self.actor.kl_ctl == 0, f"actor.kl_ctl must be 0, {reason}", self.actor.kl_ctl)


GRPOConfig = PPOConfig
