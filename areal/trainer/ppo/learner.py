"""What trains on one batch: the actor, and those of critic, reference model and teacher there are.

    learner = Learner(config, open_engine)      # opens the models
    data = learner.train(trajectories)          # one step of all that is trained

The training loop and `areal replay` both call it: there is one way to train a step. What comes out
is a function of the weights, the optimizers, `states()` and the trajectories in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from areal.trainer.ppo.actor import PPOActor
from areal.trainer.ppo.batch import collect, token_outputs
from areal.trainer.ppo.critic import PPOCritic
from areal.utils.perf_tracer import phase

if TYPE_CHECKING:
    from areal.algorithm.kl_controller import AdaptiveKlController
    from areal.api.config.experiment import PPOConfig
    from areal.api.config.train_engine import TrainEngineConfig
    from areal.api.engine_api import TrainEngine


class OpenEngine(Protocol):
    """Opens the model of one role; one that is not `trained` is only asked."""

    def __call__(
        self, role: str, config: TrainEngineConfig, *, trained: bool = True
    ) -> TrainEngine: ...


class Learner:
    def __init__(self, config: PPOConfig, open_engine: OpenEngine) -> None:
        self.engine = open_engine("actor", config.actor)
        self.actor = PPOActor(config.actor, self.engine, config.teacher)
        self.critic: PPOCritic | None = None
        if config.critic is not None:
            self.critic = PPOCritic(config.critic, open_engine("critic", config.critic))
        # What a model that is only asked says of each token, by the name it has in the batch.
        self._advisers: dict[str, TrainEngine] = {}
        for role, section in (("ref", config.ref), ("teacher", config.teacher)):
            if section is not None:
                frozen = section.engine_config(config.actor)
                self._advisers[f"{role}_logp"] = open_engine(role, frozen, trained=False)

    def states(self) -> dict[str, AdaptiveKlController]:
        """What training on depends on besides the engines, by the name it is remembered under."""
        control = self.actor.kl_control
        return {} if control is None else {"kl_control": control}

    def train(self, trajectories: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Train on these, one trajectory per prompt; all samples with all that was found of them.

        Statistics go to `stats_tracker` under `actor/` and `critic/`.
        """
        with phase("forward"):
            data = self._ask_models(trajectories)
        with phase("advantages"):
            data |= self.actor.compute_advantages(data)
        with phase("train"):
            self.actor.ppo_update(data)
            if self.critic is not None:
                self.critic.ppo_update(data)
        return data

    def _ask_models(self, trajectories: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """All samples as one batch, with what each model says of their tokens."""
        data = collect(trajectories)
        data |= self.actor.compute_policies(data)
        for key, engine in self._advisers.items():
            data[key] = token_outputs(engine, data)
        if self.critic is not None:
            data["values"] = self.critic.compute_values(data)
        return data
