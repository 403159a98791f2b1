"""Trajectories as the executor makes them and PPO roles over the real engine, for tests."""

from __future__ import annotations

import torch
from tiny import draw_score_head

from areal.api.config.ppo import PPOActorConfig, PPOCriticConfig
from areal.api.config.train_engine import MicroBatchSpec, NormConfig, OptimizerConfig
from areal.api.engine_api import TrainEngine
from areal.api.io_struct import FinetuneSpec
from areal.engine import train_engine_class
from areal.trainer.ppo.actor import PPOActor
from areal.trainer.ppo.batch import collect
from areal.trainer.ppo.critic import PPOCritic

GRPO = NormConfig(mean_level="group", std_level="group")
PLAIN_SGD = dict(type="sgd", lr=0.5, beta1=0.0, weight_decay=0.0, gradient_clipping=1e9)


def open_actor(folder, **options) -> PPOActor:
    optimizer = OptimizerConfig(**options.pop("optimizer", {"lr": 1e-2}))
    teacher = options.pop("teacher", None)
    config = PPOActorConfig(path=str(folder), optimizer=optimizer, **options)
    return PPOActor(config, open_engine(config), teacher)


def open_critic(folder, **options) -> PPOCritic:
    optimizer = OptimizerConfig(**options.pop("optimizer", {"lr": 1e-2}))
    options = {"mb_spec": MicroBatchSpec(), **options}
    config = PPOCriticConfig(path=str(folder), optimizer=optimizer, **options)
    return PPOCritic(config, open_engine(config))


def open_engine(config) -> TrainEngine:
    engine = train_engine_class(config.backend)(config)
    engine.initialize(FinetuneSpec(1, 100, 1))
    if config.is_critic:
        draw_score_head(engine.model)
    return engine


def group(prompt_len: int, answer_lens: list[int], rewards: list[float], seed: int = 0) -> dict:
    """One prompt's samples, as a workflow and the executor make them."""
    gen = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([prompt_len + n for n in answer_lens])
    column = torch.arange(int(lengths.max()))
    mask = column < lengths[:, None]
    generated = mask & (column >= prompt_len)
    return {
        "input_ids": torch.randint(1, 64, mask.shape, generator=gen, dtype=torch.int32) * mask,
        "attention_mask": mask,
        "loss_mask": generated.int(),
        "logprobs": -torch.rand(mask.shape, generator=gen) * generated,
        "versions": torch.where(generated, 3, -1).int(),
        "rewards": torch.tensor(rewards),
        "seq_no_eos": torch.zeros(len(rewards), dtype=torch.bool),
    }


def two_groups() -> list[dict]:
    return [
        group(3, [2, 4, 3], [1.0, 0.0, 0.0], seed=1),
        group(5, [1, 6], [0.0, 1.0], seed=2),
        group(2, [2, 2], [1.0, 1.0], seed=3),  # equal rewards: nothing to learn
    ]


def with_own_logprobs(actor: PPOActor, trajs: list[dict]) -> list[dict]:
    """The trajectories as if the engine's current weights had sampled them."""
    return [
        traj | {"logprobs": actor.compute_logp(traj).roll(1, 1) * traj["loss_mask"]}
        for traj in trajs
    ]


def advantages(actor: PPOActor, trajs: list[dict], **advice: torch.Tensor) -> dict:
    """A step's batch up to the update, as PPOTrainer prepares it; `advice` is what other models
    say of its tokens (ref_logp, teacher_logp, values)."""
    data = collect(trajs)
    data |= actor.compute_policies(data) | advice
    return data | actor.compute_advantages(data)


def weights_of(actor: PPOActor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.engine.hf_weights()}
