"""One training step, looked at from outside: advantages, alignment of the mask, the optimizer.

    step = take_step(trainer.learner, trajectories)
    check_advantages(chart, trainer.config, step)
    check_alignment(chart, step)
    check_optimizer(chart, trainer.config, step)

If no two rewards of a group differ, nothing could be learned or seen: the step is then taken with
rewards of the doctor, 1 and 0 in turn.

Shape legend: B rows, S tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from areal.algorithm.normalization import are_equal
from areal.doctor.report import Chart
from areal.trainer.ppo.batch import collect
from areal.utils import stats_tracker

if TYPE_CHECKING:
    from areal.api.config.experiment import PPOConfig
    from areal.trainer.ppo.actor import PPOLearner

_WRONG_WAY = -3.0  # standard errors


@dataclass(frozen=True, slots=True)
class Step:
    """A training step and what it changed."""

    trajectories: list[dict[str, Any]]  # as they were trained on
    data: dict[str, Any]  # the batch with the computed tensors
    stats: dict[str, float]
    gain_BS: torch.Tensor  # change of the log-probabilities
    unchanged: list[str]  # tensors with the same bits as before
    num_tensors: int
    own_rewards: bool  # the doctor's, because all were equal


def take_step(learner: PPOLearner, trajectories: Sequence[Mapping[str, Any]]) -> Step:
    """Trains on `trajectories`; the weights are not published."""
    given, own_rewards = _with_spread(trajectories)
    actor, engine = learner.actor, learner.engine
    stats_tracker.export_all()  # statistics before the step
    before = engine.weight_checksums({})
    rows = collect(given)
    logp_BS = actor.compute_logp(rows)
    data = learner.train(given)
    after = engine.weight_checksums({})
    return Step(
        trajectories=given,
        data=data,
        stats=stats_tracker.export_all(),
        gain_BS=actor.compute_logp(rows) - logp_BS,
        unchanged=[name for name, checksum in after.items() if before.get(name) == checksum],
        num_tensors=len(after),
        own_rewards=own_rewards,
    )


def _with_spread(trajectories: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    given = [dict(one) for one in trajectories]
    if not all(are_equal(one["rewards"]) for one in given):
        return given, False
    number = 0
    for one in given:
        count = len(one["rewards"])
        one["rewards"] = (torch.arange(number + 1, number + 1 + count) % 2).float()
        number += count
    return given, True


def check_advantages(chart: Chart, config: PPOConfig, step: Step) -> None:
    """Better samples of a prompt have larger advantages, around a baseline."""
    data, actor = step.data, config.actor
    mask_BS = data["loss_mask"].bool()
    advantages_BS = data["advantages"]
    if not bool(advantages_BS[mask_BS].isfinite().all()):
        return chart.fault(
            "advantages",
            "an advantage is not finite",
            change="look at actor.reward_scaling, actor.reward_clip and the rewards",
        )
    counts_B = mask_BS.sum(1).clamp(min=1)
    means_B = (advantages_BS * mask_BS).sum(1) / counts_B
    if config.critic is not None or actor.kl_ctl != 0:
        return chart.ok("advantages", "finite (a critic or a KL reward shapes them)")
    if fault := _wrong_order(data, means_B):
        scaling = actor.reward_scaling
        change = f"set actor.reward_scaling above 0 (it is {scaling:g})" if scaling < 0 else ""
        return chart.fault(
            "advantages", fault, change=change or "look at what changes rewards or advantages"
        )
    present = means_B[mask_BS.any(1)]
    if bool((present >= 0).all()) or bool((present <= 0).all()):
        sign = "no sample has a negative" if bool((present >= 0).all()) else "none has a positive"
        if bool((present != 0).any()):
            return chart.fault(
                "advantages",
                f"{sign} advantage: there is no baseline, so every sample is pushed the same way",
                change="set actor.reward_norm to {mean_level: group, std_level: group}, or use a "
                "critic",
            )
    _check_norm(chart, config, data, means_B)


def _wrong_order(data: Mapping[str, Any], means_B: torch.Tensor) -> str:
    """Of the samples of a prompt, the best one must not have less than the worst."""
    rewards_B = data["rewards"].float()
    keeps_B = data["loss_mask"].bool().any(1)
    for group in data["group_ids"].unique().tolist():
        rows = ((data["group_ids"] == group) & keeps_B).nonzero().flatten()
        if not len(rows):
            continue
        best = rows[int(rewards_B[rows].argmax())]
        worst = rows[int(rewards_B[rows].argmin())]
        higher, lower = means_B[best].item(), means_B[worst].item()
        if rewards_B[best] > rewards_B[worst] and higher < lower - 1e-6:
            return (
                f"wrong sign: in one group reward {rewards_B[best]:g} has advantage {higher:.3g}, "
                f"reward {rewards_B[worst]:g} has {lower:.3g}"
            )
    return ""


def _check_norm(
    chart: Chart, config: PPOConfig, data: Mapping[str, Any], means_B: torch.Tensor
) -> None:
    """With `reward_norm` by group alone, advantages of a group have mean 0."""
    actor = config.actor
    by_group = actor.reward_norm is not None and actor.reward_norm.mean_level == "group"
    reshaped = actor.adv_norm is not None or actor.mask_no_eos_with_zero or actor.discount != 1
    one_row_each = len(data["episode_ids"].unique()) == len(means_B)
    note = "ordered as the rewards, around a baseline"
    if by_group and not reshaped and one_row_each:
        group_ids = data["group_ids"]
        sums = torch.zeros(int(group_ids.max()) + 1).index_add_(0, group_ids, means_B.float())
        off = (sums / torch.bincount(group_ids)).abs().max().item()
        if off > 1e-3:
            return chart.fault(
                "advantages",
                f"not normalised: actor.reward_norm centers each group, and the mean of one is "
                f"{off:.3g}",
                change="look at what changes rewards after actor.reward_norm",
            )
        note = "ordered as the rewards; each group has mean 0"
    chart.ok("advantages", note)


def check_alignment(chart: Chart, step: Step) -> None:
    """The batch holds mask and log-probabilities of the token at t + 1 at position t."""
    row = 0
    for trajectory in step.trajectories:
        width = trajectory["loss_mask"].shape[1]
        end = row + len(trajectory["loss_mask"])
        for key in ("loss_mask", "versions"):
            expected = trajectory[key][:, 1:].long()
            found = step.data[key][row:end, : width - 1].long()
            if not torch.equal(found, expected):
                return chart.fault(
                    "loss_mask",
                    f"the training batch has {key} of other tokens than it predicts: position t "
                    "must hold that of the token at t + 1",
                    change="shift token tensors once, as areal.trainer.ppo.batch.collect does",
                )
        row = end


def check_optimizer(chart: Chart, config: PPOConfig, step: Step) -> None:
    """The step moved the weights, all that are trained, and in the right direction."""
    stats, fault = step.stats, chart.fault
    lr, norm = stats.get("actor/lr", math.nan), stats.get("actor/grad_norm", math.nan)
    if lr == 0:
        return fault("optimizer", "the learning rate is 0", change="set actor.optimizer.lr above 0")
    if not math.isfinite(norm):
        return fault(
            "optimizer",
            f"the gradient norm is {norm}: the step was skipped",
            change="look for infinities in rewards, loss and log-probabilities",
        )
    if norm == 0:
        return fault(
            "optimizer",
            "the gradient is 0 although advantages are not: the loss does not depend on the model",
            change="look at actor.policy_loss (a detached log-probability), actor.eps_clip and "
            "rejection_sampling",
        )
    if len(step.unchanged) == step.num_tensors:
        return fault(
            "optimizer",
            f"no tensor changed (learning rate {lr:g}, gradient norm {norm:.3g})",
            change="raise actor.optimizer.lr, or use a master copy in float32",
        )
    if frozen := _frozen(config, step):
        return fault(
            "optimizer",
            f"{len(frozen)} of {step.num_tensors} tensors did not change, {frozen[0]} first: they "
            "are frozen",
            change="let them require gradients before the optimizer is built",
        )
    if (score := _direction(step)) < _WRONG_WAY:
        return fault(
            "optimizer",
            "the step makes samples with a positive advantage less likely: the loss has the "
            f"wrong sign ({score:.1f} standard errors)",
            change="minimize -advantage * log-probability (actor.policy_loss)",
        )
    by = " by rewards of the doctor, as all were equal" if step.own_rewards else ""
    moved = step.num_tensors - len(step.unchanged)
    chart.ok(
        "optimizer",
        f"one step{by} at learning rate {lr:.3g}: gradient norm {norm:.3g}, {moved} of "
        f"{step.num_tensors} tensors moved",
    )


def _frozen(config: PPOConfig, step: Step) -> list[str]:
    """Tensors that should have changed. Not known of adapters, of experts that may have had no
    token, and of 16 bits, which may round to what they were."""
    is_rounded = (config.actor.dtype or "float32") != "float32"
    if config.actor.use_lora or is_rounded:
        return []
    return [name for name in step.unchanged if ".experts." not in name]


def _direction(step: Step) -> float:
    """Sum of advantage times change of log-probability, in standard errors."""
    mask_BS = step.data["loss_mask"].bool()
    products = (step.data["advantages"] * step.gain_BS)[mask_BS].double()
    spread = products.square().sum().sqrt().item()
    return products.sum().item() / spread if spread else 0.0
