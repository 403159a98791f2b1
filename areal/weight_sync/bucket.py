"""One bucket: a safetensors file of a few weights, with the hash of its bytes.

Written straight from the tensors' memory, so a bucket needs no second copy of its weights; read by
mapping the file, so loading copies each weight once, into the model.

`device_checksum` is for weights that are never written to a file: it runs on their device.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from areal.utils.manifest import write_hashed

# dtype names of safetensors.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

# Words per chunk: fits the cache of a CPU core; keeps a GPU busy within tens of MB.
_CHUNK_WORDS = {"cpu": 1 << 16, "cuda": 1 << 22}


def fill_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int,
    device: str | torch.device,
) -> Iterator[dict[str, torch.Tensor]]:
    """Groups weights in order, on `device`, until the next one would not fit.

    A weight larger than a bucket gets its own.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    content: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"the weight {name} is {tensor.dtype}, which cannot be published")
        if content and (size + tensor.nbytes > bucket_bytes or name in content):
            yield content
            content, size = {}, 0
        content[name] = tensor.detach().to(device)
        size += tensor.nbytes
    if content:
        yield content


def write_bucket(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[int, str]:
    """Writes CPU tensors to the new file `path`; returns (bytes written, their hash)."""
    return write_hashed(path, _file_content(tensors))


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{weight name: (dtype name, shape)} of a bucket whose hash is right.

    ValueError if `read_bucket` could not read it: a correct hash does not imply a valid bucket.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > file_bytes - 8:
            raise ValueError(f"a header of {size} bytes in a file of {file_bytes}")
        try:
            header = json.loads(file.read(size))
        except RecursionError:
            raise ValueError("a header that is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("a header that is no JSON object")
    for name, entry in header.items():
        if not _is_entry(entry, file_bytes - 8 - size):
            raise ValueError(f"the entry of weight {name[:100]} describes no bytes of it")
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


def read_bucket(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) in the order written; the tensors are views of the mapped file."""
    with path.open("rb") as file:
        # Copy-on-write, because torch requires writable memory; the file is never changed.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    size = int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8 : 8 + size]).items():
        begin, end = entry["data_offsets"]
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        if begin == end:
            yield name, torch.empty(shape, dtype=dtype)
            continue
        count = (end - begin) // dtype.itemsize
        flat = torch.frombuffer(content, dtype=dtype, count=count, offset=8 + size + begin)
        yield name, flat.view(shape)


def _is_entry(entry: Any, data_bytes: int) -> bool:
    """Whether dtype is known and shape matches the byte range."""
    if not isinstance(entry, dict):
        return False
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list)):
        return False
    are_counts = all(type(number) is int and number >= 0 for number in [*shape, *offsets])
    if not are_counts or len(offsets) != 2 or dtype not in DTYPES:
        return False
    begin, end = offsets
    fits = begin <= end <= data_bytes
    return fits and math.prod(shape) * DTYPES[dtype].itemsize == end - begin


def _file_content(tensors: dict[str, torch.Tensor]) -> Iterable[bytes | memoryview]:
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data for every dtype
    yield len(text).to_bytes(8, "little")
    yield text
    for tensor in tensors.values():
        if tensor.nbytes:
            flat = tensor.detach().contiguous().view(-1)
            yield flat.view(torch.uint8).numpy().data


# Name -> (dtype, checksum of the bytes), of weights that two processes compare.
Checksums = dict[str, tuple[str, int]]


def checksum_of(tensor: torch.Tensor) -> tuple[str, int]:
    return DTYPE_NAMES[tensor.dtype], device_checksum(tensor)


def device_checksum(tensor: torch.Tensor) -> int:
    """Sum of the tensor's 8-byte words, each times an odd factor of its index, modulo 2**64.

    Odd factors are invertible, so a change of any single word is always detected.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    num_whole = len(raw) // 8 * 8
    tail = raw.new_zeros(8)
    tail[: len(raw) - num_whole] = raw[num_whole:]
    whole = raw[:num_whole]
    if whole.storage_offset() % 8:  # not aligned to words
        whole = whole.clone()
    size = _CHUNK_WORDS[raw.device.type]
    num_factors = min(size, len(raw) // 8 + 1)
    factors = torch.arange(1, 2 * num_factors, 2, device=raw.device)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    place = 0
    for words in (*whole.view(torch.int64).split(size), tail.view(torch.int64)):
        total += (words * factors[: len(words)]).sum() + 2 * place * words.sum()
        place += len(words)
    return int(total)
