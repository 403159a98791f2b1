"""Colocation: which models are on a device, and when.

Training and generation alternate on one device:

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

Models with `offload: true` also make room for each other:

    room = ModelRoom(offloaded={"ref"}, hosts={"actor": "controller", "ref": "controller"})
    actor, ref = room.resident("actor", actor), room.resident("ref", ref)
    ref.forward_batch(batch)     # onloads ref
    actor.train_batch(batch, ..) # offloads ref, whose host it shares
    room.clear()                 # offloads those of all hosts, while the loop waits for episodes
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, cast

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


# Calls that need no weights.
_WEIGHTLESS = frozenset(
    ("initialize", "destroy", "connect_engine", "connected_engine", "set_version", "get_version")
    + ("step_lr_scheduler", "train", "eval", "export_stats", "rollout_batch", "prepare_batch")
    + ("start_profile", "save_profile", "data_parallel_rank", "is_data_parallel_head")
)


class ModelRoom:
    """Models of one host that are used one after the other. Those of `offloaded` roles are on their
    device from a use to the next use of another model of the host."""

    def __init__(self, offloaded: Collection[str], hosts: Mapping[str, str]) -> None:
        self._offloaded = frozenset(offloaded)
        self._hosts = hosts
        self._present: dict[str, TrainEngine] = {}  # of offloaded roles

    def resident(self, role: str, engine: TrainEngine) -> TrainEngine:
        """The engine, which has just been initialized, as the trainer uses it."""
        if not self._offloaded:
            return engine
        if role in self._offloaded:
            engine.offload()
        return cast(TrainEngine, _Resident(self, role, engine))

    def enter(self, role: str, engine: TrainEngine) -> None:
        """Before each use."""
        host = self._hosts[role]
        for other in [name for name in self._present if self._hosts[name] == host]:
            if other != role:
                self.leave(other)
        if role in self._offloaded and role not in self._present:
            with phase("onload", "comm"):
                engine.onload()
            self._present[role] = engine

    def leave(self, role: str) -> None:
        engine = self._present.pop(role, None)
        if engine is not None:
            with phase("offload", "comm"):
                engine.offload()

    def clear(self) -> None:
        for role in list(self._present):
            self.leave(role)

    def keeps(self, role: str) -> bool:
        """Whether the model stays on its device between uses."""
        return role not in self._offloaded


class _Resident:
    """A TrainEngine that enters the room before each call that needs its weights."""

    def __init__(self, room: ModelRoom, role: str, engine: TrainEngine) -> None:
        self._room = room
        self._role = role
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        if name in _WEIGHTLESS or name.startswith("_"):
            return getattr(self._engine, name)
        found: Callable[..., Any] = getattr(self._engine, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._room.enter(self._role, self._engine)
            return found(*args, **kwargs)

        return call

    def offload(self) -> None:
        """For generation on the same device."""
        if self._room.keeps(self._role):
            self._engine.offload()
        else:
            self._room.leave(self._role)

    def onload(self) -> None:
        """No-op for a model that its next use onloads."""
        if self._room.keeps(self._role):
            self._engine.onload()
