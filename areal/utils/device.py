"""Compute devices of this process, and its CPU library for matrix products.

On ARM, torch runs float32 products through oneDNN, which spends ~0.4 ms preparing each call: a
64 x 64 layer on 512 rows takes 0.46 ms instead of 0.13, and no measured size (up to 2048 x 1536 x
1536) is faster that way. Plain BLAS also gives a row the same bits for any number of rows above
one, which the native engine's batch invariance relies on.

On x86, MKL does so with AVX-512. With AVX2 alone its kernels depend on the number of rows, unless
strict reproducibility is requested, at no measurable cost with either.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import torch


def best_device() -> str:
    """The GPU if there is one, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_identity(device: torch.device) -> str:
    """Identity of the GPU, equal in every process and on every machine; "cpu" for the CPU."""
    import torch

    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def num_cores() -> int:
    """CPU cores this process may use; a container may have fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_plain_blas() -> None:
    """Disable oneDNN for the whole process. Flags are global: call it before threads compute and
    before the process's first product, when MKL reads its variable."""
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    if not torch.backends.mkl.is_available():  # with MKL (x86) torch does not use oneDNN here
        torch.backends.mkldnn.set_flags(False)
