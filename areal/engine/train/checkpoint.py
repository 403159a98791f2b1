"""Resumable state of a training engine, sharded over its ranks.

Holds the float32 master weights, the optimizer's moments, the buffers, the place in the
learning-rate schedule and the policy version: everything that training on depends on, without
frozen weights. Each rank writes what it holds, and any layout of ranks can load it. The folder
appears whole or not at all, with a manifest of checksums that is verified before anything of it is
loaded. torch.distributed.checkpoint plans who writes and reads what, shard_storage.py does it.

    save(path, model, optimizer, version, ranks)                 # training waits
    snapshot = capture(model, optimizer, version, ranks)         # training waits for a copy in
    snapshot.write(path)                                         # memory; this may be in a thread
    digests(path)                                                # to compare it with another

`ranks` is None for one process that knows no others; else every one of them calls, on a file system
all of them see. A group that writes in a thread is used for nothing else, and for one write at a
time: see `process_group.side_group`.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from areal.engine.train.process_group import on_all_ranks, on_first_rank
from areal.engine.train.shard_storage import ShardReader, ShardWriter, stored_tensors
from areal.models.parallelize import local_part
from areal.utils.fs import atomic_folder
from areal.utils.manifest import check_files, describe, list_files, read_manifest, write_manifest

# torch warns where no process group exists; with one rank that is meant. For the whole process,
# since filters are not the business of a thread.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

State = dict[str, torch.Tensor]

_MOMENTS = "moments."
_DIGEST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state at one moment; later training does not change it."""

    state: State
    ranks: dist.ProcessGroup | None
    copied: torch.cuda.Event | None  # when the copies in `state` are whole; None: they are

    def write(self, path: str | Path) -> None:
        """Write the folder `path`, in place of what it was; any thread."""
        if self.copied is not None:
            self.copied.synchronize()
        _write_folder(path, self.state, self.ranks)


def capture(
    model: nn.Module,
    optimizer: Resumable | None,
    version: int,
    ranks: dist.ProcessGroup | None = None,
) -> Snapshot:
    """Copy what `save` would write to host memory; without `optimizer` weights and version alone.

    From a GPU the copies are made in the order of its stream: what is launched after this call
    changes them no more, and the caller need not wait for them.
    """
    state = _state(model, optimizer, version)
    copies = {name: _host_copy(tensor) for name, tensor in state.items()}
    copied = None
    if any(local_part(tensor).is_cuda for tensor in state.values()):
        copied = torch.cuda.Event()
        copied.record()
    return Snapshot(copies, ranks, copied)


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
    _write_folder(path, _state(model, optimizer, version), ranks)


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Resumable | None,
    ranks: dist.ProcessGroup | None = None,
) -> int:
    """Fill model and optimizer in place; returns the saved version.

    DamagedError names a file that is not what was written, ValueError a tensor that does not fit;
    then nothing was changed.
    """
    path = Path(path)
    _verify(path, ranks)
    state = _state(model, optimizer, 0)
    _check_fit(path, state, ranks)
    try:
        state_dict_loader.load(
            state, storage_reader=ShardReader(path), process_group=ranks, no_dist=ranks is None
        )
    except CheckpointException as error:
        raise RuntimeError(f"cannot load {path}: {_cause(error)}") from error
    version, lr_step, num_skipped_steps = state["counters"].tolist()
    if optimizer is not None:
        optimizer.write_back()
        optimizer.set_lr_step(lr_step)
        optimizer.num_skipped_steps = num_skipped_steps
    return version


