"""Policy losses as a user might write them, given by import path."""

from __future__ import annotations

import torch

from areal.algorithm.loss import ppo_clip_loss


def clipped(inputs, *, low=0.2, high=0.28):
    """PPO's clipped loss per token; areal takes the mean."""
    ratio_T = (inputs.logprobs_T - inputs.prox_logp_T).exp()
    plain_T = -inputs.advantages_T * ratio_T
    return torch.maximum(plain_T, -inputs.advantages_T * ratio_T.clamp(1 - low, 1 + high))


def clipped_with_metrics(inputs, low=0.2, high=0.28):
    loss_T = clipped(inputs, low=low, high=high)
    ratio_T = (inputs.logprobs_T - inputs.prox_logp_T).exp()
    return loss_T, {"outside_ratio": (ratio_T > 1 + high) | (ratio_T < 1 - low), "ratio": ratio_T}


def twice_the_shipped_one(inputs, **options):
    """The mean itself, as the shipped losses return it."""
    loss, metrics = ppo_clip_loss(inputs, **options)
    return 2 * loss, metrics


def towards_all_samples(inputs):
    """Learns from tokens without any advantage."""
    return -inputs.logprobs_T


def not_a_tensor(inputs):
    return 1.0


def without_gradient(inputs):
    return -inputs.logprobs_T.detach()


def of_another_length(inputs):
    return inputs.logprobs_T[:-1]


def with_a_number_as_metric(inputs):
    return -inputs.logprobs_T, {"size": 3.0}


def with_another_entropy(inputs):
    return -inputs.logprobs_T, {"entropy": inputs.logprobs_T}


def of_two_arguments(inputs, scale):
    return -inputs.logprobs_T * scale


class Scaled:
    """A callable object, which pickle would copy as it is."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.cannot_travel = lambda: None

    def __call__(self, inputs):
        return self.factor * clipped(inputs)


one_half = Scaled(0.5)
