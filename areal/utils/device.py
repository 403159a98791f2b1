"""Which device this process computes on."""

from __future__ import annotations


def best_device() -> str:
    """The GPU when there is one, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
