"""What do the bits of a training step depend on besides config, weights and data?

`numeric_environment`: versions, device, thread count. `RandomStates`: the process-wide random
generators, part of a recover point because user code may draw from them. The trainers do not: row
order, sampling and initial weights are functions of the seed.
"""

from __future__ import annotations

import base64
import random
from typing import Any, cast

import numpy as np
import torch

from areal import __version__


def numeric_environment() -> dict[str, Any]:
    """JSON values by name. Thread count and CPU ISA change float summation order."""
    on_gpu = torch.cuda.is_available()
    return {
        "areal": __version__,
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


class RandomStates:
    """Generator states of Python, numpy and torch, as JSON values."""

    def state_dict(self) -> dict[str, Any]:
        # It is a tuple: a dict only with legacy=False.
        kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
        return {
            "python": random.getstate(),
            "numpy": [kind, keys.tolist(), *rest],
            "torch": _encode(torch.get_rng_state()),
            "cuda": [_encode(state) for state in torch.cuda.get_rng_state_all()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(_decode(state["torch"]))
        # A run may resume with another number of devices.
        for device, text in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(_decode(text), device)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
