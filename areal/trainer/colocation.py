"""Colocation: training and generation alternate on one device.

    device = TimeSharedDevice(models)  # offloads the models, so that a server can start
    device.connect(server)
    device.to_training()               # offload the server's weights and cache, onload the models
    device.to_generation()             # offload models and optimizers, onload the server

| phase      | on the device       | in host memory                                                |
|------------|---------------------|---------------------------------------------------------------|
| generation | the server          | the models with their optimizers                              |
| training   | the models          | the server's weights; its requests, with their tokens so far  |

The device never holds both. New weights reach an offloaded server: they update its host copy, which
is onloaded later. No-op without models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from areal.api.engine_api import InferenceEngine, TrainEngine
from areal.utils.perf_tracer import phase


class TimeSharedDevice:
    _server: InferenceEngine  # from `connect` on

    def __init__(self, models: Sequence[TrainEngine]) -> None:
        self._models = models
        self._phase: Literal["generation", "training"] = "generation"
        for model in models:
            model.offload()

    def connect(self, server: InferenceEngine) -> None:
        """`server` has just started, so the phase is generation."""
        self._server = server

    def to_training(self) -> None:
        if not self._models or self._phase == "training":
            return
        with phase("to_training", "comm"):
            self._server.offload()
            for model in self._models:
                model.onload()
        self._phase = "training"

    def to_generation(self) -> None:
        if not self._models or self._phase == "generation":
            return
        with phase("to_generation", "comm"):
            for model in self._models:
                model.offload()
            self._server.onload()
        self._phase = "generation"
