"""What this process may compute on.

Choose the CPU library for matrix products, once per process.

On ARM, torch sends float32 products through oneDNN, which spends ~0.4 ms preparing each call: a
64 x 64 layer on 512 rows takes 0.46 ms instead of 0.13, and no size measured (up to 2048 x 1536 x
1536) is faster that way. Plain BLAS also gives a row the same bits for any number of rows above
one, which the native engine's batch invariance builds on.

On x86, MKL does so with AVX-512. With AVX2 alone its kernels follow the number of rows, unless it
is told to be strictly reproducible; that costs nothing measurable with either.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

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


def use_plain_blas() -> None:
    """Turn oneDNN off for the whole process. Flags are global: call it before threads compute, and
    before the first product of the process, when MKL reads its variable."""
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    if not torch.backends.mkl.is_available():  # with MKL (x86) torch does not take oneDNN here
        torch.backends.mkldnn.set_flags(False)
