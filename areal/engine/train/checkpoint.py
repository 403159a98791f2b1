"""Resumable state of a training engine, sharded over its ranks.

Holds everything that further training depends on: float32 master weights, optimizer moments,
buffers, the learning-rate step and the policy version; frozen weights are left out. Each rank
writes its shards, and any layout of ranks can load them. The folder appears atomically, with a
manifest of checksums that is verified before anything is loaded. torch.distributed.checkpoint plans
which rank reads and writes what; shard_storage.py stores it.

    save(path, model, optimizer, version, ranks)             # blocks training
    snapshot = capture(model, optimizer, version, ranks)     # blocks only for a copy in host memory
    snapshot.write(path)                                     # may run in a thread
    digests(path)                                            # to compare two checkpoints

`ranks` is None for a single process; otherwise every rank calls, on a shared file system. A group
used for writing in a thread serves nothing else, and one write at a time: see
`process_group.side_group`.
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

# torch warns without a process group, which is intended for one rank. Set at import because
# warning filters are global and changing them in a thread is not safe.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

State = dict[str, torch.Tensor]

_MOMENTS = "moments."
_DIGEST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the state; later training does not change it."""

    state: State
    ranks: dist.ProcessGroup | None
    copied: torch.cuda.Event | None  # when the copies in `state` are complete; None: already

    def write(self, path: str | Path) -> None:
        """Write or replace the folder `path`; from any thread."""
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

    Copies from a GPU are ordered on its stream: later launches do not change them, and the caller
    need not wait for them.
    """
    state = _state(model, optimizer, version)
    copies = {name: _host_copy(tensor) for name, tensor in state.items()}
    copied = None
    if any(local_part(tensor).is_cuda for tensor in state.values()):
        copied = torch.cuda.Event()
        copied.record()
    return Snapshot(copies, ranks, copied)


class Resumable(Protocol):
    """The state of an optimizer; the tensors are those in use, not copies."""

    lr_step: int
    num_skipped_steps: int

    def masters(self) -> dict[str, torch.Tensor]: ...

    def moments(self) -> dict[str, dict[str, torch.Tensor]]: ...

    def write_back(self) -> None:
        """Called after the masters were loaded."""
        ...

    def set_lr_step(self, step: int) -> None: ...


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Resumable | None,
    version: int,
    ranks: dist.ProcessGroup | None = None,
) -> None:
    """Write or replace the folder `path`; without `optimizer` weights and version alone."""
    _write_folder(path, _state(model, optimizer, version), ranks)


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Resumable | None,
    ranks: dist.ProcessGroup | None = None,
) -> int:
    """Fill model and optimizer in place; returns the saved version.

    DamagedError names a file that was changed, ValueError a tensor that does not fit; either way
    model and optimizer are unchanged.
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
    """A checksum of dtype, shape and bits of each tensor, sorted by name.

    Needs no model and no other ranks, whatever layout wrote it.
    """
    path = Path(path)
    _verify(path, None)
    stored = stored_tensors(ShardReader(path).read_metadata())
    found, part = {}, {}
    for place, (name, entry) in enumerate(sorted(stored.items()), start=1):
        part[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        # Batched because each call reads the whole index; bounded by memory.
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
        on_first_rank(ranks, stack.close)  # renames the folder into place


def _write_shards(
    state: State, scratch: str, path: str | Path, ranks: dist.ProcessGroup | None
) -> None:
    """A write error of one rank is raised on all."""
    try:
        writer = ShardWriter(scratch)
        state_dict_saver.save(
            state, storage_writer=writer, process_group=ranks, no_dist=ranks is None
        )
    except CheckpointException as error:  # a BaseException, which no other handler would catch
        cause = _cause(error)
        if isinstance(cause, OSError):
            raise cause from error
        raise RuntimeError(f"cannot write {path}: {cause}") from error


def _verify(path: Path, ranks: dist.ProcessGroup | None) -> None:
    """Each file is read by one rank; damage found by one is raised on all."""

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
    """torch ignores stored tensors that the model lacks, such as layers of a larger model."""
    # Each pipeline stage requests its own tensors; together they must cover the checkpoint.
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
    """The error of the first failed rank."""
    return next(iter(error.failures.values()))[0]


def _state(model: nn.Module, optimizer: Resumable | None, version: int) -> State:
    """The tensors of the checkpoint by name: those in use, not copies; and three counters."""
    # Weights of other pipeline stages are on the meta device.
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
    """Pinned when it comes from a GPU, so that the copy is asynchronous."""
    pinned = local_part(tensor).is_cuda
    copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
    local_part(copy).copy_(local_part(tensor), non_blocking=pinned)
    return copy
