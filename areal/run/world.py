"""What the bits of a training step depend on besides config, weights and data."""

from __future__ import annotations

from typing import Any

import torch

from areal import __version__


def numeric_world() -> dict[str, Any]:
    """JSON values by name. Sums are cut by threads and rounded by the instructions there are."""
    on_gpu = torch.cuda.is_available()
    return {
        "areal": __version__,
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
