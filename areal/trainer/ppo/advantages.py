"""Advantages: from the rewards of a batch to one advantage per token.

    outcome rewards [B] -> penalty, scaling, normalisation -> at the last token [B, S]
    + KL rewards of each token (needs `ref_logp`) -> GAE with `values` (0 without a critic)
    -> normalisation

The options are in the config section `actor`. The coefficient of the KL rewards is constant, or
adapts to a target; then it is part of the run's state (`kl_control`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from areal.algorithm import KL_ESTIMATORS, LAMBDA_FUNCTIONS
from areal.algorithm.advantage import (
    LambdaContext,
    cut_off_values,
    evaluate_lambda,
    gae,
    gae_by_turn,
    lambda_context,
    overlong_penalty,
    place_outcome,
    shape_rewards,
)
from areal.algorithm.kl import AdaptiveKlController, kl_rewards
from areal.algorithm.normalization import normalize
from areal.api.config.ppo import PPOActorConfig
from areal.api.config.train_engine import NormConfig
from areal.api.io_struct import EPISODE_KEY
from areal.trainer.ppo.batch import group_sizes, required
from areal.utils import stats_tracker
from areal.utils.data import sequence_lengths
from areal.utils.import_path import load_named


class AdvantageEstimator:
    _lambda_fn: Callable[..., Any]  # if gae_lambda names a function

    def __init__(self, config: PPOActorConfig) -> None:
        self.config = config
        self.kl_control: AdaptiveKlController | None = None
        if config.kl_target is not None:
            self.kl_control = AdaptiveKlController(
                config.kl_ctl, target=config.kl_target, horizon=config.kl_horizon
            )
        assert config.kl_estimator is not None  # set by the config
        self._kl_estimator = load_named(
            config.kl_estimator, KL_ESTIMATORS, key="actor.kl_estimator"
        )
        if isinstance(config.gae_lambda, str):
            self._lambda_fn = load_named(
                config.gae_lambda, LAMBDA_FUNCTIONS, key="actor.gae_lambda"
            )
            # Probe it now: a function that cannot be called must not fail after the first rollout.
            lengths_B = torch.tensor([1.0, 2.0, 1000.0])
            probe = LambdaContext(lengths_B, torch.ones_like(lengths_B), lengths_B)
            evaluate_lambda(self._lambda_fn, probe, **config.gae_lambda_kwargs)

    def estimate(self, data: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """`advantages`, `returns`, `tot_rewards` and `kl_rewards`, each `[B, S]`."""
        config = self.config
        rewards_B = self._outcomes(data)
        mask = data["attention_mask"]
        outcome_BS = place_outcome(rewards_B, sequence_lengths(mask), mask.shape[1])
        kl_BS = self._kl_rewards(data)
        advantages_BS, returns_BS = self._gae(data, outcome_BS, kl_BS)
        if config.adv_norm is not None:
            advantages_BS = _normalize(advantages_BS, data, config.adv_norm, data["loss_mask"])
        return {
            "kl_rewards": kl_BS,
            "tot_rewards": outcome_BS + kl_BS,
            "advantages": advantages_BS,
            "returns": returns_BS,
        }

    def _outcomes(self, data: Mapping[str, Any]) -> torch.Tensor:
        """The shaped rewards `[B]`."""
        config = self.config
        rewards_B = data["rewards"].float()
        if config.overlong_reward_penalty:
            # The config requires the first two with the penalty, and sets the last.
            assert config.overlong_tokens is not None
            assert config.overlong_penalty_factor is not None
            assert config.max_new_tokens is not None
            rewards_B = rewards_B + overlong_penalty(
                data["loss_mask"].sum(dim=1),
                max_new_tokens=config.max_new_tokens,
                overlong_tokens=config.overlong_tokens,
                factor=config.overlong_penalty_factor,
            )
        rewards_B = shape_rewards(
            rewards_B,
            bias=config.reward_bias,
            scaling=config.reward_scaling,
            clip=config.reward_clip,
        )
        if config.reward_norm is not None:
            rewards_B = _normalize(rewards_B, data, config.reward_norm)
        stats_tracker.denominator(n_seqs=torch.ones_like(rewards_B, dtype=torch.bool))
        stats_tracker.stat("n_seqs", shaped_reward=rewards_B)
        if config.mask_no_eos_with_zero:
            rewards_B = rewards_B.masked_fill(_no_eos(data), 0.0)
        return rewards_B

    def _kl_rewards(self, data: Mapping[str, Any]) -> torch.Tensor:
        """KL penalty of each token relative to the reference model, 0 without `kl_ctl`.

        The controller is updated after use, so all rewards of a step have one coefficient. The
        divergence is in nats per answer.
        """
        if self.config.kl_ctl == 0:
            return torch.zeros_like(data["logprobs"])
        kl_ctl = self.config.kl_ctl if self.kl_control is None else self.kl_control.value
        nearness_BS = kl_rewards(
            data["logprobs"],
            data["ref_logp"],
            data["loss_mask"],
            kl_ctl=1.0,
            estimator=self._kl_estimator,
        )
        kl_B = -nearness_BS.sum(dim=1)
        if self.kl_control is not None:
            self.kl_control.update(kl_B.mean().item(), len(kl_B))
        stats_tracker.stat("n_seqs", kl_ref=kl_B)
        stats_tracker.scalar(kl_ctl=kl_ctl)
        return kl_ctl * nearness_BS

    def _gae(
        self, data: Mapping[str, Any], outcome_BS: torch.Tensor, kl_BS: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mask_BS, values_BS, bootstrap_B = data["loss_mask"], torch.zeros_like(outcome_BS), None
        if "values" in data:
            values_BS = data["values"]
            # A truncated answer that was graded counts as ended. Bootstrap from the critic only if
            # its reward is masked: as a default, every answer that never ends would get the value
            # of an average one, and the policy would learn not to end.
            if self.config.mask_no_eos_with_zero:
                lengths = sequence_lengths(data["attention_mask"])
                bootstrap_B = cut_off_values(values_BS, lengths, _no_eos(data))
        options = {
            "discount": self.config.discount,
            "gae_lambda": self._lambda(data),
            "bootstrap_B": bootstrap_B,
        }
        if self.config.gae_timestep_unit == "token":
            return gae(outcome_BS + kl_BS, values_BS, mask_BS, **options)
        turn_ids_BS = required(data, "turn_ids", "actor.gae_timestep_unit=turn")
        return gae_by_turn(
            outcome_BS, values_BS, mask_BS, turn_ids_BS, token_rewards_BS=kl_BS, **options
        )

    def _lambda(self, data: Mapping[str, Any]) -> float | torch.Tensor:
        gae_lambda = self.config.gae_lambda
        if not isinstance(gae_lambda, str):
            return gae_lambda
        unit = self.config.gae_timestep_unit
        context = lambda_context(data["loss_mask"], data.get("turn_ids"), unit=unit)
        return evaluate_lambda(self._lambda_fn, context, **self.config.gae_lambda_kwargs)


def _no_eos(data: Mapping[str, Any]) -> torch.Tensor:
    """Answers truncated by length, as reported by the workflow."""
    return required(data, "seq_no_eos", "actor.mask_no_eos_with_zero").bool()


def _normalize(
    x: torch.Tensor,
    data: Mapping[str, Any],
    config: NormConfig,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    return normalize(
        x,
        mask,
        group_sizes=group_sizes(data),
        episode_ids=data[EPISODE_KEY],
        mean_level=config.mean_level,
        std_level=config.std_level,
        mean_leave1out=config.mean_leave1out,
        std_unbiased=config.std_unbiased,
        eps=config.eps,
    )
