"""What this process may compute on."""

from __future__ import annotations

import os


def best_device() -> str:
    """The GPU when there is one, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def num_cores() -> int:
    """CPU cores this process may use; a container may be given fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
