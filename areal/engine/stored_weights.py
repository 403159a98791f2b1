"""Checksums of weights as a server stores them: rounded, in FP8 blocks, or in shards.

    server:   stored_checksums(model)          # a model of one rank
              joined_checksums(model)          # of several: all of them call
    trainer:  checksum_as(tensor, stored)      # `stored`: what the server calls its dtype

A trainer rounds what it sends to what the server stores, and compares. Of FP8 the name is that of
the blocks (`FP8_128`: up to 128 rows and 128 columns share a scale), and the checksum that of the
dequantized numbers in float32, which lose nothing.
"""

from __future__ import annotations

import re

import torch

from areal.models.common.decoder import Decoder
from areal.models.common.fp8_linear import round_weight
from areal.models.common.tensor_parallel import cut_dim
from areal.weight_sync.bucket import (
    DTYPE_NAMES,
    DTYPES,
    Checksums,
    checksum_of,
    device_checksum,
)

_FP8_NAME = re.compile("FP8_(1|2|4|8|16|32|64|128)")


def stored_checksums(model: Decoder) -> Checksums:
    blocks = model.fp8_block_rows()
    return {
        name: (f"FP8_{blocks[name]}", device_checksum(tensor.float()))
        if name in blocks
        else checksum_of(tensor)
        for name, tensor in model.named_hf_tensors()
    }


def joined_checksums(model: Decoder) -> Checksums:
    """Of whole tensors, joined from the shards of all ranks, which get the same result.

    What every rank has whole: the checksum of rank 0, or of the first rank that has another one.
    """
    share = model.share
    assert share is not None, "a model of one rank has no shards"
    found: Checksums = {}
    for name, own in model.state_dict().items():
        dim = cut_dim(name)
        whole = own if dim is None else share.join(name, own)
        for hf_name, tensor in model.adapter.convert_single_to_hf(name, whole):
            number = device_checksum(tensor)
            if dim is None:
                number = share.ranks.odd_one(number, own.device)
            found[hf_name] = DTYPE_NAMES[tensor.dtype], number
    return found


def checksum_as(tensor: torch.Tensor, stored: str | None) -> tuple[str, int]:
    """`stored` None: as it is. So is a tensor that cannot be stored as the server says, whose
    checksum is then another one."""
    if stored in DTYPES:
        return checksum_of(tensor.to(DTYPES[stored]))
    blocks = _FP8_NAME.fullmatch(stored or "")
    if blocks is None or tensor.ndim != 2 or len(tensor) % int(blocks[1]):
        return checksum_of(tensor)
    rounded = round_weight(tensor, int(blocks[1]), torch.float32)
    return blocks[0], device_checksum(rounded)
