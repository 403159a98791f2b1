"""Call signatures of functions that users give by import path. Loads no torch."""

from __future__ import annotations

from typing import Any

from areal.utils.import_path import Call

FILTER_CALL = Call("fn(trajectory)", 1)


def lambda_call(kwargs: dict[str, Any]) -> Call:
    """Of `actor.gae_lambda`."""
    return Call(
        "fn(context, **gae_lambda_kwargs)", 1, kwargs, _options("gae_lambda_kwargs", kwargs)
    )


def policy_loss_call(kwargs: dict[str, Any]) -> Call:
    """Of `actor.policy_loss`."""
    advice = _options("policy_loss_kwargs", kwargs)
    return Call("fn(inputs, **policy_loss_kwargs)", 1, kwargs, advice)


def _options(key: str, kwargs: dict[str, Any]) -> str:
    return f"actor.{key} is {kwargs}"
