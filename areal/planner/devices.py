"""Profiles of devices: what one does at best, and which share of it areal reaches.

A profile is a JSON file, `areal/planner/devices/NAME.json` or any path: for each key a value and
its source, which is `measured ...`, `data sheet ...`, `fitted ...` or `taken from ...`. The keys
are the fields of `Device`. `areal plan --measure` writes one for the machine it runs on.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from areal.utils.model_files import read_json

FOLDER = Path(__file__).parent / "devices"
_DRIVER = Path("/proc/driver/nvidia/gpus")
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or the CPU of a machine. Shares are of the numbers above them."""

    name: str
    kind: str  # cuda or cpu
    memory_gib: float  # that programs can allocate
    matrix_tflops: float  # products in bfloat16; in float32 on a CPU
    matrix_fp8_tflops: float = 0.0  # 0: it has none
    matrix_float32_tflops: float = 0.0  # of a GPU; 0: as matrix_tflops
    bandwidth_tbs: float  # of a copy, reads and writes counted
    link_gbs: float  # to another device of the machine, one direction
    network_gbs: float  # to another machine, per device
    host_gbs: float  # to host memory
    per_machine: float  # devices of one machine
    # What areal reaches.
    matrix_share: float  # training, prefill and decoding of many rows
    read_share: float  # decoding: the bandwidth at which weights and cache are read
    shared_share: float  # of read_share, where samples read their prompt together
    fp8_matrix_share: float = 0.0
    expert_share: float = 1.0  # of matrix_share, by products grouped by expert in training
    attention_tflops: float  # of long sequences, forward and backward
    attention_half_length: float  # tokens of a sequence at half of that rate
    traffic_compiled: float  # passes over the kept activations, in a step of compiled blocks
    traffic_eager: float  # the same, not compiled
    layer_us_few: float  # decoding up to 8 rows: latency of a layer's kernels
    layer_us_many: float  # decoding more rows
    layer_us_expert: float = 0.0  # what experts add to either
    layer_us_fp8: float = 0.0  # what FP8 adds to either
    layer_us_torch: float = 0.0  # decoding without kernels of our own: all of a layer
    row_us: float = 0.0  # decoding: host time of a row and step
    recurrent_tflops: float = 0.0  # training: the gated delta rule; 0: as products
    train_op_us: float = 0.0  # training: host time of an operation, while the GPU computes
    selective_op_us: float = 0.0  # the same, where checkpointing decides what it keeps
    train_layer_us: float = 0.0  # training: host time of a layer and micro-batch
    train_row_us: float = 0.0  # training: host time of a sequence
    sample_us: float = 0.0  # controller and reward: host time of a sample
    # Speeds while training and generation run at the same time: on one GPU, or on the cores of one
    # CPU, of their speeds alone.
    training_beside: float
    generation_beside: float
    update_ms: float  # generation stands still for new weights
    library_gib: float  # workspaces of libraries, inside the allocator
    context_gib: float  # of the driver, outside of it

    @property
    def memory_bytes(self) -> float:
        return (self.memory_gib - self.context_gib) * GIB

    @property
    def flops(self) -> float:
        return self.matrix_tflops * 1e12 * self.matrix_share

    @property
    def bandwidth(self) -> float:
        return self.bandwidth_tbs * 1e12

    def link(self, num_devices: int) -> float:
        """Bytes per second of a collective of neighbouring devices, of each of them."""
        rate = self.link_gbs if num_devices <= self.per_machine else self.network_gbs
        return rate * 1e9


_NUMBERS = [field.name for field in fields(Device) if field.name not in ("name", "kind")]
_REQUIRED = {f.name for f in fields(Device) if f.default is MISSING}


def known_devices() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def load_device(name: str) -> Device:
    """A profile by name, or by the path of its file."""
    file = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    if not file.is_file():
        raise ValueError(
            f"--device: no profile {name!r}; known are {', '.join(known_devices())}, or give the "
            "path of a .json file that `areal plan --measure` wrote"
        )
    return _parse(file, read_json(file))


def _parse(file: Path, content: dict[str, Any]) -> Device:
    values = content.get("values")
    if not isinstance(values, dict):
        raise ValueError(f"{file}: expected an object `values`, found {values!r:.40}")
    unknown = sorted(set(values) - set(_NUMBERS))
    missing = sorted((_REQUIRED - {"name", "kind"}) - set(values))
    if unknown or missing:
        what = f"unknown key {unknown[0]!r}" if unknown else f"no value for {missing[0]!r}"
        raise ValueError(f"{file}: {what}; a profile has {', '.join(_NUMBERS)}")
    numbers = {key: _number(file, key, entry) for key, entry in values.items()}
    kind, name = content.get("kind"), content.get("name")
    if kind not in ("cuda", "cpu") or not isinstance(name, str):
        raise ValueError(f"{file}: kind must be cuda or cpu and name a text, found {kind!r:.40}")
    if numbers["memory_gib"] <= numbers["context_gib"]:
        raise ValueError(f"{file}: memory_gib must be more than context_gib")
    return Device(name=name, kind=kind, **numbers)


_MAY_BE_ZERO = {f.name for f in fields(Device) if f.default == 0.0} | {
    *("attention_half_length", "traffic_compiled", "traffic_eager", "layer_us_few"),
    *("layer_us_many", "update_ms", "library_gib", "context_gib"),
}


def _number(file: Path, key: str, entry: Any) -> float:
    if not isinstance(entry, dict) or not isinstance(entry.get("source"), str):
        raise ValueError(
            f"{file}: {key} must be an object with value and source, found {entry!r:.60}"
        )
    value = entry.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{file}: {key} must have a number as value, found {value!r:.40}")
    if value < 0 or (value == 0 and key not in _MAY_BE_ZERO):
        raise ValueError(f"{file}: {key} must be above 0, found {value}")
    return float(value)


def profile_text(device: Device, sources: dict[str, str]) -> str:
    """The JSON of a profile; keys without a source of their own were taken from another."""
    values = {
        key: {"value": getattr(device, key), "source": sources.get(key, sources[""])}
        for key in _NUMBERS
    }
    return json.dumps({"name": device.name, "kind": device.kind, "values": values}, indent=1) + "\n"


def find_device(driver: Path = _DRIVER) -> str | None:
    """The profile of this machine's GPUs, by the name that the driver tells; None if unknown."""
    for file in sorted(driver.glob("*/information")):
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        model = next((line for line in text.splitlines() if line.startswith("Model:")), "")
        return next((name for name in known_devices() if name.upper() in model), None)
    return None


def num_gpus(driver: Path = _DRIVER) -> int:
    """GPUs of this machine."""
    return len(list(driver.glob("*/information")))
