"""`areal doctor CONFIG`: looks at the stages of a training that runs as the config says.

    with ScratchFolder("doctor") as scratch, PPOTrainer(apart(config, scratch), rows) as trainer:
        chart = examine(trainer)

Everything is real: model, inference engine, workflow, reward processes, rows, one training step and
one weight update. Only the folder is another, which is deleted. `examine` looks at any PPOTrainer,
also at one of a subclass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from areal.api.scratch import ScratchFolder
from areal.doctor.engines import EngineLook, check_recorded
from areal.doctor.episodes import (
    Episodes,
    check_loss_mask,
    check_sampling,
    check_tokens,
    run_episodes,
)
from areal.doctor.learning import check_advantages, check_alignment, check_optimizer, take_step
from areal.doctor.report import Chart
from areal.doctor.rewards import check_rewards
from areal.doctor.text import check_text
from areal.rollout.failures import describe
from areal.sandbox.pool import RewardError
from areal.trainer.episodes import build_workflow
from areal.trainer.experiment import load_datasets, refuse_image_rows
from areal.trainer.probe import NUM_PROMPTS
from areal.trainer.replay import apart
from areal.trainer.rl_trainer import PPOTrainer

if TYPE_CHECKING:
    from areal.api.config.experiment import PPOConfig


def examine_config(config: PPOConfig) -> Chart:
    """Builds the training of `config` in a scratch folder and looks at it."""
    if config.rollout.agent.mode == "online":
        raise ValueError(
            "rollout.agent.mode: clients of online run the episodes, so there is none to look at; "
            "look at the run's folder instead, with areal doctor RUN"
        )
    train, valid = load_datasets(config)
    refuse_image_rows(config, train, valid)
    with ScratchFolder("doctor") as scratch:
        alone = apart(config, scratch)
        # The controller itself runs the few episodes.
        alone = replace(alone, rollout=replace(alone.rollout, workers=0))
        with PPOTrainer(alone, train) as trainer:
            return examine(trainer)


def examine(trainer: PPOTrainer) -> Chart:
    """Runs a few episodes, trains one step and publishes it, looking at every stage."""
    chart, config = Chart(), trainer.config
    workflow = build_workflow(
        config, trainer.tokenizer, None, None, is_eval=False, agents_folder=trainer.run.paths.agents
    )
    try:
        _examine(chart, trainer, workflow)
    finally:
        workflow.close()
    return chart


def _examine(chart: Chart, trainer: PPOTrainer, workflow: Any) -> None:
    config, tokenizer = trainer.config, trainer.tokenizer
    num_prompts = min(NUM_PROMPTS, len(trainer.train_dataset))
    rows = [trainer.source.prompt(task_id).data for task_id in range(num_prompts)]
    chats = [row["messages"] for row in rows if isinstance(row, dict) and "messages" in row]
    check_text(chart, config, tokenizer, chats)
    episodes = _run_episodes(chart, trainer, workflow, num_prompts)
    if episodes is None:
        return
    check_tokens(chart, config, tokenizer, episodes)
    check_sampling(chart, config, episodes)
    check_loss_mask(chart, episodes.masks())
    prompts, trajectories = episodes.prompts, episodes.trajectories
    check_rewards(chart, config, trainer.runner, tokenizer, prompts, trajectories)
    if any(request.image_data for request, _ in episodes.calls):
        return chart.unseen("weights", "requests show images, and engines are compared by text")
    sent = episodes.short_prompts(NUM_PROMPTS)
    if not sent:
        return chart.unseen("weights", "no request is short enough to compare engines with")
    look = EngineLook(chart, trainer, sent)
    look.compare("before training")
    check_recorded(chart, trainer.engine, next(episodes.rows())[1])
    version = trainer.engine.get_version() + 1
    step = take_step(trainer.learner, trajectories)
    check_advantages(chart, config, step)
    check_alignment(chart, step)
    check_optimizer(chart, config, step)
    trainer.publish_weights(version)
    look.compare("after an update")


def _run_episodes(
    chart: Chart, trainer: PPOTrainer, workflow: Any, num_prompts: int
) -> Episodes | None:
    """None if there is nothing to look at."""
    trainer.device.to_generation()
    try:
        episodes = run_episodes(trainer, workflow, num_prompts)
    except RewardError as error:
        chart.fault("reward", describe(error), change="correct the reward function")
        return None
    except Exception as error:  # boundary: code of the user, a server
        if chart.first_fault is None:
            raise RuntimeError(f"an episode failed: {describe(error)}") from error
        chart.unseen("tokens", f"episodes fail: {describe(error)}")
        return None
    finally:
        trainer.device.to_training()
    if not episodes.trajectories:
        chart.unseen("tokens", "the workflow rejected every episode")
        return None
    return episodes
