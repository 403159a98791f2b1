"""Weights between two processes on one GPU: only handles of the memory are published, no copies.

    weight_update_v7/handles.json      version; for each weight dtype, shape, the CUDA IPC handle of
                                       its storage and a checksum computed on the device; a MAC
                                       over all of it (utils/manifest.py)

The receiver maps the sender's memory and verifies every weight before it copies one. The sender
keeps and does not change its weights until the receiver has replied (`offer_weights`).

    publish_handles(actor.hf_weights(), folder, 7)                  # training process
    for name, tensor in open_handles(folder, version=7): ...        # inference process
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from areal.utils.fs import atomic_folder
from areal.utils.manifest import read_sealed, seal, unseal, write_hashed
from areal.weight_sync.bucket import DTYPE_NAMES, DTYPES, device_checksum
from areal.weight_sync.publication import PublicationError

HANDLES = "handles.json"
FORMAT = "areal-handles-2"


def publish_handles(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    folder: str | Path,
    version: int,
    *,
    key: str = "",
) -> None:
    entries = {}
    for name, tensor in named_tensors:
        if not tensor.is_cuda:
            raise ValueError(f"the weight {name} lies on the CPU: ipc needs a trainer on a GPU")
        entries[name] = _describe(tensor.detach())
    torch.cuda.synchronize()
    body = {"format": FORMAT, "version": version, "tensors": entries}
    with atomic_folder(folder, durable=False) as scratch:
        scratch.chmod(0o700)
        write_hashed(scratch / HANDLES, [seal(body, key)])


def open_handles(
    folder: str | Path, *, version: int, key: str = ""
) -> list[tuple[str, torch.Tensor]]:
    """The sender's own tensors, verified. PublicationError names the file and the fault."""
    file = Path(folder) / HANDLES
    try:
        body = unseal(read_sealed(file), key)
        if (body["format"], body["version"]) != (FORMAT, version):
            raise PublicationError(
                f"{file} holds {body['format']} version {body['version']}, "
                f"expected {FORMAT} version {version}"
            )
        return [(name, _open(name, entry, file)) for name, entry in body["tensors"].items()]
    except PublicationError:
        raise
    # RuntimeError: raised by torch for an invalid handle or without a GPU
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as err:
        raise PublicationError(f"{file} cannot be read: {type(err).__name__}: {err}") from err


def _describe(tensor: torch.Tensor) -> dict[str, Any]:
    device, *handle = tensor.untyped_storage()._share_cuda_()
    return {
        "dtype": DTYPE_NAMES[tensor.dtype],
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset(),
        "device": device,
        "handle": [_to_text(part) for part in handle],
        "checksum": device_checksum(tensor),
    }


def _open(name: str, entry: dict[str, Any], file: Path) -> torch.Tensor:
    handle = [_from_text(part) for part in entry["handle"]]
    storage = torch.UntypedStorage._new_shared_cuda(entry["device"], *handle)
    tensor = torch.empty(0, dtype=DTYPES[entry["dtype"]], device=f"cuda:{entry['device']}")
    tensor.set_(storage, entry["offset"], entry["shape"], entry["stride"])
    if device_checksum(tensor) != entry["checksum"]:
        raise PublicationError(f"{file}: the weight {name} is not what was published")
    return tensor


def _to_text(part: Any) -> Any:
    return {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _from_text(part: Any) -> Any:
    return base64.b64decode(part["bytes"]) if isinstance(part, dict) else part
