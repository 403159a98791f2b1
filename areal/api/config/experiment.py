"""The root of a config file: one class per trainer.

A value is written once. Sections get what they need from the root (batch size, model, sampling
options) in `__post_init__`; run name and folders exist only at the root. A section checks itself;
checks across sections are here.
"""

from __future__ import annotations

import re
from dataclasses import field, fields, replace
from typing import Any, Literal

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.inference import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    NativeServerConfig,
    SGLangConfig,
    VLLMConfig,
)
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
from areal.api.config.train_engine import TrainEngineConfig, check_allocation
from areal.api.scheduler_api import Job, SchedulingSpec

_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]*")


@config_section
class BaseExperimentConfig:
    """What every kind of training has in common."""

    experiment_name: str
    """Name of the experiment; with trial_name the folder of the run."""
    trial_name: str
    """Name of this run of the experiment."""
    cluster: ClusterSpecConfig = field(default_factory=ClusterSpecConfig)
    """Where files lie."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Who starts worker processes."""
    allocation_mode: str = ""
    """Older way to write the `backend` of all engines in one string, like `native:d1+archon:d1`."""
    seed: int = 1
    """Fixes data order, sampling and initial weights."""
    total_train_epochs: int = 1
    """Times the training goes through the data set."""
    total_train_steps: int | None = None
    """Stop after this many steps, if that is sooner."""
    tokenizer_path: str = ""
    """Folder or hub name of the tokenizer. Default: actor.path."""
    train_dataset: DatasetConfig
    """What is trained on."""
    valid_dataset: ValidDatasetConfig | None = None
    """What is evaluated on. null: nothing is, whatever `evaluator` says."""
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
        self.tokenizer_path = expand_path("tokenizer_path", self.tokenizer_path)

    def models(self) -> dict[str, TrainEngineConfig | FrozenModelConfig]:
        """Role -> its section, for every model of the run; the actor comes first."""
        sections = {field.name: getattr(self, field.name) for field in fields(self)}
        kinds = (TrainEngineConfig, FrozenModelConfig)
        return {name: section for name, section in sections.items() if isinstance(section, kinds)}

    def num_processes(self) -> dict[str, int]:
        """Role -> number of its own worker processes; 0 for a role that runs in the controller or
        in another role's processes."""
        hosts = self.hosts()
        return {role: n if hosts[role] == role else 0 for role, n in self.num_ranks().items()}

    def jobs(self) -> list[Job]:
        """The workers of all roles that have their own."""
        return [self.model_job(role) for role, count in self.num_processes().items() if count]

    def model_job(self, role: str) -> Job:
        """The ranks of one model as workers of a scheduler."""
        section = self.models()[role]
        return Job(
            role=role,
            replicas=self.num_ranks()[role],
            tasks=section.scheduling_spec or [SchedulingSpec()],
            scheduling_strategy=section.scheduling_strategy,
        )

    def hosts(self) -> dict[str, str]:
        """Role -> the role whose processes host its model, or `controller`."""
        sizes = self.num_ranks()
        return {
            role: "controller"
            if self.scheduler.type == "local" and sizes[role] == 1
            else section.scheduling_strategy.target or role
            for role, section in self.models().items()
        }

    def num_ranks(self) -> dict[str, int]:
        """Role -> number of ranks of its model."""
        models = self.models().items()
        return {role: section.allocation.parallel.world_size for role, section in models}

    def _check_placement(self, actor: TrainEngineConfig) -> None:
        """Each rank has the devices it needs; colocated roles have equal numbers of ranks."""
        models, sizes = self.models(), self.num_ranks()
        mode = actor.weight_update_mode
        require(
            self.scheduler.type == "local" or mode in ("shm", "disk", "delta", "xccl"),
            "actor.weight_update_mode must be shm, disk, delta or xccl when scheduler.type is ray",
            mode,
        )
        self._check_machines()
        for role, section in models.items():
            require(
                len(section.scheduling_spec) in (0, 1, sizes[role]),
                f"{role}.scheduling_spec must have one entry, or one for each of the "
                f"{sizes[role]} ranks of {section.backend!r}",
                f"{len(section.scheduling_spec)} entries",
            )
            target = section.scheduling_strategy.target
            if target is None:
                continue
            key = f"{role}.scheduling_strategy.target"
            others = [
                name
                for name, other in models.items()
                if name != role and other.scheduling_strategy.target is None
            ]
            require(
                target in others,
                f"{key} must be a model with processes of its own: {others}",
                target,
            )
            require(
                sizes[role] == sizes[target],
                f"{role}.backend must have as many ranks as {target}.backend ({sizes[target]}), "
                "whose processes it shares",
                sizes[role],
            )

    def _check_machines(self) -> None:
        require(
            self.cluster.n_nodes == 1 or self.scheduler.type == "ray",
            f"scheduler.type must be ray when cluster.n_nodes is {self.cluster.n_nodes}",
            self.scheduler.type,
        )

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
                "actor.is_critic must be false: this trainer needs a model of tokens (a reward "
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
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    """The vLLM server, for rollout.backend vllm."""
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    """The SGLang server, for rollout.backend sglang."""
    actor: PPOActorConfig
    """The trained policy."""
    ref: RefConfig | None = None
    """The reference model; needed by actor.kl_ctl and actor.kl_loss_coef, and only by them.
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
    reward_fn: str = "gsm8k"
    """A name, or the import path of a reward function."""
    dynamic_bs: bool = False
    """Train on the accepted prompts of a batch instead of waiting for a full one. Needs
    dynamic_filter_fn."""
    dynamic_filter_fn: str | None = None
    """A name, or the import path of a function trajectory -> bool; prompts it refuses are not
    trained on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._inherit_from_trainer(self.actor, "rl")
        self._inherit_sampling()
        self._check_batch()
        self._check_ranks()
        self._check_workers()
        self._check_ref()
        self._check_critic()
        self._check_teacher()
        self._check_stock_server()
        self._check_placement(self.actor)
        _check_turns(self)
        if self.allocation_mode:
            backends = {"inference": self.rollout.backend, "training": self.actor.backend}
            check_allocation(self.allocation_mode, backends)

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

    def _check_ranks(self) -> None:
        num_servers = self.rollout.num_servers
        require(
            len(self.rollout.scheduling_spec) in (0, 1, num_servers),
            f"rollout.scheduling_spec must have one entry, or one for each of the {num_servers} "
            f"servers of {self.rollout.backend!r}",
            f"{len(self.rollout.scheduling_spec)} entries",
        )
        if self.rollout.num_servers * self.rollout.tensor_parallel == 1:
            return
        several = f"when rollout.backend is {self.rollout.backend!r}, several processes"
        mode = self.actor.weight_update_mode
        require(
            mode in ("shm", "disk", "delta", "xccl"),
            f"actor.weight_update_mode must be shm, disk, delta or xccl {several}",
            mode,
        )
        require(
            not self.native.batch_invariant or self.rollout.tensor_parallel == 1,
            f"native.batch_invariant must be false {several}",
            True,
        )

    def _check_machines(self) -> None:
        super()._check_machines()
        machines, mode = self.cluster.n_nodes, self.actor.weight_update_mode
        require(
            machines == 1 or mode in ("disk", "delta", "xccl"),
            "actor.weight_update_mode must be disk, delta or xccl when cluster.n_nodes is "
            f"{machines}: memory is not shared between machines",
            mode,
        )

    def jobs(self) -> list[Job]:
        workers = [self.rollout_worker_job()] if self.rollout.workers else []
        return [*super().jobs(), self.server_job(), *workers]

    def rollout_worker_job(self) -> Job:
        """The rollout worker processes as workers of a scheduler."""
        one_core = [SchedulingSpec(cpu=1)]
        count = self.rollout.workers
        return Job("rollout_worker", count, one_core, default_gpus=0, overlapping=True)

    def server_job(self) -> Job:
        """The inference servers as workers of a scheduler, one worker per server."""
        rollout = self.rollout
        num_threads = self.server.threads * rollout.tensor_parallel
        specs = rollout.scheduling_spec or [SchedulingSpec()]
        return Job(
            role="rollout",
            replicas=rollout.num_servers,
            tasks=[replace(spec, cpu=spec.cpu or num_threads) for spec in specs],
            default_gpus=rollout.tensor_parallel,
        )

    @property
    def server(self) -> NativeServerConfig | VLLMConfig | SGLangConfig:
        """The section of the engine that rollout.backend chooses."""
        return getattr(self, self.rollout.engine)

    def _check_stock_server(self) -> None:
        """Reject, not ignore, options that a stock server does not support."""
        engine = self.rollout.engine
        if engine == "native":
            return
        chosen = f"when rollout.backend is {self.rollout.backend!r}"
        mode = self.actor.weight_update_mode
        if engine == "vllm":
            require(
                mode in ("shm", "disk", "xccl"),
                f"actor.weight_update_mode must be shm, disk or xccl {chosen}",
                mode,
            )
        else:
            require(
                mode in ("shm", "disk"),
                f"actor.weight_update_mode must be shm or disk {chosen}: it reads weights from a "
                "folder alone",
                mode,
            )
        require(
            self.rollout.recompute_kv,
            f"rollout.recompute_kv must be true {chosen}: what an update interrupts is sent again",
            False,
        )
        require(
            not self.native.batch_invariant,
            f"native.batch_invariant must be false {chosen}: the native server does not run",
            True,
        )
        # Only the controller knows which requests an update interrupts; ranks would bypass it.
        require(
            self.num_processes()["actor"] == 0,
            f"actor.backend must be one rank in the controller {chosen}: use archon:d1 or fsdp:d1 "
            "with scheduler.type=local, or rollout.backend=native:d1",
            self.actor.backend,
        )
        if engine == "sglang":
            default = GenerationHyperparameters()
            for name in ("top_p", "top_k"):
                value = getattr(self.gconfig, name)
                require(
                    value == getattr(default, name),
                    f"gconfig.{name} must be left out {chosen}: its log-probabilities are those "
                    "before the cut, which is not what samples are drawn from",
                    value,
                )

    def models_in_turns(self) -> list[str]:
        """Roles whose models share devices with the inference server and alternate with it."""
        target, hosts = self.rollout.scheduling_strategy.target, self.hosts()
        if target is None:
            return []
        return [role for role, host in hosts.items() if host == hosts[target]]

    def _check_workers(self) -> None:
        if self.rollout.workers == 0:
            return
        agent, mode = self.rollout.agent, self.actor.weight_update_mode
        in_workers = "when rollout.workers is above 0"
        require(
            self.rollout.engine == "native",
            f"rollout.backend must be native {in_workers}: what an update interrupts in a stock "
            "server is sent again by the controller alone",
            self.rollout.backend,
        )
        require(
            mode != "direct",
            f"actor.weight_update_mode must not be direct {in_workers}: they need a server",
            mode,
        )
        require(
            agent.mode != "online",
            f"rollout.agent.mode must not be online {in_workers}: clients need one address",
            agent.mode,
        )
        require(
            agent.port == 0,
            f"rollout.agent.port must be 0 {in_workers}: each has a proxy of its own",
            agent.port,
        )

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
            return
        require(
            actor.needs_ref,
            "ref has no effect: set actor.kl_ctl or actor.kl_loss_coef above 0, or remove it",
            None,
        )
        self.ref.inherit(actor)

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
        self.teacher.inherit(self.actor)
        if self.teacher.rl_loss_weight == 0:
            reason = "teacher.rl_loss_weight is 0: nothing reads the advantages it changes"
            require(self.critic is None, f"critic must be left out, {reason}", None)
            require(self.actor.kl_ctl == 0, f"actor.kl_ctl must be 0, {reason}", self.actor.kl_ctl)


