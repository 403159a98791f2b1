"""The experts of a trajectory's tokens, from the replies they come from (router replay).

Each reply has the experts of all tokens before its end, its prompt included. Of a token that
several replies have, the first reply counts: the one that sampled it, or read it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from areal.api.io_struct import ModelResponse

ROUTED_KEY = "routed_experts"  # of trajectories and batches, see io_struct.py


def experts_of_tokens(replies: Sequence[ModelResponse], num_tokens: int) -> np.ndarray | None:
    """[num_tokens, L, K]; each reply continues the tokens of the one before. None if not recorded.

    A token without a record has the largest number of the dtype, which is no expert.
    """
    recorded = [reply.routed_experts for reply in replies if reply.routed_experts is not None]
    if not recorded:
        return None
    shape = (num_tokens, *recorded[0].shape[1:])
    routed = np.full(shape, np.iinfo(recorded[0].dtype).max, recorded[0].dtype)
    start = 0
    for its in recorded:
        routed[start : len(its)] = its[start:]
        start = len(its)
    return routed
