"""Publications that hold only what has changed since the version before.

    publisher = DeltaPublisher()                     # training process
    publisher.publish(actor.hf_weights(), folder, 8, bucket_bytes=1 << 30)

    mirror = Mirror()                                # inference process
    for name, tensor in mirror.take(folder, version=8): ...

The publisher remembers the weights of the version before and publishes a patch of each (patch.py);
`base_version` in the manifest says which version they change. The receiver keeps the whole weights
of the last version in memory, its mirror, and patches those. One that has another version, or none,
raises `WrongBaseError`: then `publish_whole` gives it everything. The first version, and the one
after a failure, are whole anyway.

Both sides hold a copy of the weights in host memory; what is saved is the way between them.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from areal.utils.device import num_cores
from areal.weight_sync.patch import apply_patch, make_patch
from areal.weight_sync.publication import (
    Manifest,
    Publication,
    PublicationError,
    open_publication,
    publish,
)
from areal.weight_sync.transports import PublicationRoot

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class WrongBaseError(PublicationError):
    """A receiver does not have the version that a publication changes: it needs a whole one."""


class DeltaPublisher:
    def __init__(self) -> None:
        self._version: int | None = None  # None: the next publication is whole
        self._weights: dict[str, torch.Tensor] = {}

    def publish(
        self,
        named_tensors: NamedTensors,
        folder: str | Path,
        version: int,
        *,
        bucket_bytes: int,
        key: str = "",
    ) -> Manifest:
        """Writes patches of the version published before where there is one."""
        base_version, base = self._version, self._weights
        self.forget()  # until the end: an error must not leave weights of two versions
        weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named_tensors}
        self._weights = weights
        if base_version is None or _kinds(base) != _kinds(weights):
            return self.publish_whole(folder, version, bucket_bytes=bucket_bytes, key=key)
        with ThreadPoolExecutor(num_cores(), thread_name_prefix="patch") as pool:
            patches = pool.map(make_patch, base.values(), weights.values())
            manifest = publish(
                zip(weights, patches, strict=True),
                folder,
                version,
                bucket_bytes=bucket_bytes,
                base_version=base_version,
                key=key,
            )
        self._version = version
        return manifest

    def publish_whole(
        self, folder: str | Path, version: int, *, bucket_bytes: int, key: str = ""
    ) -> Manifest:
        """Writes all of the weights that were last given to `publish`."""
        weights = self._weights.items()
        manifest = publish(weights, folder, version, bucket_bytes=bucket_bytes, key=key)
        self._version = version
        return manifest

    def forget(self) -> None:
        """Makes the next publication a whole one."""
        self._version, self._weights = None, {}


class Mirror:
    """The whole weights of the last version that came, in a folder in memory."""

    def __init__(self) -> None:
        name = f"mirror-{secrets.token_hex(4)}"
        self._root = PublicationRoot("shm", run_name=name, disk_root=tempfile.gettempdir())
        assert self._root.path is not None, "shm goes through a folder"
        self._folder = self._root.path
        self._held: Publication | None = None

    def take(self, folder: str | Path, *, version: int, key: str = "") -> Publication:
        """The weights of `version`, whole and verified, from a publication whole or not."""
        sent = open_publication(folder, version=version, key=key)
        if sent.manifest.base_version is None:
            return self.keep(sent, version)
        held = self._held
        if held is None or held.version != sent.manifest.base_version:
            raise WrongBaseError(
                f"{folder} changes version {sent.manifest.base_version}, here is "
                f"{'none' if held is None else held.version}: publish the whole weights"
            )
        return self.keep(_patched(held, sent), version)

    def keep(self, named_tensors: NamedTensors, version: int) -> Publication:
        """Holds these from now on, in place of what was held before."""
        folder, before = self._folder / f"weight_update_v{version}", self._held
        manifest = publish(named_tensors, folder, version, durable=False)
        self._held = Publication(folder, manifest)
        if before is not None and before.folder != folder:
            shutil.rmtree(before.folder, ignore_errors=True)
        return self._held

    def close(self) -> None:
        self._held = None
        self._root.close()


def _kinds(weights: dict[str, torch.Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in weights.items()]


def _patched(base: Publication, patches: Publication) -> Iterator[tuple[str, torch.Tensor]]:
    if base.manifest.tensors.keys() != patches.manifest.tensors.keys():
        raise PublicationError(f"{patches.folder} changes other weights than {base.folder} has")
    old = dict(base)

    def patched(name: str, patch: torch.Tensor) -> torch.Tensor:
        try:
            return apply_patch(patch, old[name])
        except ValueError as err:
            raise PublicationError(f"{patches.folder}: the weight {name}: {err}") from err

    names = list(patches.manifest.tensors)
    with ThreadPoolExecutor(num_cores(), thread_name_prefix="patch") as pool:
        yield from zip(names, pool.map(patched, names, dict(patches).values()), strict=True)
