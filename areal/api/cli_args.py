"""Public imports of the configuration: every section's class, and the loader from argv to a config.

    config, path = load_expr_config(sys.argv[1:], GRPOConfig)

reads `train.py --config grpo.yaml actor.optimizer.lr=1e-5 +gconfig.n_samples=8`. A mistake in it is
a `ConfigError`: one line with the position and the fix. Nothing here imports torch; OmegaConf is
imported only when a file is read.
"""

from __future__ import annotations

from areal.api.config.experiment import BaseExperimentConfig, GRPOConfig, PPOConfig
from areal.api.config.inference import (
    AgentConfig,
    GenerationHyperparameters,
    InferenceEngineConfig,
    ProcessLimits,
)
from areal.api.config.inference_servers import (
    NativeServerConfig,
    SGLangConfig,
    vLLMConfig,
)
from areal.api.config.loader import (
    dump_yaml,
    experiment_class,
    load_experiment,
    load_expr_config,
)
from areal.api.config.offline import DPOActorConfig, DPOConfig, RWConfig, SFTConfig
from areal.api.config.ppo import (
    PPOActorConfig,
    PPOCriticConfig,
    RefConfig,
    RejectionSamplingConfig,
    TeacherConfig,
)
from areal.api.config.run import (
    ClusterSpecConfig,
    DatasetConfig,
    EvaluatorConfig,
    PerfTracerConfig,
    RecoverConfig,
    SaverConfig,
    SchedulerConfig,
    StatsLoggerConfig,
    SwanlabConfig,
    TensorBoardConfig,
    TimerConfig,
    TrackioConfig,
    ValidDatasetConfig,
    WandBConfig,
    WatchdogConfig,
)
from areal.api.config.section import ConfigError
from areal.api.config.train_engine import (
    ArchonEngineConfig,
    FSDPEngineConfig,
    MegatronEngineConfig,
    MicroBatchSpec,
    NormConfig,
    OptimizerConfig,
    TrainEngineConfig,
)
from areal.api.scheduler_api import SchedulingSpec, SchedulingStrategy

TrainDatasetConfig = DatasetConfig  # the class of `train_dataset`

__all__ = [
    "AgentConfig",
    "ArchonEngineConfig",
    "BaseExperimentConfig",
    "ClusterSpecConfig",
    "ConfigError",
    "DPOActorConfig",
    "DPOConfig",
    "DatasetConfig",
    "EvaluatorConfig",
    "FSDPEngineConfig",
    "GRPOConfig",
    "GenerationHyperparameters",
    "InferenceEngineConfig",
    "MegatronEngineConfig",
    "MicroBatchSpec",
    "NativeServerConfig",
    "NormConfig",
    "OptimizerConfig",
    "PPOActorConfig",
    "PPOConfig",
    "PPOCriticConfig",
    "PerfTracerConfig",
    "ProcessLimits",
    "RWConfig",
    "RecoverConfig",
    "RefConfig",
    "RejectionSamplingConfig",
    "SFTConfig",
    "SGLangConfig",
    "SaverConfig",
    "SchedulerConfig",
    "SchedulingSpec",
    "SchedulingStrategy",
    "StatsLoggerConfig",
    "SwanlabConfig",
    "TeacherConfig",
    "TensorBoardConfig",
    "TimerConfig",
    "TrackioConfig",
    "TrainDatasetConfig",
    "TrainEngineConfig",
    "ValidDatasetConfig",
    "WandBConfig",
    "WatchdogConfig",
    "dump_yaml",
    "experiment_class",
    "load_experiment",
    "load_expr_config",
    "vLLMConfig",
]
