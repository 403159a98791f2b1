"""The mathematics of training: tensors in, tensors out, no state, no config objects.

The tables map names of the YAML to import paths, the form in which a user's own function is given;
`areal.utils.import_path.load_named(name, TABLE, key=...)` resolves either. This file imports no
torch, so that a config can be checked against the tables quickly. The calls are the signatures of
functions that users give by import path.
"""

from __future__ import annotations

from typing import Any

from areal.utils.import_path import Call

# fn(LossInputs, **options) -> (loss, metrics per token)
POLICY_LOSSES = {
    "ppo": "areal.algorithm.loss.ppo_clip_loss",  # eps_clip, eps_clip_higher, c_clip
    "gspo": "areal.algorithm.loss.gspo_loss",  # eps_clip, eps_clip_higher, c_clip
    "sapo": "areal.algorithm.loss.sapo_loss",  # tau_pos, tau_neg
    "cispo": "areal.algorithm.loss.cispo_loss",  # eps_clip, eps_clip_higher
}

# fn(log pi - log pi_ref) -> estimate of the KL, of the same shape
KL_ESTIMATORS = {
    "k1": "areal.algorithm.kl.k1",
    "k2": "areal.algorithm.kl.k2",
    "k3": "areal.algorithm.kl.k3",
}

# fn(LambdaContext, **gae_lambda_kwargs) -> [B]
LAMBDA_FUNCTIONS = {
    "vapo": "areal.algorithm.advantage.vapo_lambda",  # alpha
    "relative_position": "areal.algorithm.advantage.relative_position_lambda",  # q
}

# fn(values, returns) -> error per token
VALUE_ERRORS = {
    "squared": "areal.algorithm.loss.squared_error",
    "huber": "areal.algorithm.loss.huber_error",
}

# fn(logprobs, ref_logp, mask, cu_seqlens, *, beta) -> (loss, metrics per pair)
PREFERENCE_LOSSES = {
    "sigmoid": "areal.algorithm.preference.dpo_loss",
    "ipo": "areal.algorithm.preference.ipo_loss",
}

# fn(trajectory) -> keep the group?
DYNAMIC_FILTERS = {
    "keep_mixed_groups": "areal.algorithm.filters.keep_mixed_groups",
}


def filter_call() -> Call:
    """Of `dynamic_filter_fn`."""
    return Call("fn(trajectory)", 1)


def lambda_call(kwargs: dict[str, Any]) -> Call:
    """Of `actor.gae_lambda`."""
    return _call("fn(context, **gae_lambda_kwargs)", "gae_lambda_kwargs", kwargs)


def policy_loss_call(kwargs: dict[str, Any]) -> Call:
    """Of `actor.policy_loss`."""
    return _call("fn(inputs, **policy_loss_kwargs)", "policy_loss_kwargs", kwargs)


def _call(text: str, key: str, kwargs: dict[str, Any]) -> Call:
    return Call(text, 1, kwargs, f"actor.{key} is {kwargs}")
