"""The difference of two tensors of one dtype and shape, as bytes: small where few elements changed.

    patch = make_patch(old, new)                 # uint8
    new = apply_patch(patch, old)                # ValueError: another old one, or damage

Between two versions of a policy in bfloat16 most weights are equal bit for bit, and those that are
not moved by a step or two of their precision. A patch is one bit per element (has it changed?) and
the differences of those that have, as integers folded to be positive and ordered by byte, so that
the high bytes are runs of zeros; both are compressed.

    CRC-32 of old | CRC-32 of new | length of the bits | bits | differences
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import torch

_HEAD = struct.Struct("<IIQ")
_LEVEL = 1  # of zlib: higher ones take several times as long for a few percent
_WORDS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def make_patch(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """CPU tensors of the same dtype and shape."""
    assert (old.dtype, old.shape) == (new.dtype, new.shape), "a patch changes neither"
    before, after = _words(old), _words(new)
    changed = before != after
    bits = zlib.compress(np.packbits(changed).data, _LEVEL)
    steps = _fold(after[changed] - before[changed])  # wraps around, and back when applied
    by_byte = steps.view(np.uint8).reshape(-1, steps.itemsize).T
    head = _HEAD.pack(zlib.crc32(before.data), zlib.crc32(after.data), len(bits))
    content = head + bits + zlib.compress(np.ascontiguousarray(by_byte).data, _LEVEL)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def apply_patch(patch: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """What `old` became, verified. ValueError says whether `old` or the patch is wrong."""
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
    """The elements as integers of their size; numpy knows no bfloat16."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().view(_WORDS[tensor.element_size()])


def _fold(steps: np.ndarray) -> np.ndarray:
    """0, -1, 1, -2, 2 ... as 0, 1, 2, 3, 4 ..."""
    return (steps << 1) ^ (steps >> (8 * steps.itemsize - 1))


def _unfold(folded: np.ndarray) -> np.ndarray:
    unsigned = folded.view(folded.dtype.str.replace("i", "u"))
    return (unsigned >> 1).view(folded.dtype) ^ -(folded & 1)
