"""What a native engine shows of itself, so that a trainer can be compared with it.

    loop.call(weight_checksums)                       # name -> (dtype, checksum), of live weights
    loop.call(lambda engine: layer_trace(engine, tokens))

Both run between two steps and change nothing. ValueError if the engine cannot show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from areal.engine.native.engine import NativeEngine
from areal.models.common.layer_trace import trace_layers
from areal.weight_sync.bucket import Checksums, checksum_of


def weight_checksums(engine: NativeEngine) -> Checksums:
    """Of the live weights, and of the live adapter under its names in peft's files."""
    _check(engine, [0])
    if engine.model.has_fp8_cache:
        raise ValueError("the weights are stored in FP8 blocks, which the trainer does not have")
    weights = {name: checksum_of(tensor) for name, tensor in engine.model.named_hf_tensors()}
    return weights | {name: checksum_of(tensor) for name, tensor in engine.adapters.live_tensors()}


def layer_trace(engine: NativeEngine, tokens: Sequence[int]) -> dict[str, Any]:
    """See models/common/layer_trace.py."""
    _check(engine, list(tokens))
    engine.adapters.begin(np.zeros(1, np.int64))
    return trace_layers(engine.model, tokens)


def _check(engine: NativeEngine, tokens: list[int]) -> None:
    if engine.loads_files:
        raise ValueError("each rank of a tensor-parallel server has a shard of the weights")
    engine.check_score([tokens])