GRPOConfig = PPOConfig


_SHARED_DEVICES = "rollout.scheduling_strategy.target"


def _check_turns(config: PPOConfig) -> None:
    """ValueError if `rollout` shares devices and cannot; no-op if it has its own."""
    target = config.rollout.scheduling_strategy.target
    if target is None:
        return
    models = config.models()
    owners = [role for role, model in models.items() if model.scheduling_strategy.target is None]
    require(
        target in owners,
        f"{_SHARED_DEVICES} must be a model with devices of its own: {owners}",
        target,
    )
    in_turns = f"when {_SHARED_DEVICES} is {target!r}"
    _check_server_in_turns(config, target, in_turns)
    for role in config.models_in_turns():
        require(
            models[role].allocation.backend != "megatron",
            f"{role}.backend must be archon or fsdp {in_turns}: megatron does not leave a device",
            models[role].backend,
        )


def _check_server_in_turns(config: PPOConfig, target: str, in_turns: str) -> None:
    rollout, mode = config.rollout, config.actor.weight_update_mode
    require(
        rollout.engine == "native",
        f"rollout.backend must be native {in_turns}: other servers do not leave a device",
        rollout.backend,
    )
    num_ranks = ModelAllocation.from_str(rollout.backend).parallel.world_size
    expected = config.num_ranks()[target]
    require(
        num_ranks == expected,
        f"rollout.backend must have as many ranks as {target}.backend ({expected}), whose devices "
        "it shares",
        num_ranks,
    )
    require(
        config.scheduler.type == "local",
        f"scheduler.type must be local {in_turns}: Ray gives servers devices of their own",
        config.scheduler.type,
    )
    require(
        mode in ("shm", "ipc", "disk", "delta"),
        f"actor.weight_update_mode must be shm, ipc, disk or delta {in_turns}: the server is a "
        "process of its own, and off the device when new weights come",
        mode,
    )
    require(
        rollout.recompute_kv,
        f"rollout.recompute_kv must be true {in_turns}: a cache does not outlive the turn",
        False,
    )
