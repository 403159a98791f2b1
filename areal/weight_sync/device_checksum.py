"""A checksum of weights that is computed where they lie, also on a GPU."""

from __future__ import annotations

import torch

# Words at a time: what fits the cache of a CPU core; what keeps a GPU busy in a few tens of MB.
_CHUNK_WORDS = {"cpu": 1 << 16, "cuda": 1 << 22}


def device_checksum(tensor: torch.Tensor) -> int:
    """A sum of the tensor's 8-byte words, each times an odd number of its place, modulo 2**64.

    Odd factors can be inverted: a change of one word, of whatever bit, always shows.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    num_whole = len(raw) // 8 * 8
    tail = raw.new_zeros(8)
    tail[: len(raw) - num_whole] = raw[num_whole:]
    whole = raw[:num_whole]
    if whole.storage_offset() % 8:  # cannot be read as words where it lies
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
