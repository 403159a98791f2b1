"""Transports of weights from a training engine to an inference engine.

| type     | between                | how                                                         |
|----------|------------------------|-------------------------------------------------------------|
| `direct` | one process            | the tensors themselves                                      |
| `shm`    | processes of a machine | a publication in memory (`/dev/shm`, else a temporary folder)|
| `ipc`    | processes on one GPU   | CUDA IPC handles of the sender's tensors                    |
| `disk`   | machines               | a publication in the run's folder, flushed to the disk      |
| `delta`  | machines               | the same, with only the changes since the previous version  |
| `xccl`   | processes, machines    | a broadcast through a process group: NCCL, or gloo          |

    with PublicationRoot("shm", run_name="demo", disk_root=paths.weights) as root:
        meta = root.meta(recompute_kv=True)
        with offer_weights(meta.with_version(3), actor.hf_weights()) as tensors:
            engine.update_weights(meta.with_version(3), tensors)

A `PublicationRoot` is owned by one process, which removes it at the end, and is private to its
user. In memory it has a random name; if the owner was killed, the next run that opens a root finds
the free lock and removes the folder. Its key, sent with every load request, authenticates what this
run has written (utils/manifest.py).
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from areal.api.io_struct import WeightTransport, WeightUpdateMeta
from areal.api.redact import remember_secret
from areal.api.scratch import ScratchFolder, sweep
from areal.weight_sync.cuda_ipc import HANDLES, open_handles, publish_handles
from areal.weight_sync.publication import PublicationError, open_publication, publish

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Tensors = Iterator[tuple[str, torch.Tensor]]

_KEPT_VERSIONS = 2  # the newest, and one that a slow reader may still have mapped
_SHARED_MEMORY = Path("/dev/shm")
_LOCK = ".owner.lock"
_VERSION_FOLDER = re.compile(r"weight_update_v(\d+)")


def offer_weights(
    meta: WeightUpdateMeta, named_tensors: NamedTensors
) -> AbstractContextManager[Tensors | None]:
    """Within the context `meta.version` can be loaded: from the tensors it gives, else from
    `meta.path`. Leave it without an error when the version was loaded, so that old ones go."""
    return TRANSPORTS[meta.type].offer(meta, named_tensors)


@dataclass(frozen=True, slots=True)
class Transport:
    offer: Callable[[WeightUpdateMeta, NamedTensors], AbstractContextManager[Tensors | None]]
    place: Literal["disk", "memory"] | None = None  # of the folder it publishes in


def _hand_over(
    meta: WeightUpdateMeta, named_tensors: NamedTensors
) -> AbstractContextManager[Tensors]:
    """For engines in this process, and for those that move tensors themselves because they keep
    state between versions: a group of processes (collective.py), the last version (delta.py)."""
    return nullcontext(iter(named_tensors))


@contextmanager
def _publish(meta: WeightUpdateMeta, named_tensors: NamedTensors) -> Iterator[None]:
    publish(
        named_tensors,
        meta.path,
        meta.version,
        bucket_bytes=meta.weight_chunked_mem_mb << 20,
        durable=meta.type == "disk",
        key=meta.key,
    )
    yield
    if meta.clear_checkpoint_after_load:
        remove_old_versions(Path(meta.path).parent)


@contextmanager
def _publish_handles(meta: WeightUpdateMeta, named_tensors: NamedTensors) -> Iterator[None]:
    held = list(named_tensors)  # the receiver maps this memory until it has loaded
    publish_handles(held, meta.path, meta.version, key=meta.key)
    yield
    remove_old_versions(Path(meta.path).parent)


TRANSPORTS: dict[WeightTransport, Transport] = {
    "direct": Transport(_hand_over),
    "xccl": Transport(_hand_over),
    "delta": Transport(_hand_over, "disk"),
    "shm": Transport(_publish, "memory"),
    "disk": Transport(_publish, "disk"),
    "ipc": Transport(_publish_handles, "memory"),
}


def open_sent(folder: str | Path, *, version: int, key: str = "") -> NamedTensors:
    """The verified weights that were offered in `folder`, or PublicationError."""
    if (Path(folder) / HANDLES).exists():
        return open_handles(folder, version=version, key=key)
    publication = open_publication(folder, version=version, key=key)
    if (base := publication.manifest.base_version) is not None:
        raise PublicationError(f"{folder} holds only changes of version {base}: take it as a delta")
    return publication


def remove_old_versions(root: str | Path, keep: int = _KEPT_VERSIONS) -> None:
    """Removes all but the `keep` newest publications of `root`. Mapped files stay readable."""
    versions = []
    for entry in Path(root).iterdir():
        if match := _VERSION_FOLDER.fullmatch(entry.name):
            versions.append((int(match[1]), entry))
    for _, folder in sorted(versions)[: -keep or None]:
        shutil.rmtree(folder, ignore_errors=True)


class PublicationRoot:
    """The folder a run publishes in, owned by this process until `close`."""

    def __init__(self, type: WeightTransport, *, run_name: str, disk_root: str | Path) -> None:
        if type not in TRANSPORTS:
            known = list(TRANSPORTS)
            raise ValueError(f"unknown weight transport {type!r}, expected one of {known}")
        self.type: WeightTransport = type
        self.path: Path | None = None
        self._key = secrets.token_hex(32)
        self._memory: ScratchFolder | None = None
        self._lock: int | None = None
        remember_secret(self._key)
        place = TRANSPORTS[type].place
        if place == "disk":
            self.path = Path(disk_root)
            self._lock = _own(self.path)
            remove_old_versions(self.path, keep=0)
        elif place == "memory":
            sweep(_memory_root())
            self._memory = ScratchFolder("weights", place=_memory_root(), label=run_name)
            self.path = self._memory.path

    def meta(self, **options: Any) -> WeightUpdateMeta:
        """The update meta that publishes here; `with_version` sets the version."""
        path = str(self.path or "")
        return WeightUpdateMeta(type=self.type, path=path, key=self._key, **options)

    def close(self) -> None:
        """Removes the folder. Calling it twice is fine."""
        if self._memory is not None:
            self._memory.close()
        if self._lock is not None and self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> PublicationRoot:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _memory_root() -> Path:
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def _own(folder: Path) -> int:
    """Creates `folder` where needed, for this user alone, and holds its lock."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_private(folder)
    # A file, not the folder: network file systems lock only files open for writing.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(folder / _LOCK, flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise RuntimeError(
            f"{folder} belongs to a run that is still alive; end that run, or change trial_name"
        ) from None
    return lock


def _make_private(folder: Path) -> None:
    """RuntimeError if another user owns it, who could change what is published there."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".owner-") as probe:
            us = os.fstat(probe.fileno()).st_uid  # our uid on this file system
    except PermissionError as error:
        raise RuntimeError(f"{folder} cannot be written: {error.strerror}") from None
    found = os.stat(folder)
    if found.st_uid != us:
        raise RuntimeError(
            f"{folder} belongs to user {found.st_uid}, not to {us}, who publishes weights in it; "
            "remove it, or change cluster.fileroot or trial_name"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(folder, 0o700)
