"""Training and generation take turns on a device that both need whole.

    turns = Turns(models)        # the models on the device: they make room for a server to start
    turns.connect(server)
    turns.to_training()          # the server's weights and cache leave, then the models come
    turns.to_generation()        # weights and optimizers of the models leave, then the server comes

| turn       | on the device       | in the memory of the host                                     |
|------------|---------------------|---------------------------------------------------------------|
| generation | the server          | the models with their optimizers                              |
| training   | the models          | the server's weights; its requests, with their tokens so far  |

Who has the turn keeps it until the other is called for. The device never holds both, so new weights
reach a server that is away: they go into its copy on the host, and to the device with it. Without
models nobody shares a device, and a turn costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from areal.api.engine_api import InferenceEngine, TrainEngine
from areal.utils.perf_tracer import phase


class Turns:
    _server: InferenceEngine  # from `connect` on

    def __init__(self, models: Sequence[TrainEngine]) -> None:
        self._models = models
        self._turn: Literal["generation", "training"] = "generation"
        for model in models:
            model.offload()

    def connect(self, server: InferenceEngine) -> None:
        """`server` has just come up: the turn is its own."""
        self._server = server

    def to_training(self) -> None:
        if not self._models or self._turn == "training":
            return
        with phase("to_training", "comm"):
            self._server.offload()
            for model in self._models:
                model.onload()
        self._turn = "training"

    def to_generation(self) -> None:
        if not self._models or self._turn == "generation":
            return
        with phase("to_generation", "comm"):
            for model in self._models:
                model.offload()
            self._server.onload()
        self._turn = "generation"
