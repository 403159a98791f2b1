"""Builds workflows and filters from the config, and computes statistics of episodes.

In: `workflow`, `reward_fn` and `dynamic_filter_fn` as names, import paths or objects. Out: a
workflow ready to run, a filter, and the statistics of a batch.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from areal.algorithm import DYNAMIC_FILTERS
from areal.algorithm.normalization import are_equal, episode_means
from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import EPISODE_KEY
from areal.api.workflow_api import RolloutWorkflow, WorkflowLike, is_agent
from areal.models.vision.processor import find_processor
from areal.reward import get_reward_fn
from areal.rollout.failures import FailureLimits
from areal.rollout.group import GroupRunner
from areal.rollout.trajectory import episode_rewards
from areal.run.images import ImageStore
from areal.run.paths import RunPaths
from areal.trainer.servers import max_context
from areal.utils import logging
from areal.utils.import_path import load_named
from areal.workflow import resolve
from areal.workflow.chat import has_images
from areal.workflow.env import EnvWorkflow
from areal.workflow.vision_rlvr import VisionRLVRWorkflow

if TYPE_CHECKING:
    from pathlib import Path

    from areal.api.config.experiment import PPOConfig
    from areal.api.engine_api import InferenceEngine

    Trajectory = dict[str, torch.Tensor]

logger = logging.getLogger("Rewards")


def build_workflow(
    config: PPOConfig,
    tokenizer: Any,
    given: WorkflowLike | None,
    kwargs: dict[str, Any] | None,
    *,
    is_eval: bool,
    agents_folder: Path | None = None,
    image_folder: Path | None = None,
) -> RolloutWorkflow:
    """The workflow `given`, or the config's; `kwargs` extend `workflow_kwargs`.

    With `rollout.agent.mode: online` external clients drive training episodes; evaluation still
    uses a workflow. `agents_folder` is where servers for agents register, `image_folder` where
    images are kept (default: the run's).
    """
    image_folder = image_folder or RunPaths.of(config).images
    if config.rollout.agent.mode == "online" and not is_eval:
        from areal.agents.workflow import online_workflow  # late: a web framework

        _refuse_given(given)
        return online_workflow(
            **_agent_options(config, tokenizer, agents_folder, image_folder, is_eval=False),
            is_routed=config.rollout.workers > 0,
        )
    _, found = _chosen(config, given, is_eval)
    if isinstance(found, RolloutWorkflow):
        return resolve.build_workflow(found, kwargs)
    if is_agent(found):
        from areal.agents.workflow import agent_workflow  # late: a web framework

        own = {**config.workflow_kwargs, **(kwargs or {})}
        _check_agent_kwargs(found, own)
        options = _agent_options(config, tokenizer, agents_folder, image_folder, is_eval=is_eval)
        return agent_workflow(found, own, **options)
    arguments = {
        "gconfig": config.eval_gconfig if is_eval else config.gconfig,
        "tokenizer": tokenizer,
        **config.workflow_kwargs,
        **(kwargs or {}),
    }
    if isinstance(found, type) and issubclass(found, EnvWorkflow):
        own = {"env": config.env, "env_kwargs": config.env_kwargs}
        arguments = {**own, "mcp_servers": config.mcp_servers, **arguments}
    elif "reward_fn" not in arguments:
        arguments["reward_fn"] = get_reward_fn(config.reward_fn)
    if isinstance(found, type) and issubclass(found, VisionRLVRWorkflow):
        images = {"processor": config.actor.path, "image_folder": image_folder}
        arguments = {**images, **arguments}
    if is_eval and kwargs and "gconfig" in kwargs:
        # A script may pass one gconfig for both; evaluation keeps its own.
        arguments["gconfig"] = config.eval_gconfig
    gconfig = arguments["gconfig"]
    if isinstance(gconfig, GenerationHyperparameters):  # a workflow may have options of its own
        arguments["gconfig"] = _within_context(gconfig, config)
    return resolve.build_workflow(found, arguments)


def trial_groups(
    config: PPOConfig,
    engine: InferenceEngine,
    workflow: RolloutWorkflow,
    on_failed: Callable[[Exception], None] = lambda error: None,
) -> GroupRunner:
    """Runs groups as training does, but without retries; `on_failed` gets each sample's error."""
    return GroupRunner(
        engine=engine,
        workflow=workflow,
        group_size=config.gconfig.n_samples,
        run_seed=config.seed,
        is_eval=False,
        limits=FailureLimits(max_retries=0),
        on_attempt_failed=lambda error, retried: on_failed(error),
        reward_normalization=config.gconfig.reward_normalization,
    )


def _within_context(
    gconfig: GenerationHyperparameters, config: PPOConfig
) -> GenerationHyperparameters:
    """Episodes of several turns end at `max_tokens`; beyond the context they would fail."""
    context = max_context(config)
    if context is None or context >= gconfig.max_tokens:
        return gconfig
    return gconfig.new(max_tokens=context)


def refuse_images(
    config: PPOConfig,
    given: WorkflowLike | None,
    kwargs: dict[str, Any] | None,
    rows: Sequence[Mapping[str, Any]],
    *,
    is_eval: bool,
) -> None:
    """ValueError if rows have images and the workflow (chosen as in `build_workflow`) is text-only,
    or is an agent of a model that is.

    Checks all rows of a list, but only the first of a lazily loaded data set.
    """
    is_online = config.rollout.agent.mode == "online" and not is_eval
    name, found = ("online", None) if is_online else _chosen(config, given, is_eval)
    extracts_itself = "data_extract_prompt_fn" in {**config.workflow_kwargs, **(kwargs or {})}
    has_agent = is_online or is_agent(found)
    if not has_agent and (extracts_itself or not getattr(found, "text_only", False)):
        return
    looked_at = rows if isinstance(rows, list) else itertools.islice(rows, 1)
    if not any(isinstance(row, Mapping) and has_images(row) for row in looked_at):
        return
    section = "valid_dataset" if is_eval else "train_dataset"
    dataset = getattr(config, section)
    if not has_agent:
        raise ValueError(resolve.image_refusal(section, dataset, name))
    if find_processor(config.actor.path, None) is None:
        raise ValueError(resolve.agent_image_refusal(section, dataset, config.actor.path))


def _chosen(config: PPOConfig, given: WorkflowLike | None, is_eval: bool) -> tuple[Any, Any]:
    """The workflow as given or named, and the resolved object."""
    named = config.eval_workflow or config.workflow if is_eval else config.workflow
    chosen = given or named
    return chosen, resolve.find_workflow(chosen)


def _check_agent_kwargs(agent: Any, kwargs: dict[str, Any]) -> None:
    if not isinstance(agent, type) and kwargs:
        raise ValueError(
            f"workflow_kwargs build an agent, but {agent!r:.200} is built already: remove them"
        )
    if isinstance(agent, type):
        try:
            inspect.signature(agent).bind(**kwargs)
        except TypeError as error:
            raise ValueError(f"workflow_kwargs do not fit {agent.__name__}: {error}") from error


def _agent_options(
    config: PPOConfig,
    tokenizer: Any,
    folder: Path | None,
    image_folder: Path,
    *,
    is_eval: bool,
) -> dict[str, Any]:
    from areal.agents.sight import Sight

    options = config.rollout.agent
    processor = find_processor(config.actor.path, tokenizer)
    store = ImageStore(image_folder)
    return {
        # A fixed port is for external clients, and only one server can bind it.
        "config": dataclasses.replace(options, port=0, advertise_url=None) if is_eval else options,
        "tokenizer": tokenizer,
        "gconfig": config.eval_gconfig if is_eval else config.gconfig,
        "sight": processor and Sight(processor, store, options.image_folders),
        "folder": folder,
        "logs": RunPaths.of(config).logs if config.rollout.dump_to_file else None,
    }


def _refuse_given(given: Any) -> None:
    if given is not None:
        raise ValueError(
            "workflow must be left out with rollout.agent.mode=online: clients run the episodes; "
            f"got {given!r:.200}"
        )


def build_filter(
    config: PPOConfig, given: Callable[[Trajectory], bool] | str | None
) -> Callable[[Trajectory], bool] | None:
    """The dynamic filter; None accepts every group."""
    chosen = given or config.dynamic_filter_fn
    if not isinstance(chosen, str):
        return chosen
    return load_named(chosen, DYNAMIC_FILTERS, key="dynamic_filter_fn")


def describe_evaluation(
    groups: Sequence[Trajectory | None], *, num_samples: int
) -> dict[str, float]:
    """Mean reward over all `num_samples` samples, as `areal eval` takes it: one that failed or was
    rejected counts as 0 and is named by its number."""
    rewards = [
        reward
        for group in groups
        if group is not None
        for reward in episode_means(group["rewards"], group.get(EPISODE_KEY)).tolist()
    ]
    if not rewards:
        raise RuntimeError("evaluation produced no sample: the workflow rejected every row")
    unscored = num_samples - len(rewards)
    if unscored:
        logger.warning(
            "%d of %d samples of the evaluation failed or were rejected, and count as 0",
            unscored,
            num_samples,
        )
    return {"eval/reward": sum(rewards) / num_samples, "eval/unscored": unscored}


class RewardSpread:
    """Detects a run without learning signal: rewards that never differ.

    Advantages compare the samples of a group, or the groups of a batch if a group is one sample.
    If all rewards are equal, advantages and loss are 0, and training has no effect.
    """

    def __init__(self, patience: int = 10) -> None:
        self._patience = patience  # steps before the first warning; doubles with each one
        self._steps = 0  # in a row without different rewards

    def share(self, groups: Sequence[Trajectory]) -> float:
        """Share of groups with different rewards; warns after many steps without one."""
        rewards = [episode_rewards(group) or [] for group in groups]
        if all(len(group) == 1 for group in rewards):
            rewards = [[reward for (reward,) in rewards]]
        share = sum(map(_differ, rewards)) / len(rewards)
        self._steps = 0 if share > 0 else self._steps + 1
        if self._steps == self._patience:
            self._patience *= 2
            self._warn([reward for group in rewards for reward in group])
        return share

    def _warn(self, rewards: Sequence[float]) -> None:
        found = "equal within each group" if _differ(rewards) else f"all {rewards[0]:g}"
        logger.warning(
            "no two samples of a prompt had different rewards for %d steps (this step: %s): their "
            "advantages are 0, so the model learns nothing. Look at samples "
            "(rollout.dump_to_file=true) and at the reward function; a task that is too hard needs "
            "a warm start or easier prompts, one that is solved harder ones; gconfig.temperature "
            "and gconfig.n_samples make samples differ",
            self._steps,
            found,
        )


def _differ(rewards: Sequence[float]) -> bool:
    """By more than rounding."""
    if not rewards or min(rewards) == max(rewards):
        return False
    return not are_equal(torch.tensor(rewards, dtype=torch.float64))


def describe_batch(data: Mapping[str, torch.Tensor], version: int) -> dict[str, float]:
    """Statistics of a training batch: rewards, lengths, and token staleness at `version`."""
    ages = version - data["versions"][data["loss_mask"]]
    samples = len(data["rewards"])
    cut = data["seq_no_eos"].sum().item() if "seq_no_eos" in data else 0
    rewards = episode_means(data.get("original_rewards", data["rewards"]), data[EPISODE_KEY])
    return {
        "rollout/reward": rewards.mean().item(),
        "rollout/samples": samples,
        "tokens": data["attention_mask"].sum().item(),
        "rollout/output_len": ages.numel() / samples,
        "rollout/no_eos": cut / samples,
        "rollout/staleness": ages.float().mean().item(),
        "rollout/staleness_max": ages.max().item(),
    }
