"""Compute devices of this process, and how its CPU multiplies matrices and keeps memory.

On ARM, torch runs float32 products through oneDNN, which spends ~0.4 ms preparing each call: a
64 x 64 layer on 512 rows takes 0.46 ms instead of 0.13, and no measured size (up to 2048 x 1536 x
1536) is faster that way. Plain BLAS also gives a row the same bits for any number of rows above
one, which the native engine's batch invariance relies on.

On x86, MKL does so with AVX-512. With AVX2 alone its kernels depend on the number of rows, unless
strict reproducibility is requested, at no measurable cost with either.
"""

from __future__ import annotations

import ctypes
import os
import sys
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


class Platform:
    """What this process computes on: CUDA if there is a GPU, else the CPU. See `current_platform`.

    Calls about a device's queue and memory do nothing on the CPU, which has neither.
    """

    @property
    def device_type(self) -> str:
        """As torch names it: cuda or cpu."""
        return best_device()

    @property
    def communication_backend(self) -> str:
        """Of `torch.distributed`, for tensors on the device."""
        return "nccl" if self.device_type == "cuda" else "gloo"

    @property
    def device_control_env_var(self) -> str:
        """The variable that chooses the devices a process sees; empty on the CPU."""
        return "CUDA_VISIBLE_DEVICES" if self.device_type == "cuda" else ""

    def device_count(self) -> int:
        return torch.cuda.device_count() if self.device_type == "cuda" else 1

    def current_device(self) -> torch.device:
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def set_device(self, index: int) -> None:
        if self.device_type == "cuda":
            torch.cuda.set_device(index)

    def synchronize(self) -> None:
        if self.device_type == "cuda":
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        if self.device_type == "cuda":
            torch.cuda.empty_cache()

    def memory_allocated(self) -> int:
        """Bytes of tensors on the device; 0 on the CPU."""
        return torch.cuda.memory_allocated() if self.device_type == "cuda" else 0


current_platform = Platform()


# BLAS kernels treat a few leftover rows differently (one row is a matrix-vector product). With
# whole tiles of rows a row's bits do not depend on how many rows there are.
CPU_TILE = 16


def whole_tiles(num_rows: int) -> int:
    """The next multiple of `CPU_TILE`."""
    return -(-num_rows // CPU_TILE) * CPU_TILE


def use_plain_blas() -> None:
    """Disable oneDNN for the whole process. Flags are global: call it before threads compute and
    before the process's first product, when MKL reads its variable."""
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    if not torch.backends.mkl.is_available():  # with MKL (x86) torch does not use oneDNN here
        torch.backends.mkldnn.set_flags(False)


# Of glibc's malloc.h. A block of 32 MB or more is always mapped by itself.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_HEAP_BLOCK = 32 << 20
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Let malloc keep up to a gigabyte of freed memory for the next tensors (glibc only).

    By default glibc hands large blocks back to the kernel when they are freed, and most operators
    then pay a page fault for each 4 KiB of their result: a tenth of a training step of the demo.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TOP_PAD, _LARGEST_HEAP_BLOCK)
