"""What this process may compute on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def best_device() -> str:
    """The GPU when there is one, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_identity(device: torch.device) -> str:
    """Which GPU it is, the same in every process and on every machine; "cpu" for the CPU."""
    import torch

    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def num_cores() -> int:
    """CPU cores this process may use; a container may be given fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
