"""The CUDA device as launch plans see it, and the overlap of consecutive kernels on it.

A plan (block shapes, warps, stages, splits) is a pure function of the shapes, the dtype and a
`Device`: every process of a run that has the same device launches the same kernels, and so computes
the same bits. Nothing is timed at run time. The rules beside the kernels fill the multiprocessors;
`benchmark/small_kernels.py` and `benchmark/attention_kernels.py` time them against other plans.

With `OVERLAP` a kernel may start while the previous one still runs (programmatic dependent launch,
Hopper and later). Every such kernel is launched with `overlapping(OVERLAP)` and calls
`await_previous` before it accesses anything but weights and what no kernel of a forward writes
(slots, lengths). The next kernel may start only after that: so the kernel before the previous one
has always ended, and any kernel but the previous one may write these. A forward starts with
ordinary launches (embedding), so a weight update, or the step before, always ends first.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

OVERLAP = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
_RESERVED_BYTES = 1024  # of shared memory, per program
_REGISTERS = 65536  # of a multiprocessor, on every device since 2012


@dataclass(frozen=True, slots=True)
class Device:
    num_processors: int  # multiprocessors
    shared_bytes: int  # shared memory of a multiprocessor
    max_warps: int  # that a multiprocessor holds

    @property
    def program_bytes(self) -> int:
        """Most shared memory of one program."""
        return self.shared_bytes - _RESERVED_BYTES

    def resident(self, num_warps: int, registers: int) -> int:
        """Programs of so many registers per thread that all multiprocessors hold at once."""
        by_registers = _REGISTERS // (32 * num_warps * registers)
        return self.num_processors * max(1, min(self.max_warps // num_warps, by_registers))

    def stages(self, fixed_bytes: int, stage_bytes: int, most: int) -> int:
        """Tiles in flight, at most `most`, that fit beside `fixed_bytes`; at least 1."""
        return max(1, min(most, (self.program_bytes - fixed_bytes) // stage_bytes))


# Plans in Triton's interpreter, which has no device, are those of an H100 or H200.
HOPPER = Device(num_processors=132, shared_bytes=228 * 1024, max_warps=64)


@functools.cache
def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return HOPPER
    properties = torch.cuda.get_device_properties(device)
    return Device(
        num_processors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_multiprocessor,
        max_warps=properties.max_threads_per_multi_processor // properties.warp_size,
    )


def overlapping(overlap: bool) -> dict[str, bool]:
    """Launch options of a kernel that calls `await_previous`."""
    return {"OVERLAP": overlap, "launch_pdl": overlap}


@triton.jit
def await_previous(OVERLAP: tl.constexpr):
    """Wait until the previous kernel has ended, then let the next one start."""
    if OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
