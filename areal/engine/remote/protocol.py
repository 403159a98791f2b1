"""What an adapter of a stock inference server implements: routes, requests, replies.

An adapter knows one kind of server and keeps no state. `HttpEngine` does everything that is common
to all: which server, when to interrupt, which version a token has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from areal.api.config.inference import GenerationHyperparameters

if TYPE_CHECKING:
    from pathlib import Path

    from areal.api.io_struct import HttpGenerationResult, HttpRequest, ModelRequest
    from areal.engine.remote.collective_sender import GroupRoutes
    from areal.engine.remote.server_control import ControlClient


NO_TOP_K = GenerationHyperparameters().top_k  # the default, which means no limit


class ServerProtocol(ABC):
    kind: str  # the server's name in error messages

    @abstractmethod
    def generation(self, request: ModelRequest) -> HttpRequest:
        """The HTTP request that generates. ValueError names an option this server lacks."""

    @abstractmethod
    def read(self, answer: dict[str, Any]) -> HttpGenerationResult:
        """The parsed reply. ValueError, KeyError, TypeError or IndexError: a malformed reply."""

    @abstractmethod
    def pause(self, control: ControlClient) -> None:
        """Suspend in-flight requests; hold new ones too."""

    @abstractmethod
    def resume(self, control: ControlClient) -> None: ...

    @abstractmethod
    def interrupt(self, control: ControlClient) -> None:
        """Abort in-flight requests, which return "abort" and their tokens. Hold new ones."""

    @abstractmethod
    def load_weights(self, control: ControlClient, folder: Path, version: int) -> None:
        """Replace the weights by those of a Hugging Face folder and clear caches. Called between
        `interrupt` and `resume`."""

    def group_routes(self, model_path: Path) -> GroupRoutes | None:
        """Routes for a broadcast of weights to its workers; None if unsupported."""
        return None

    def wants_lm_head(self, model_path: Path) -> bool:
        """Whether weight folders must hold a head even if it is tied to the embedding."""
        return False

    def served_version(self, control: ControlClient) -> int | None:
        """The version that the server recorded in `load_weights`; None if it records none."""
        return None

    @abstractmethod
    def load_adapter(self, control: ControlClient, name: str, folder: str) -> None:
        """Register the LoRA adapter of a PEFT folder as `name`."""

    @abstractmethod
    def unload_adapter(self, control: ControlClient, name: str) -> None: ...

    @abstractmethod
    def stats(self, control: ControlClient) -> dict[str, float]:
        """Counters and gauges under the native server's names."""


def refuse_images(request: ModelRequest, kind: str) -> None:
    if request.image_data or request.vision_msg_vllm:
        name = "image_data" if request.image_data else "vision_msg_vllm"
        raise ValueError(f"{name}: this adapter of a {kind} sends text only; remove the images")


def read_metrics(text: str, names: dict[str, str]) -> dict[str, float]:
    """{our name: sum over all labels} of a Prometheus page; `names` maps theirs to ours."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        series, _, value = line.rpartition(" ")
        ours = names.get(series.partition("{")[0])
        if ours is not None:
            found[ours] = found.get(ours, 0.0) + float(value)
    return found
