"""The ways weights go from a training engine to an inference engine.

| type     | between                | how                                                         |
|----------|------------------------|-------------------------------------------------------------|
| `direct` | one process            | the tensors themselves                                      |
| `shm`    | processes of a machine | a publication in memory (`/dev/shm`, else a temporary folder)|
| `ipc`    | processes on one GPU   | where the sender's tensors lie on the device                |
| `disk`   | machines               | a publication in the run's folder, flushed to the disk      |
| `delta`  | machines               | likewise, of only what changed since the version before     |
| `xccl`   | processes, machines    | a broadcast through a process group: NCCL, or gloo          |

    with PublicationRoot("shm", run_name="demo", disk_root=paths.weights) as root:
        meta = root.meta(recompute_kv=True)
        send_weights(engine, meta.with_version(3), actor.hf_weights())

A `PublicationRoot` is owned by one process, which removes it at the end. The root of an owner that
was killed is found by its free lock and removed by the next run that opens one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import WeightTransport, WeightUpdateMeta
from areal.weight_sync.cuda_ipc import HANDLES, open_handles, publish_handles
from areal.weight_sync.publication import PublicationError, open_publication, publish

_ON_DISK = ("disk", "delta")
_KEPT_VERSIONS = 2  # the newest, and the one a slow reader may still be mapping
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "areal-"
_LOCK = ".owner.lock"
_VERSION_FOLDER = re.compile(r"weight_update_v(\d+)")


def send_weights(
    engine: InferenceEngine,
    meta: WeightUpdateMeta,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Moves the weights to `engine` as `meta.version`; when it returns, they serve.

    RuntimeError when the engine refuses them: its old weights then go on serving.
    """
    if meta.use_lora:
        raise ValueError("use_lora: no transport here moves adapters; send the whole model")
    _SENDERS[meta.type](engine, meta, named_tensors)


def _send_by_engine(engine, meta, named_tensors) -> None:
    """What needs to remember something from one version to the next is up to the engine."""
    engine.update_weights(meta, iter(named_tensors))


def _send_published(engine, meta, named_tensors) -> None:
    publish(
        named_tensors,
        meta.path,
        meta.version,
        bucket_bytes=meta.weight_chunked_mem_mb << 20,
        durable=meta.type == "disk",
    )
    engine.update_weights(meta)
    if meta.clear_checkpoint_after_load:
        remove_old_versions(Path(meta.path).parent)


def _send_handles(engine, meta, named_tensors) -> None:
    publish_handles(named_tensors, meta.path, meta.version)
    engine.update_weights(meta)
    remove_old_versions(Path(meta.path).parent)


_SENDERS = {
    "direct": _send_by_engine,
    "xccl": _send_by_engine,
    "delta": _send_by_engine,
    "shm": _send_published,
    "disk": _send_published,
    "ipc": _send_handles,
}


def open_sent(folder: str | Path, *, version: int) -> Iterable[tuple[str, torch.Tensor]]:
    """What a sender left in `folder`, verified; PublicationError when it must not be loaded."""
    if (Path(folder) / HANDLES).exists():
        return open_handles(folder, version=version)
    publication = open_publication(folder, version=version)
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
        if type not in _SENDERS:
            raise ValueError(f"unknown weight transport {type!r}, expected one of {list(_SENDERS)}")
        self.type = type
        self.path: Path | None = None
        self._lock: int | None = None
        if type in ("direct", "xccl"):
            return
        if type not in _ON_DISK:
            _remove_orphans(_memory_root())
        self.path = _choose_path(type, run_name, Path(disk_root))
        self._lock = _own(self.path)
        remove_old_versions(self.path, keep=0)

    def meta(self, **options: Any) -> WeightUpdateMeta:
        """The order that publishes here; `with_version` names the version."""
        return WeightUpdateMeta(type=self.type, path=str(self.path or ""), **options)

    def close(self) -> None:
        """Removes the folder. Calling it twice is fine."""
        if self._lock is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> PublicationRoot:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _memory_root() -> Path:
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def _choose_path(type: str, run_name: str, disk_root: Path) -> Path:
    if type in _ON_DISK:
        return disk_root
    # The digest keeps runs of the same name in different folders (and of different users) apart.
    place = f"{disk_root.absolute()}:{os.getuid()}"
    digest = hashlib.sha256(place.encode()).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", run_name)[:60]
    return _memory_root() / f"{_PREFIX}{readable}-{digest}"


def _own(folder: Path) -> int:
    """Creates `folder` where needed and holds its lock."""
    for _ in range(5):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = _take_lock(folder)
        if fd is not None and (folder / _LOCK).exists():
            return fd
        # Another starting run may just now be removing it as an orphan: look again.
        if fd is not None:
            os.close(fd)
        time.sleep(0.02)
    raise RuntimeError(
        f"{folder} belongs to a run that is still alive; end that run, or change trial_name"
    )


def _take_lock(folder: Path) -> int | None:
    """An open file whose lock dies with this process, or None when another process holds it."""
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _remove_orphans(root: Path) -> None:
    """Gives back the memory of runs that were killed: their folders' locks are free."""
    for lock in root.glob(f"{_PREFIX}*/{_LOCK}"):
        if lock.stat().st_uid == os.getuid() and (fd := _take_lock(lock.parent)) is not None:
            shutil.rmtree(lock.parent, ignore_errors=True)
            os.close(fd)
