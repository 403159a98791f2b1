"""A publication: the weights of one version as a folder another process can trust.

    weight_update_v7/
      bucket_00000.safetensors ...   a few weights each, about `bucket_bytes` large
      manifest.json                  version; size and CRC-32 of each bucket; dtype and shape of
                                     each weight; CRC-32 of the manifest itself; the base when
                                     these are only changes (delta.py)

`publish` builds the folder beside its final name and renames it, so readers see all of it or
nothing. `open_publication` reads every byte before it gives out the first tensor: a file that is
missing, cut short, changed in one bit, or not what the manifest lists raises `PublicationError`,
and the reader's model has not been touched.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from areal.utils.fs import atomic_folder, checksum, read_regular
from areal.weight_sync.bucket import (
    DTYPE_NAMES,
    DTYPES,
    fill_buckets,
    read_bucket,
    read_header,
    write_bucket,
)

FORMAT = "areal-weights-1"
MANIFEST = "manifest.json"
_MAX_MANIFEST = 256 << 20  # bytes
_BUCKET_NAME = re.compile(r"bucket_\d{5}\.safetensors")
_VERIFIER_THREADS = 4  # the checksum runs without the interpreter lock


class PublicationError(RuntimeError):
    """A publication that must not be loaded: which file, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Bucket:
    file: str
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    version: int
    buckets: tuple[Bucket, ...]
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype as in safetensors, shape)
    base_version: int | None = None  # set: the tensors are patches of that version (delta.py)

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)


def publish(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    folder: str | Path,
    version: int,
    *,
    bucket_bytes: int = 1 << 30,
    durable: bool = True,
    base_version: int | None = None,
) -> Manifest:
    """Writes the weights to `folder` as `version`, replacing what was there.

    Holds at most one bucket in CPU memory beside the model. `durable` flushes to the disk.
    """
    buckets: list[Bucket] = []
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    with atomic_folder(folder, durable=durable) as scratch:
        for content in fill_buckets(named_tensors, bucket_bytes, "cpu"):
            name = f"bucket_{len(buckets):05d}.safetensors"
            buckets.append(Bucket(name, *write_bucket(scratch / name, content)))
            for weight, tensor in content.items():
                if weight in tensors:
                    raise ValueError(f"the weight {weight} was given twice")
                tensors[weight] = (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        manifest = Manifest(version, tuple(buckets), tensors, base_version)
        (scratch / MANIFEST).write_bytes(_encode(manifest))
    return manifest


class Publication:
    """A verified publication. Iterating yields (name, tensor), views of the mapped files.

    for name, tensor in open_publication(folder):
        model.load_hf_tensor(name, tensor)
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @property
    def version(self) -> int:
        return self.manifest.version

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self.manifest.buckets:
            yield from read_bucket(self.folder / bucket.file)


def open_publication(folder: str | Path, *, version: int | None = None) -> Publication:
    """Verifies every byte of `folder`, and that it holds `version` where one is expected.

    Raises PublicationError naming the file and the fault.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise PublicationError(f"{folder}: there is no such publication folder")
    manifest = _decode(folder / MANIFEST)
    if version is not None and manifest.version != version:
        raise PublicationError(f"{folder} holds version {manifest.version}, expected {version}")
    with ThreadPoolExecutor(_VERIFIER_THREADS, thread_name_prefix="verify") as pool:
        list(pool.map(lambda bucket: _verify_bytes(folder, bucket), manifest.buckets))
    _verify_tensors(folder, manifest)
    return Publication(folder, manifest)


def _encode(manifest: Manifest) -> bytes:
    body = {
        "format": FORMAT,
        "version": manifest.version,
        "base_version": manifest.base_version,
        "buckets": [
            {"file": bucket.file, "nbytes": bucket.nbytes, "crc32": bucket.crc32}
            for bucket in manifest.buckets
        ],
        "tensors": {
            name: {"dtype": dtype, "shape": list(shape)}
            for name, (dtype, shape) in manifest.tensors.items()
        },
    }
    return _with_own_checksum(body)


def _with_own_checksum(body: dict[str, Any]) -> bytes:
    plain = json.dumps(body).encode()
    return json.dumps({**body, "crc32": zlib.crc32(plain)}, indent=1).encode() + b"\n"


def _decode(path: Path) -> Manifest:
    try:
        raw = read_regular(path, max_bytes=_MAX_MANIFEST)
    except FileNotFoundError:
        raise PublicationError(f"{path} is missing: the publication is not complete") from None
    except OSError as error:
        raise PublicationError(f"{path} cannot be read: {error.strerror}") from None
    try:
        body = json.loads(raw)
        own_checksum = body.pop("crc32")
        # Written one way only: any other byte, also one that JSON overlooks, is damage.
        intact = _with_own_checksum(body) == raw and isinstance(own_checksum, int)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise PublicationError(f"{path} is damaged: its content does not match its checksum")
    if body.get("format") != FORMAT:
        raise PublicationError(
            f"{path} has format {body.get('format')!r}, this areal reads {FORMAT!r}; "
            "run the same version of areal on both sides"
        )
    return _manifest_of(body, path)


def _manifest_of(body: dict[str, Any], path: Path) -> Manifest:
    """The typed manifest; a well-signed file with wrong content was written by something else."""
    try:
        buckets = tuple(Bucket(b["file"], b["nbytes"], b["crc32"]) for b in body["buckets"])
        tensors = {
            name: (entry["dtype"], tuple(entry["shape"])) for name, entry in body["tensors"].items()
        }
        manifest = Manifest(body["version"], buckets, tensors, body["base_version"])
        ok = (
            isinstance(manifest.version, int)
            and isinstance(manifest.base_version, int | None)
            and all(
                _BUCKET_NAME.fullmatch(bucket.file)
                and type(bucket.nbytes) is int
                and type(bucket.crc32) is int
                for bucket in buckets
            )
        )
    except (KeyError, TypeError, AttributeError):
        ok = False
    if not ok:
        raise PublicationError(f"{path} is not a manifest that `publish` writes")
    return manifest


def _verify_bytes(folder: Path, bucket: Bucket) -> None:
    path = folder / bucket.file
    try:
        found = path.stat().st_size
        if found != bucket.nbytes:
            raise PublicationError(f"{path} has {found} bytes, the manifest says {bucket.nbytes}")
        crc = checksum(path)
    except FileNotFoundError:
        raise PublicationError(f"{path} is missing, the manifest lists it") from None
    except OSError as error:
        raise PublicationError(f"{path} cannot be read: {error.strerror}") from None
    if crc != bucket.crc32:
        raise PublicationError(
            f"{path} is damaged: CRC-32 {crc:08x}, the manifest says {bucket.crc32:08x}"
        )


def _verify_tensors(folder: Path, manifest: Manifest) -> None:
    """The weights in the buckets are those of the manifest, each once, with its dtype and shape."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for bucket in manifest.buckets:
        try:
            header = read_header(folder / bucket.file)
        except ValueError as error:
            raise PublicationError(f"{folder / bucket.file} is no bucket: {error}") from None
        for name, kind in header.items():
            if manifest.tensors.get(name) != kind or name in found or kind[0] not in DTYPES:
                raise PublicationError(
                    f"{folder / bucket.file}: weight {name} is {kind}, "
                    f"the manifest says {manifest.tensors.get(name, 'nothing of it')}"
                )
            found[name] = kind
    if missing := sorted(manifest.tensors.keys() - found.keys()):
        raise PublicationError(
            f"{folder}: {len(missing)} weights of the manifest are in no bucket: {missing[0]} ..."
        )
