"""The profile of this machine's device: what takes seconds to measure, the rest from a known one.

Measured are memory, matrix rate and bandwidth. What areal reaches of them, and latencies, are taken
from the profile of the same kind: h200 for GPUs, cpu for CPUs. The one file here that loads torch.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from areal.planner.devices import GIB, load_device, profile_text
from areal.utils.device import best_device, use_plain_blas

_REPEATS = 5


def measure_profile() -> str:
    """The JSON of a profile."""
    kind = best_device()
    base = load_device("h200" if kind == "cuda" else "cpu")
    measured = _measure_gpu() if kind == "cuda" else _measure_cpu()
    name = torch.cuda.get_device_name() if kind == "cuda" else _cpu_name()
    device = replace(base, name=name, **measured)
    sources = dict.fromkeys(measured, "measured: areal plan --measure")
    return profile_text(device, sources | {"": f"taken from {base.name}"})


def _measure_gpu() -> dict[str, float]:
    total = torch.cuda.get_device_properties(0).total_memory
    numbers = {
        "memory_gib": total / GIB,
        "matrix_tflops": _matrix_rate(8192, torch.bfloat16) / 1e12,
        "bandwidth_tbs": _copy_rate(1 << 28) / 1e12,
        "per_machine": torch.cuda.device_count(),
    }
    if torch.cuda.get_device_capability() < (8, 9):
        numbers |= {"matrix_fp8_tflops": 0.0, "fp8_matrix_share": 0.0}
    return numbers


def _measure_cpu() -> dict[str, float]:
    use_plain_blas()
    return {
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        "matrix_tflops": _matrix_rate(768, torch.float32) / 1e12,
        "bandwidth_tbs": _copy_rate(1 << 24) / 1e12,
    }


def _cpu_name() -> str:
    return f"CPU, {platform.machine()}, {os.cpu_count()} cores"


def _matrix_rate(size: int, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=best_device()).to(dtype) for _ in range(2))
    return 2 * size**3 / _shortest_s(lambda: a @ b)


def _copy_rate(count: int) -> float:
    """Bytes read and written."""
    source = torch.ones(count, device=best_device())
    target = torch.empty_like(source)
    return 2 * source.nbytes / _shortest_s(lambda: target.copy_(source))


def _shortest_s(work: Callable[[], object]) -> float:
    """Of some, after one that warms up: what else runs can only make it longer."""
    times = []
    for _ in range(1 + _REPEATS):
        _synchronize()
        start = time.perf_counter()
        work()
        _synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
