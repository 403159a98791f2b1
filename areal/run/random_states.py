"""The random generators of the process, which code of users may draw from: part of a recover point.

The trainers themselves draw nothing from them: order of rows, sampling and initial weights are
functions of the seed.
"""

from __future__ import annotations

import base64
import random
from typing import Any, cast

import numpy as np
import torch


class RandomStates:
    """Python's, numpy's and torch's, as JSON values."""

    def state_dict(self) -> dict[str, Any]:
        # A dict only with legacy=False.
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
        # A run may go on with another number of devices.
        for device, text in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(_decode(text), device)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
