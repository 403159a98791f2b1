"""Every import and command that AReaL's documents show finds a real thing here."""

from __future__ import annotations

import importlib
import inspect

import pytest

NAMES = {
    "areal": "DPOTrainer PPOTrainer RWTrainer SFTTrainer RolloutController StalenessManager "
    "TrainController WorkflowExecutor current_platform workflow_context",
    "areal.api": "Agent AgentWorkflow AllocationMode AsyncRewardWrapper FinetuneSpec "
    "GenerationHyperparameters InferenceEngine InteractionWithTokenLogpReward Job "
    "LocalInfServerInfo ModelAllocation ModelRequest ModelResponse ParallelStrategy ParamSpec "
    "RolloutStat RolloutWorkflow SaveLoadMeta Scheduler SchedulingSpec StepInfo TrainEngine "
    "WeightUpdateMeta Worker WorkflowLike",
    "areal.api.alloc_mode": "AllocationMode ModelAllocation ParallelStrategy",
    "areal.api.cli_args": "AgentConfig ArchonEngineConfig BaseExperimentConfig ClusterSpecConfig "
    "DPOConfig DatasetConfig EvaluatorConfig FSDPEngineConfig GRPOConfig "
    "GenerationHyperparameters InferenceEngineConfig MegatronEngineConfig MicroBatchSpec "
    "NormConfig OptimizerConfig PPOActorConfig PPOConfig PPOCriticConfig PerfTracerConfig "
    "RWConfig RecoverConfig RejectionSamplingConfig SFTConfig SGLangConfig SaverConfig "
    "SchedulerConfig SchedulingSpec SchedulingStrategy StatsLoggerConfig TeacherConfig "
    "TrainDatasetConfig TrainEngineConfig ValidDatasetConfig load_expr_config vLLMConfig",
    "areal.api.engine_api": "InferenceEngine TrainEngine WeightUpdateMeta",
    "areal.api.io_struct": "ModelRequest ModelResponse WeightUpdateMeta",
    "areal.api.reward_api": "AsyncRewardWrapper",
    "areal.api.scheduler_api": "Job Scheduler Worker",
    "areal.api.workflow_api": "AgentWorkflow RolloutWorkflow WorkflowLike",
    "areal.dataset": "VALID_DATASETS get_custom_dataset",
    "areal.dataset.clevr_count_70k": "get_clevr_count_70k_rl_dataset",
    "areal.dataset.geometry3k": "get_geometry3k_rl_dataset",
    "areal.dataset.gsm8k": "get_gsm8k_rl_dataset get_gsm8k_sft_dataset",
    "areal.dataset.hhrlhf": "get_hhrlhf_dpo_dataset get_hhrlhf_rw_dataset",
    "areal.dataset.torl_data": "get_torl_data_rl_dataset",
    "areal.engine.sglang_remote": "RemoteSGLangEngine",
    "areal.engine.vllm_remote": "RemotevLLMEngine",
    "areal.infra.launcher.local": "",
    "areal.infra.launcher.ray": "",
    "areal.infra.launcher.slurm": "",
    "areal.models": "register_model_spec",
    "areal.reward": "AsyncRewardWrapper VALID_REWARD_FN clevr_count_70k_reward_fn "
    "geometry3k_reward_fn get_math_verify_worker get_reward_fn gsm8k_reward_fn",
    "areal.reward.clevr_count_70k": "clevr_count_70k_reward_fn",
    "areal.reward.geometry3k": "geometry3k_reward_fn",
    "areal.reward.gsm8k": "gsm8k_reward_fn",
    "areal.reward.math_verify": "get_math_verify_worker",
    "areal.tools.validate_installation": "main",
    "areal.utils.data": "concat_padded_tensors",
    "areal.utils.logging": "getLogger",
    "areal.utils.perf_tracer": "atrace_scope instant trace_perf trace_scope",
    "areal.utils.stats_tracker": "denominator export get record_timing scalar scope stat",
    "areal.utils.tokenizer": "load_hf_tokenizer",
    "areal.workflow": "MultiTurnWorkflow RLVRWorkflow VisionRLVRWorkflow",
    "areal.workflow.multi_turn": "MultiTurnWorkflow",
    "areal.workflow.rlvr": "RLVRWorkflow",
    "areal.workflow.vision_rlvr": "VisionRLVRWorkflow",
}

METHODS = {
    "InferenceEngine": "initialize destroy agenerate init_weights_update_group "
    "update_weights_from_distributed update_weights_from_disk set_version get_version "
    "compute_logp submit wait wait_for_task rollout_batch prepare_batch pause_generation "
    "continue_generation pause resume offload onload export_stats",
    "TrainEngine": "create_process_group initialize destroy train eval connect_engine "
    "update_weights rollout_batch prepare_batch set_version get_version save load "
    "optimizer_zero_grad optimizer_step step_lr_scheduler train_batch eval_batch forward_batch "
    "forward export_stats onload offload",
}


@pytest.mark.parametrize("module", NAMES)
def test_the_names_are_where_the_documents_import_them_from(module):
    found = importlib.import_module(module)
    missing = [name for name in NAMES[module].split() if getattr(found, name, None) is None]
    assert not missing


@pytest.mark.parametrize("contract", METHODS)
def test_the_contracts_have_the_documented_calls(contract):
    found = getattr(importlib.import_module("areal.api.engine_api"), contract)
    for name in METHODS[contract].split():
        assert inspect.isfunction(getattr(found, name)), name


def test_names_of_rewards_and_data_sets_are_those_of_the_config():
    from areal.dataset import VALID_DATASETS
    from areal.reward import VALID_REWARD_FN, get_reward_fn

    names = {"gsm8k", "geometry3k", "clevr_count_70k", "virl39k", "hh-rlhf", "torl_data"}
    assert names <= set(VALID_DATASETS)
    assert all(callable(get_reward_fn(name)) for name in VALID_REWARD_FN)


def test_the_platform_of_this_process():
    import torch

    from areal import current_platform

    assert current_platform.device_type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert current_platform.current_device().type == current_platform.device_type
    assert current_platform.device_count() >= 1
    current_platform.synchronize()
    current_platform.empty_cache()


def test_a_base_class_for_agents_warns_that_it_is_not_needed():
    from areal.api import AgentWorkflow
    from areal.api.workflow_api import is_agent

    class Solver(AgentWorkflow):
        async def run(self, data, **extra_kwargs):
            return 1.0

    with pytest.warns(DeprecationWarning, match="Solver need not inherit from AgentWorkflow"):
        assert is_agent(Solver())
