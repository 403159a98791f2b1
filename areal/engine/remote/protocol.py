"""What an adapter of a stock inference server must say: its routes, its words, its answers.

An adapter knows one kind of server and keeps no state. `HttpEngine` does everything that is the
same for all of them: which server, when to interrupt, what version a token has.
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


NO_TOP_K = GenerationHyperparameters().top_k  # the default: as good as none


class ServerProtocol(ABC):
    kind: str  # what errors call such a server

    @abstractmethod
    def generation(self, request: ModelRequest) -> HttpRequest:
        """The call that generates. ValueError for what this server cannot honour, by its name."""

    @abstractmethod
    def read(self, answer: dict[str, Any]) -> HttpGenerationResult:
        """What came back. Any of ValueError, KeyError, TypeError, IndexError: it is no answer."""

    @abstractmethod
    def pause(self, control: ControlClient) -> None:
        """Hold running requests where they are; hold new ones too."""

    @abstractmethod
    def resume(self, control: ControlClient) -> None: ...

    @abstractmethod
    def interrupt(self, control: ControlClient) -> None:
        """End what runs: it answers "abort" with the tokens it has. Hold what comes later."""

    @abstractmethod
    def load_weights(self, control: ControlClient, folder: Path, version: int) -> None:
        """Replace the weights by those of a Hugging Face folder and forget what the old ones
        computed. Called between `interrupt` and `resume`."""

    def group_routes(self, model_path: Path) -> GroupRoutes | None:
        """How its workers take part in a broadcast of weights; None when they cannot."""
        return None

    def wants_lm_head(self, model_path: Path) -> bool:
        """Whether folders of weights must hold a head, also where it is the embedding."""
        return False

    def served_version(self, control: ControlClient) -> int | None:
        """What the server itself remembers of `load_weights`; None when it keeps no such note."""
        return None

    @abstractmethod
    def load_adapter(self, control: ControlClient, name: str, folder: str) -> None:
        """Make the LoRA adapter of a PEFT folder known as `name`."""

    @abstractmethod
    def unload_adapter(self, control: ControlClient, name: str) -> None: ...

    @abstractmethod
    def stats(self, control: ControlClient) -> dict[str, float]:
        """Counters and gauges, by the names the native server has for them."""


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
