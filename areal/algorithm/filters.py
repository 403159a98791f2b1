"""Which groups are worth training on; each function is a `dynamic_filter_fn`: trajectory -> keep?

A trajectory holds the samples of one prompt; its `rewards` is `[n]`. A rejected group frees its
slot in the batch for another prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def keep_mixed_groups(trajectory: Mapping[str, Any]) -> bool:
    """Keep a group iff its rewards differ: equal ones have a group advantage of 0 (DAPO)."""
    from areal.algorithm.normalization import are_equal  # imported late: it loads torch

    return not are_equal(trajectory["rewards"])
