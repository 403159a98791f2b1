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
        send_weights(engine, meta.with_version(3), actor.hf_weights())

A `PublicationRoot` is owned by one process, which removes it at the end, and is private to its
user. In memory it has a random name; if the owner was killed, the next run that opens a root finds
the free lock and removes the folder. Its key, sent with every load request, authenticates what this
run has written (seal.py).
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import WeightTransport, WeightUpdateMeta
from areal.api.redact import remember_secret
from areal.api.scratch import ScratchFolder, sweep
from areal.weight_sync.cuda_ipc import HANDLES, open_handles, publish_handles
from areal.weight_sync.publication import PublicationError, open_publication, publish

_ON_DISK = ("disk", "delta")
_IN_MEMORY = ("shm", "ipc")
_KEPT_VERSIONS = 2  # the newest, and one that a slow reader may still have mapped
_SHARED_MEMORY = Path("/dev/shm")
_LOCK = ".owner.lock"
_VERSION_FOLDER = re.compile(r"weight_update_v(\d+)")


def send_weights(
    engine: InferenceEngine,
    meta: WeightUpdateMeta,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Moves the weights to `engine` as `meta.version`; when it returns, they are live.

    RuntimeError if the engine refuses them; its old weights then stay live.
    """
    _SENDERS[meta.type](engine, meta, named_tensors)


def _send_by_engine(engine, meta, named_tensors) -> None:
    """Transports with state between versions are implemented by the engine."""
    engine.update_weights(meta, iter(named_tensors))


def _send_published(engine, meta, named_tensors) -> None:
    publish(
        named_tensors,
        meta.path,
        meta.version,
        bucket_bytes=meta.weight_chunked_mem_mb << 20,
        durable=meta.type == "disk",
        key=meta.key,
    )
    engine.update_weights(meta)
    if meta.clear_checkpoint_after_load:
        remove_old_versions(Path(meta.path).parent)


def _send_handles(engine, meta, named_tensors) -> None:
    publish_handles(named_tensors, meta.path, meta.version, key=meta.key)
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


def open_sent(
    folder: str | Path, *, version: int, key: str = ""
) -> Iterable[tuple[str, torch.Tensor]]:
    """The verified weights that a sender left in `folder`, or PublicationError."""
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
        if type not in _SENDERS:
            raise ValueError(f"unknown weight transport {type!r}, expected one of {list(_SENDERS)}")
        self.type: WeightTransport = type
        self.path: Path | None = None
        self._key = secrets.token_hex(32)
        self._memory: ScratchFolder | None = None
        self._lock: int | None = None
        remember_secret(self._key)
        if type in _ON_DISK:
            self.path = Path(disk_root)
            self._lock = _own(self.path)
            remove_old_versions(self.path, keep=0)
        elif type in _IN_MEMORY:
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
