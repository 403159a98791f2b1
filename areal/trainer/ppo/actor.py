"""The policy's half of PPO, on any training engine: trajectories in, updated weights out.

    data = actor.compute_advantages(trajectories)     # one trajectory = the samples of one prompt
    actor.ppo_update(data)                            # ppo_n_minibatches optimizer steps

Position t of every token tensor in `data` speaks of the token at t + 1, as the engine's
log-probabilities do: loss_mask, logprobs, versions and turn_ids are shifted together.

Three policies meet in the loss. behave: the weights that sampled a token, perhaps several versions
old, perhaps another for each token. prox: what the ratio is clipped around. theta: being trained.
Plain PPO takes prox = behave (or recomputes both); the decoupled loss keeps them apart and weights
each token by prox / behave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from areal.algorithm.advantage import (
    gae,
    overlong_penalty,
    place_outcome,
    shape_rewards,
    shift_left,
)
from areal.algorithm.loss import LossInputs, ppo_clip_loss
from areal.algorithm.normalization import normalize
from areal.algorithm.off_policy import importance_weight, loglinear_prox, reject
from areal.api.config.ppo import PPOActorConfig
from areal.api.config.train_engine import NormConfig
from areal.api.engine_api import TrainEngine
from areal.utils import stats_tracker
from areal.utils.data import concat_batch, select_rows, sequence_ids, sequence_lengths
from areal.utils.seqpack import pack_sequences

# What `ppo_update` reads of a batch; the rest stays where it is. `prox_logp` may be absent.
_UPDATE_KEYS = (
    "input_ids",
    "attention_mask",
    "loss_mask",
    "logprobs",
    "prox_logp",
    "versions",
    "advantages",
)


class PPOActor:
    def __init__(self, config: PPOActorConfig, engine: TrainEngine) -> None:
        self.config = config
        self.engine = engine

    def compute_logp(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """log pi of the current weights `[B, S]`, aligned to predictions."""
        keys = ("input_ids", "attention_mask")
        return self.engine.forward_batch({key: batch[key] for key in keys})

    def compute_advantages(self, trajectories: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """All samples as one batch with advantages, ready for `ppo_update`."""
        batch, meta = concat_batch(trajectories)
        group_sizes = meta.traj_group_sizes
        rewards_B = self._shaped_rewards(batch, group_sizes)
        batch = _align(batch)
        batch |= self._policies(batch)
        mask_BS = batch["loss_mask"]
        tot_rewards_BS = self._token_rewards(batch, rewards_B)
        advantages_BS, returns_BS = gae(
            tot_rewards_BS,
            torch.zeros_like(tot_rewards_BS),  # no critic
            mask_BS,
            discount=self.config.discount,
            gae_lambda=self.config.gae_lambda,
        )
        if self.config.adv_norm is not None:
            advantages_BS = _normalize(advantages_BS, mask_BS, group_sizes, self.config.adv_norm)
        with stats_tracker.scope("actor"):
            stats_tracker.denominator(n_seqs=torch.ones_like(rewards_B, dtype=torch.bool))
            stats_tracker.stat("n_seqs", shaped_reward=rewards_B)
        return {
            **batch,
            "tot_rewards": tot_rewards_BS,
            "advantages": advantages_BS,
            "returns": returns_BS,
        }

    def ppo_update(self, batch: Mapping[str, Any]) -> None:
        """One optimizer step per minibatch and one step of the learning-rate schedule.

        Minibatches depend on the lengths alone. Statistics go to `stats_tracker` under `actor/`.
        """
        batch = {key: batch[key] for key in _UPDATE_KEYS if key in batch}
        lengths = sequence_lengths(batch["attention_mask"]).tolist()
        with stats_tracker.scope("actor"):
            for rows in pack_sequences(lengths, min_bins=self.config.ppo_n_minibatches):
                self._update(select_rows(batch, rows))
        self.engine.step_lr_scheduler()

    def _update(self, minibatch: dict[str, Any]) -> None:
        """The step of the whole minibatch, at the cost of the rows that have something to teach.

        A token of advantage 0 has a loss and a gradient of exactly 0. Groups whose samples all
        earned the same consist of such tokens: they count in the mean and are not computed.
        """
        rows = _rows_that_teach(minibatch)
        kept = select_rows(minibatch, rows)
        num_tokens = minibatch["loss_mask"].sum().item()
        share = kept["loss_mask"].sum().item() / max(num_tokens, 1)

        def loss_fn(logprobs_T, entropy_T, mb):
            return self._loss(logprobs_T, entropy_T, mb) * share

        stats = self.engine.train_batch(kept, loss_fn, lambda mb: mb["loss_mask"].sum())
        computed = len(rows) / len(minibatch["loss_mask"])
        stats_tracker.scalar(**stats, computed_seqs_ratio=computed)

    def _loss(
        self, logprobs_T: torch.Tensor, entropy_T: torch.Tensor, mb: dict[str, Any]
    ) -> torch.Tensor:
        """The mean PPO loss of one packed micro-batch."""
        prox_logp_T = self._prox_logp(logprobs_T, mb)
        weight_T = self._behave_weight(prox_logp_T, mb)
        inputs = LossInputs(logprobs_T, prox_logp_T, mb["advantages"], mb["loss_mask"], weight_T)
        loss, metrics = ppo_clip_loss(
            inputs,
            eps_clip=self.config.eps_clip,
            eps_clip_higher=self.config.eps_clip_higher,
            c_clip=self.config.c_clip,
        )
        stats_tracker.denominator(n_tokens=mb["loss_mask"])
        stats_tracker.stat(
            "n_tokens",
            entropy=entropy_T,
            advantages=mb["advantages"],
            importance_weight=metrics["importance_weight"],
        )
        ratios = {key: value for key, value in metrics.items() if key.endswith("clip_ratio")}
        stats_tracker.stat("n_tokens", stats_tracker.ReduceType.AVG, **ratios)
        if weight_T is not None:
            stats_tracker.stat("n_tokens", behave_weight=weight_T)
            rejected_T = (weight_T == 0) & mb["loss_mask"]
            stats_tracker.stat("n_tokens", stats_tracker.ReduceType.AVG, rejected_ratio=rejected_T)
        return loss

    def _prox_logp(self, logprobs_T: torch.Tensor, mb: dict[str, Any]) -> torch.Tensor:
        if "prox_logp" in mb:
            return mb["prox_logp"]
        version = self.engine.get_version()
        return loglinear_prox(logprobs_T, mb["logprobs"], mb["versions"], version)

    def _behave_weight(self, prox_logp_T: torch.Tensor, mb: dict[str, Any]) -> torch.Tensor | None:
        if not self.config.use_decoupled_loss:
            return None
        rejection = self.config.rejection_sampling
        if rejection is None:
            return importance_weight(prox_logp_T, mb["logprobs"], mb["loss_mask"])
        return reject(
            prox_logp_T,
            mb["logprobs"],
            mb["loss_mask"],
            sequence_ids(mb["cu_seqlens"]),
            level=rejection.level,
            action=rejection.action,
            metric=rejection.metric,
            agg=rejection.agg,
            upper=rejection.upper,
            lower=rejection.lower,
        )

    def _shaped_rewards(self, batch: Mapping[str, Any], group_sizes: list[int]) -> torch.Tensor:
        config = self.config
        rewards_B = batch["rewards"].float()
        if config.overlong_reward_penalty:
            rewards_B = rewards_B + overlong_penalty(
                batch["loss_mask"].sum(dim=1),
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
        if config.reward_norm is None:
            return rewards_B
        return _normalize(rewards_B, None, group_sizes, config.reward_norm)

    def _policies(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """`prox_logp`, unless it is estimated in the loss, and `logprobs` when recomputed too."""
        if not self.config.use_decoupled_loss:
            if not self.config.recompute_logprob:
                return {"prox_logp": batch["logprobs"]}
            logp_BS = self.compute_logp(batch)
            return {"prox_logp": logp_BS, "logprobs": logp_BS}
        if self.config.prox_logp_method == "loglinear":
            return {}
        return {"prox_logp": self.compute_logp(batch)}

    def _token_rewards(self, batch: Mapping[str, Any], rewards_B: torch.Tensor) -> torch.Tensor:
        if self.config.mask_no_eos_with_zero:
            if "seq_no_eos" not in batch:
                raise ValueError(
                    "actor.mask_no_eos_with_zero needs the key 'seq_no_eos' in every trajectory "
                    f"(found {sorted(batch)}): let the workflow say which answers were cut off"
                )
            rewards_B = rewards_B.masked_fill(batch["seq_no_eos"].bool(), 0.0)
        mask = batch["attention_mask"]
        return place_outcome(rewards_B, sequence_lengths(mask), mask.shape[1])


def _align(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with everything known of a token moved to where that token is predicted."""
    shifted = {
        "loss_mask": shift_left(batch["loss_mask"]).bool(),
        "logprobs": shift_left(batch["logprobs"].float()),
        "versions": shift_left(batch["versions"], fill=-1),
    }
    if "turn_ids" in batch:
        shifted["turn_ids"] = shift_left(batch["turn_ids"], fill=-1)
    return {**batch, **shifted}


def _rows_that_teach(minibatch: Mapping[str, Any]) -> list[int]:
    """Rows with an advantage other than 0; when there are none, one row to take the step with."""
    mask_BS = minibatch["loss_mask"]
    teaches_B = ((minibatch["advantages"] != 0) & mask_BS).any(dim=1)
    rows = teaches_B.nonzero().flatten().tolist()
    return rows or [int(mask_BS.any(dim=1).int().argmax())]


def _normalize(
    x: torch.Tensor, mask: torch.Tensor | None, group_sizes: list[int], config: NormConfig
) -> torch.Tensor:
    return normalize(
        x,
        mask,
        group_sizes=group_sizes,
        mean_level=config.mean_level,
        std_level=config.std_level,
        mean_leave1out=config.mean_leave1out,
        std_unbiased=config.std_unbiased,
        eps=config.eps,
    )