def digests(path: str | Path) -> dict[str, str]:
    """By name, in order, a checksum of each tensor: of its type, shape and bits.

    Needs no model and no other ranks, whatever layout wrote it.
    """
    path = Path(path)
    _verify(path, None)
    stored = stored_tensors(ShardReader(path).read_metadata())
    found, part = {}, {}
    for place, (name, entry) in enumerate(sorted(stored.items()), start=1):
        part[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        # One call for many tensors, since each reads the list of all; not more than fit in memory.
        is_full = sum(tensor.nbytes for tensor in part.values()) >= _DIGEST_BYTES
        if is_full or place == len(stored):
            state_dict_loader.load(part, storage_reader=ShardReader(path), no_dist=True)
            found |= {name: _digest(tensor) for name, tensor in part.items()}
            part = {}
    return found


def _digest(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write_folder(path: str | Path, state: State, ranks: dist.ProcessGroup | None) -> None:
    with ExitStack() as stack:
        scratch = on_first_rank(ranks, lambda: str(stack.enter_context(atomic_folder(path))))
        _write_shards(state, scratch, path, ranks)
        folder = Path(scratch)
        own_part = on_all_ranks(ranks, lambda: describe(folder, _share(list_files(folder), ranks)))
        files = {name: facts for part in own_part for name, facts in part.items()}
        on_first_rank(ranks, lambda: write_manifest(folder, files, {}))
        on_first_rank(ranks, stack.close)  # gives the folder its name


def _write_shards(
    state: State, scratch: str, path: str | Path, ranks: dist.ProcessGroup | None
) -> None:
    """What one rank cannot write fails on all of them."""
    try:
        writer = ShardWriter(scratch)
        state_dict_saver.save(
            state, storage_writer=writer, process_group=ranks, no_dist=ranks is None
        )
    except CheckpointException as error:  # no Exception in torch: nobody else would catch it
        cause = _cause(error)
        if isinstance(cause, OSError):
            raise cause from error
        raise RuntimeError(f"cannot write {path}: {cause}") from error


def _verify(path: Path, ranks: dist.ProcessGroup | None) -> None:
    """Each file is read by one of the ranks; damage one of them finds ends the call on all."""

    def verify_share() -> None:
        if not path.is_dir():
            raise FileNotFoundError(f"no checkpoint at {path}")
        manifest = read_manifest(path)
        check_files(path, manifest, _share(sorted(manifest.files), ranks))
        ShardReader(path).read_metadata()

    on_all_ranks(ranks, verify_share)


def _share(names: list[str], ranks: dist.ProcessGroup | None) -> list[str]:
    return names if ranks is None else names[ranks.rank() :: ranks.size()]


def _check_fit(
    path: Path, state: Mapping[str, torch.Tensor], ranks: dist.ProcessGroup | None
) -> None:
    """torch would leave out what the model does not ask for: a larger model's layers."""
    # Pipeline stages ask for their own tensors, and for all of them together.
    shapes = on_all_ranks(ranks, lambda: {name: list(x.shape) for name, x in state.items()})
    own = {name: shape for part in shapes for name, shape in part.items()}
    stored = stored_tensors(ShardReader(path).read_metadata())
    sizes = {name: list(entry.size) for name, entry in stored.items()}
    if not any(name.startswith(_MOMENTS) for name in state):
        sizes = {name: size for name, size in sizes.items() if not name.startswith(_MOMENTS)}
    odd = [name for name in sorted(own.keys() | sizes.keys()) if own.get(name) != sizes.get(name)]
    if odd:
        name = odd[0]
        raise ValueError(
            f"{path} is not a checkpoint of this model and optimizer: {len(odd)} tensors differ, "
            f"the first is {name}: {sizes.get(name, 'absent')} there, {own.get(name, 'absent')} "
            "here"
        )


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong on the first of the failed ranks."""
    return next(iter(error.failures.values()))[0]


def _state(model: nn.Module, optimizer: Resumable | None, version: int) -> State:
    """The tensors of the checkpoint by name: those in use, not copies; and three counters."""
    # What another pipeline stage holds is on the meta device here.
    own = {name: w for name, w in model.named_parameters() if not w.is_meta}
    weights = {name: weight.detach() for name, weight in own.items() if weight.requires_grad}
    saved = model.state_dict().keys()
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in saved and not buffer.is_meta
    }
    counters = torch.tensor([version, 0, 0])
    moments: dict[str, dict[str, torch.Tensor]] = {}
    if optimizer is not None:
        counters = torch.tensor([version, optimizer.lr_step, optimizer.num_skipped_steps])
        weights, moments = optimizer.masters(), optimizer.moments()
    return {
        **{f"weights.{name}": tensor for name, tensor in weights.items()},
        **{f"buffers.{name}": tensor for name, tensor in buffers.items()},
        **{
            f"{_MOMENTS}{name}.{kind}": tensor
            for name, kinds in moments.items()
            for kind, tensor in kinds.items()
        },
        "counters": counters,
    }


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Pinned when it comes from a GPU, so that the copy needs no one to wait for it."""
    pinned = local_part(tensor).is_cuda
    copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
    local_part(copy).copy_(local_part(tensor), non_blocking=pinned)
    return copy
