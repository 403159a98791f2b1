"""A publication: the weights of one version as a folder that readers can verify.

    weight_update_v7/
      bucket_00000.safetensors ...   a few weights each, about `bucket_bytes` large
      manifest.json                  version; size and hash of each bucket; dtype and shape of
                                     each weight; the base version of a delta (delta.py); a
                                     MAC over all of it (utils/manifest.py)

`publish` builds the folder beside its final name and renames it, so readers see all of it or
nothing. `open_publication` verifies every byte before it returns the first tensor: a file that is
missing, truncated, changed in one bit, or not as the manifest lists it, and a manifest written with
another key, raise `PublicationError` before the reader's model is touched. Only this user can
access the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from areal.utils.fs import atomic_folder
from areal.utils.manifest import (
    MANIFEST,
    check_content,
    chunked_sha256,
    open_plain,
    read_sealed,
    seal,
    unseal,
    write_hashed,
)
from areal.weight_sync.bucket import (
    DTYPE_NAMES,
    DTYPES,
    fill_buckets,
    read_bucket,
    read_header,
    write_bucket,
)

FORMAT = "areal-weights-2"
_BUCKET_NAME = re.compile(r"bucket_\d{5}\.safetensors")


class PublicationError(RuntimeError):
    """A publication that failed verification; names the file and the fault."""


@dataclass(frozen=True, slots=True)
class Bucket:
    file: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class WeightManifest:
    version: int
    buckets: tuple[Bucket, ...]
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype as in safetensors, shape)
    base_version: int | None = None  # if set, the tensors are patches of that version (delta.py)

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
    key: str = "",
) -> WeightManifest:
    """Writes the weights to `folder` as `version`, replacing what was there.

    Holds at most one bucket in CPU memory beside the model. `durable` flushes to the disk. Readers
    need the same `key`.
    """
    buckets: list[Bucket] = []
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    with atomic_folder(folder, durable=durable) as scratch:
        scratch.chmod(0o700)
        for content in fill_buckets(named_tensors, bucket_bytes, "cpu"):
            name = f"bucket_{len(buckets):05d}.safetensors"
            buckets.append(Bucket(name, *write_bucket(scratch / name, content)))
            for weight, tensor in content.items():
                if weight in tensors:
                    raise ValueError(f"the weight {weight} was given twice")
                tensors[weight] = (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        manifest = WeightManifest(version, tuple(buckets), tensors, base_version)
        write_hashed(scratch / MANIFEST, [seal(_body(manifest), key)])
    return manifest


class Publication:
    """A verified publication. Iterating yields (name, tensor), views of the mapped files.

    for name, tensor in open_publication(folder):
        model.load_hf_tensor(name, tensor)
    """

    def __init__(self, folder: Path, manifest: WeightManifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @property
    def version(self) -> int:
        return self.manifest.version

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self.manifest.buckets:
            yield from read_bucket(self.folder / bucket.file)


def open_publication(
    folder: str | Path, *, version: int | None = None, key: str = ""
) -> Publication:
    """Verifies every byte of `folder`, that it was written with `key`, and its version, if given.

    Raises PublicationError naming the file and the fault.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise PublicationError(f"{folder}: there is no such publication folder")
    manifest = _decode(folder / MANIFEST, key)
    if version is not None and manifest.version != version:
        raise PublicationError(f"{folder} holds version {manifest.version}, expected {version}")
    for bucket in manifest.buckets:
        _verify_bytes(folder / bucket.file, bucket)
    _verify_tensors(folder, manifest)
    return Publication(folder, manifest)


def _body(manifest: WeightManifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": manifest.version,
        "base_version": manifest.base_version,
        "buckets": [
            {"file": bucket.file, "nbytes": bucket.nbytes, "sha256": bucket.sha256}
            for bucket in manifest.buckets
        ],
        "tensors": {
            name: {"dtype": dtype, "shape": list(shape)}
            for name, (dtype, shape) in manifest.tensors.items()
        },
    }


def _decode(path: Path, key: str) -> WeightManifest:
    try:
        body = unseal(read_sealed(path), key)
    except FileNotFoundError:
        raise PublicationError(f"{path} is missing: the publication is not complete") from None
    except (OSError, ValueError) as error:
        raise PublicationError(f"{path} {error}") from None
    if body.get("format") != FORMAT:
        raise PublicationError(
            f"{path} has format {body.get('format')!r}, this areal reads {FORMAT!r}; "
            "run the same version of areal on both sides"
        )
    return _manifest_of(body, path)


def _manifest_of(body: dict[str, Any], path: Path) -> WeightManifest:
    """The typed manifest; a validly sealed file may still have unexpected content."""
    try:
        buckets = tuple(Bucket(b["file"], b["nbytes"], b["sha256"]) for b in body["buckets"])
        tensors = {
            name: (entry["dtype"], tuple(entry["shape"])) for name, entry in body["tensors"].items()
        }
        manifest = WeightManifest(body["version"], buckets, tensors, body["base_version"])
        ok = (
            isinstance(manifest.version, int)
            and isinstance(manifest.base_version, int | None)
            and all(
                _BUCKET_NAME.fullmatch(bucket.file)
                and type(bucket.nbytes) is int
                and type(bucket.sha256) is str
                for bucket in buckets
            )
        )
    except (KeyError, TypeError, AttributeError):
        ok = False
    if not ok:
        raise PublicationError(f"{path} is not a manifest that `publish` writes")
    return manifest


def _verify_bytes(path: Path, bucket: Bucket) -> None:
    try:
        with open_plain(path) as file:
            check_content(file, bucket.nbytes, bucket.sha256, chunked_sha256)
    except FileNotFoundError:
        raise PublicationError(f"{path} is missing, the manifest lists it") from None
    except (OSError, ValueError) as error:
        raise PublicationError(f"{path} is damaged: {error}") from None


def _verify_tensors(folder: Path, manifest: WeightManifest) -> None:
    """The buckets hold exactly the manifest's weights, each once, with its dtype and shape."""
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
