"""Publications that hold only the changes since the previous version.

    publisher = DeltaPublisher()                     # training process
    publisher.publish(actor.hf_weights(), folder, 8, bucket_bytes=1 << 30)

    mirror = Mirror()                                # inference process
    for name, tensor in mirror.take(folder, version=8): ...

The publisher keeps the weights of the previous version and publishes a patch of each;
`base_version` in the manifest names the version it applies to. The receiver keeps the full weights
of the last version in memory, its mirror, and patches those. A receiver with another version, or
none, raises `WrongBaseError` and needs `publish_whole`. The first version, and the one after a
failure, are full anyway. Both sides hold a copy of the weights in host memory to save bandwidth.

    patch = make_patch(old, new)                 # uint8
    new = apply_patch(patch, old)                # ValueError: another old one, or damage

Between two versions of a policy in bfloat16 most weights are equal bit for bit, and the others
differ by an ulp or two. A patch is one bit per element (changed or not) and the differences of the
changed ones as integers, zigzag-coded and ordered by byte, so that the high bytes are runs of
zeros; both are compressed.

    CRC-32 of old | CRC-32 of new | length of the bits | bits | differences
"""

from __future__ import annotations

import secrets
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from areal.utils.device import num_cores
from areal.weight_sync.publication import (
    Publication,
    PublicationError,
    WeightManifest,
    open_publication,
    publish,
)
from areal.weight_sync.transports import PublicationRoot

NamedTensors = Iterable[tuple[str, torch.Tensor]]
_HEAD = struct.Struct("<IIQ")
_LEVEL = 1  # of zlib: higher ones take several times as long for a few percent
_WORDS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


class WrongBaseError(PublicationError):
    """The receiver lacks the base version of a delta and needs a full publication."""


class DeltaPublisher:
    def __init__(self) -> None:
        self._version: int | None = None  # None: the next publication is full
        self._weights: dict[str, torch.Tensor] = {}

    def publish(
        self,
        named_tensors: NamedTensors,
        folder: str | Path,
        version: int,
        *,
        bucket_bytes: int,
        key: str = "",
    ) -> WeightManifest:
        """Writes patches against the previous version, or a full publication without one."""
        base_version, base = self._version, self._weights
        self.forget()  # until the end: an error must not leave a mix of two versions
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
    ) -> WeightManifest:
        """Writes the full weights last passed to `publish`."""
        weights = self._weights.items()
        manifest = publish(weights, folder, version, bucket_bytes=bucket_bytes, key=key)
        self._version = version
        return manifest

    def forget(self) -> None:
        """Makes the next publication a full one."""
        self._version, self._weights = None, {}


class Mirror:
    """The full weights of the last received version, in an in-memory folder."""

    def __init__(self) -> None:
        name = f"mirror-{secrets.token_hex(4)}"
        self._root = PublicationRoot("shm", run_name=name, disk_root=tempfile.gettempdir())
        assert self._root.path is not None, "shm goes through a folder"
        self._folder = self._root.path
        self._held: Publication | None = None

    def take(self, folder: str | Path, *, version: int, key: str = "") -> Publication:
        """The full, verified weights of `version`, from a full publication or a delta."""
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
        """Replaces the mirror by these weights."""
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


def make_patch(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """CPU tensors of the same dtype and shape."""
    assert (old.dtype, old.shape) == (new.dtype, new.shape), "a patch changes neither"
    before, after = _words(old), _words(new)
    changed = before != after
    bits = zlib.compress(np.packbits(changed).data, _LEVEL)
    steps = _fold(after[changed] - before[changed])  # overflow wraps, and back when applied
    by_byte = steps.view(np.uint8).reshape(-1, steps.itemsize).T
    head = _HEAD.pack(zlib.crc32(before.data), zlib.crc32(after.data), len(bits))
    content = head + bits + zlib.compress(np.ascontiguousarray(by_byte).data, _LEVEL)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def apply_patch(patch: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The new tensor, verified. ValueError says whether `old` or the patch is wrong."""
    content = patch.numpy().tobytes()
    before = _words(old)
    if len(content) < _HEAD.size:
        raise ValueError(f"a patch has at least {_HEAD.size} bytes, this one has {len(content)}")
    old_crc, new_crc, num_bits = _HEAD.unpack_from(content)
    if zlib.crc32(before.data) != old_crc:
        raise ValueError("the patch was made for other values than these")
    bits = content[_HEAD.size : _HEAD.size + num_bits]
    try:
        after = _apply(before, zlib.decompress(bits), content[_HEAD.size + num_bits :])
    except (zlib.error, ValueError) as error:
        raise ValueError(f"the patch is damaged: {error}") from error
    if zlib.crc32(after.data) != new_crc:
        raise ValueError("the patch is damaged: its result has another checksum")
    return torch.from_numpy(after.view(np.uint8)).view(old.dtype).view(old.shape)


def _apply(before: np.ndarray, bits: bytes, steps: bytes) -> np.ndarray:
    packed = np.frombuffer(bits, np.uint8)
    changed = np.unpackbits(packed, count=before.size).view(bool)
    by_byte = np.frombuffer(zlib.decompress(steps), np.uint8).reshape(before.itemsize, -1)
    folded = np.ascontiguousarray(by_byte.T).view(before.dtype).reshape(-1)
    after = before.copy()
    after[changed] += _unfold(folded)
    return after


def _words(tensor: torch.Tensor) -> np.ndarray:
    """The elements as integers of their size; numpy has no bfloat16."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().view(_WORDS[tensor.element_size()])


def _fold(steps: np.ndarray) -> np.ndarray:
    """Zigzag: 0, -1, 1, -2, 2 ... as 0, 1, 2, 3, 4 ..."""
    return (steps << 1) ^ (steps >> (8 * steps.itemsize - 1))


def _unfold(folded: np.ndarray) -> np.ndarray:
    unsigned = folded.view(folded.dtype.str.replace("i", "u"))
    return (unsigned >> 1).view(folded.dtype) ^ -(folded & 1)
