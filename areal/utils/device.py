"""What this process may compute on."""

from __future__ import annotations

import os


def best_device() -> str:
    """The GPU when there is one, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_identity(device: str) -> str:
    """Which GPU it is, the same in every process and on every machine; "cpu" for the CPU."""
    import torch

    found = torch.device(device)
    return "cpu" if found.type == "cpu" else str(torch.cuda.get_device_properties(found).uuid)


def num_cores() -> int:
    """CPU cores this process may use; a container may be given fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
