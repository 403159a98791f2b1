"""Resumable state of a training engine, in torch's distributed checkpoint format.

Holds the float32 master weights, the optimizer's moments, the buffers, the place in the
learning-rate schedule and the policy version: everything that training on depends on. Each rank
writes what it holds, and any layout of ranks can load it. The folder appears whole or not at all.

`ranks` is None for one process that knows no others; else every one of them calls, on a file system
all of them see.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from areal.engine.process_group import on_first_rank
from areal.utils.fs import atomic_folder


class Resumable(Protocol):
    """An optimizer, as far as its state goes; the tensors are those in use."""

    lr_step: int
    num_skipped_steps: int

    def masters(self) -> dict[str, torch.Tensor]: ...

    def moments(self) -> dict[str, dict[str, torch.Tensor]]: ...

    def write_back(self) -> None:
        """The masters have been loaded."""
        ...

    def set_lr_step(self, step: int) -> None: ...


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Resumable | None,
    version: int,
    ranks: dist.ProcessGroup | None = None,
) -> None:
    """Write the folder `path`, in place of what it was; without `optimizer` weights and version
    alone."""
    state, _ = _state(model, optimizer, version)
    with ExitStack() as stack:
        scratch = on_first_rank(ranks, lambda: str(stack.enter_context(atomic_folder(path))))
        _write(state, scratch, path, ranks)
        on_first_rank(ranks, stack.close)  # gives the folder its name


def _write(
    state: dict[str, Any], scratch: str, path: str | Path, ranks: dist.ProcessGroup | None
) -> None:
    """What one rank cannot write fails on all of them."""
    try:
        with _quiet(ranks):
            dcp.save(state, checkpoint_id=scratch, process_group=ranks, no_dist=ranks is None)
    except CheckpointException as error:  # no Exception in torch: nobody else would catch it
        cause = _cause(error)
        if isinstance(cause, OSError):
            raise cause from error
        raise RuntimeError(f"cannot write {path}: {cause}") from error


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Resumable | None,
    ranks: dist.ProcessGroup | None = None,
) -> int:
    """Fill model and optimizer in place; returns the saved version."""
    state, counters = _state(model, optimizer, 0)
    try:
        with _quiet(ranks):
            dcp.load(state, checkpoint_id=path, process_group=ranks, no_dist=ranks is None)
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
def _quiet(ranks: dist.ProcessGroup | None) -> Iterator[None]:
    """torch warns where no process group exists; with one rank that is meant."""
    with warnings.catch_warnings():
        if ranks is None:
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _state(
    model: nn.Module, optimizer: Resumable | None, version: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """The tensors of the checkpoint (those in use, not copies), and its counters."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    state: dict[str, Any] = {"weights": weights}
    buffers = {k: tensor for k, tensor in model.state_dict().items() if k not in weights}
    if buffers:
        state["buffers"] = buffers
    counters = torch.tensor([version, 0, 0])
    if optimizer is not None:
        counters = torch.tensor([version, optimizer.lr_step, optimizer.num_skipped_steps])
        state |= {"weights": optimizer.masters(), "moments": optimizer.moments()}
    state["counters"] = counters
    return state, counters
