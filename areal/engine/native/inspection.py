"""What a native engine shows of itself, so that a trainer can be compared with it.

    loop.call(weight_checksums)                       # name -> (dtype, checksum), of live weights
    loop.call(lambda engine: layer_trace(engine, tokens))

Both run between two steps and change nothing. ValueError if the engine cannot show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from areal.engine.native.engine import NativeEngine
from areal.engine.stored_weights import stored_checksums
from areal.models.common.layer_trace import trace_layers
from areal.weight_sync.bucket import Checksums, checksum_of

if TYPE_CHECKING:
    from areal.engine.native.tensor_parallel import LeadingEngine


def weight_checksums(engine: NativeEngine) -> Checksums:
    """Of the live weights, and of the live adapter under its names in peft's files. See
    engine/stored_weights.py."""
    if engine.loads_files:
        return cast("LeadingEngine", engine).weight_checksums()
    engine.check_score([[0]])
    if engine.is_merged:
        raise ValueError(
            "the adapter was merged into the weights here, so their bits differ from the trainer's"
        )
    weights = stored_checksums(engine.model)
    return weights | {name: checksum_of(tensor) for name, tensor in engine.adapters.live_tensors()}


def layer_trace(engine: NativeEngine, tokens: Sequence[int]) -> dict[str, Any]:
    """See models/common/layer_trace.py."""
    if engine.loads_files:
        raise ValueError("each rank of a tensor-parallel server computes a part of every layer")
    engine.check_score([list(tokens)])
    engine.adapters.begin(np.zeros(1, np.int64))
    return trace_layers(engine.model, tokens)
