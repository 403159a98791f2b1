"""Which groups are worth training on; each is a `dynamic_filter_fn`: trajectory -> keep it?

A trajectory is the samples of one prompt; its `rewards` is `[n]`. What is refused costs no place in
the batch: other prompts take it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def keep_mixed_groups(trajectory: Mapping[str, Any]) -> bool:
    """Keep a group iff its rewards differ: equal ones have a group advantage of 0 (DAPO)."""
    from areal.algorithm.normalization import are_equal  # not at the door: it loads torch

    return not are_equal(trajectory["rewards"])
