"""Resumable state of a training engine, in torch's distributed checkpoint format.

Holds the float32 master weights, the optimizer's moments, the place in the learning-rate schedule
and the policy version: everything that training on depends on.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from areal.engine.optim import MasterOptimizer


def save(
    path: str | Path, model: nn.Module, optimizer: MasterOptimizer | None, version: int
) -> None:
    """Write into the folder `path`; without `optimizer` weights and version alone."""
    state, _ = _state(model, optimizer, version)
    try:
        with _in_one_process():
            dcp.save(state, checkpoint_id=path, no_dist=True)
    except CheckpointException as error:  # no Exception in torch: nobody else would catch it
        cause = _cause(error)
        if isinstance(cause, OSError):
            raise cause from error
        raise RuntimeError(f"cannot write {path}: {cause}") from error


def load(path: str | Path, model: nn.Module, optimizer: MasterOptimizer | None) -> int:
    """Fill model and optimizer in place; returns the saved version."""
    state, counters = _state(model, optimizer, 0)
    try:
        with _in_one_process():
            dcp.load(state, checkpoint_id=path, no_dist=True)
    except CheckpointException as error:
        raise RuntimeError(
            f"{path} is not a checkpoint of this model and optimizer: {_cause(error)}"
        ) from error
    version, lr_step, num_skipped_steps = counters.tolist()
    if optimizer is not None:
        optimizer.write_back()
        optimizer.set_lr_step(lr_step)
        optimizer.num_skipped_steps = num_skipped_steps
    return version


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong on the first of the failed ranks.

    A full disk makes torch's file writer fail again while it closes: the OSError below is it.
    """
    first = cause = next(iter(error.failures.values()))[0]
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or first


@contextmanager
def _in_one_process() -> Iterator[None]:
    """torch warns that no process group exists; here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _state(
    model: nn.Module, optimizer: MasterOptimizer | None, version: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """The tensors of the checkpoint (those in use, not copies), and its counters."""
    if optimizer is None:
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        counters = torch.tensor([version, 0, 0])
        return {"weights": weights, "counters": counters}, counters
    counters = torch.tensor([version, optimizer.lr_step, optimizer.num_skipped_steps])
    state = {
        "weights": optimizer.masters(),
        "moments": optimizer.moments(),
        "counters": counters,
    }
    return state, counters
