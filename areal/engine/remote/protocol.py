"""What one kind of inference server can do, and how it is told to.

A `ServerProtocol` knows the routes of one kind of server and keeps no state between calls;
native.py, vllm.py and sglang.py implement it. What is common to all is elsewhere: which server gets
a request and what happens when it fails (client.py), which servers there are (server_pool.py), when
weights are loaded (engine.py).

    drafts of one exchange --> protocol.generate --> (rid, Result) ..., in any order
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from areal.api.io_struct import (
    ModelRequest,
    ModelResponse,
    Sample,
    StopReason,
    WeightUpdateMeta,
)
from areal.engine.native.frames import Result, Runs, versions_of
from areal.engine.remote.server_control import BadReplyError

if TYPE_CHECKING:
    import aiohttp
    import numpy as np
    import torch

    from areal.api.config.inference import GenerationHyperparameters
    from areal.engine.remote.server_control import ControlClient
    from areal.weight_sync.bucket import Checksums
    from areal.weight_sync.collective import GroupPlace

WeightOrder = dict[str, Any]  # loads one version of the weights into a server, also later

# What the client got since the last time, each with the rid of its request: tokens that the draft
# does not have yet. Those that come together are one item.
Results = AsyncGenerator[Iterable[tuple[str, Result | Exception]], None]


@dataclass(slots=True, eq=False)
class Draft:
    """One request and its output so far."""

    request: ModelRequest
    budget: int  # most output tokens
    group: str = ""  # shared by samples of one request
    seed: int | None = None  # of this sample of a group
    tokens: np.ndarray = field(default_factory=lambda: _NONE)
    logprobs: np.ndarray = field(default_factory=lambda: _NONE)
    runs: Runs = field(default_factory=list)
    num_sent: int = 0  # leading tokens that the current server was sent
    stop_reason: StopReason | None = None
    ttft: float = 0.0
    cached_tokens: int = 0
    routed_experts: np.ndarray | None = None

    def add(self, result: Result) -> None:
        if len(self.tokens):
            self.tokens = np.concatenate([self.tokens, result.tokens])
            self.logprobs = np.concatenate([self.logprobs, result.logprobs])
        else:
            self.tokens, self.logprobs = result.tokens, result.logprobs
        self.runs = self.runs + result.runs
        self.stop_reason, self.ttft = result.stop_reason, result.ttft
        self.routed_experts = result.routed_experts
        # Of a continuation the prompt has tokens of the output.
        self.cached_tokens = min(result.cached_tokens, len(self.request.input_ids))
        if result.stop_reason == "abort" and len(self.tokens) == self.budget:
            self.stop_reason = "length"

    def tell(self, result: Result) -> None:
        if self.request.on_tokens is not None and len(result.tokens):
            self.request.on_tokens(result.tokens.tolist(), result.logprobs.tolist())

    def start_over(self) -> None:
        self.tokens = self.logprobs = _NONE
        self.runs = []

    @property
    def gconfig(self) -> GenerationHyperparameters:
        gconfig = self.request.gconfig
        return gconfig.with_seed(self.seed) if self.group else gconfig

    @property
    def versions(self) -> np.ndarray:
        """[T] int32"""
        return versions_of(self.runs)

    @property
    def last_own_version(self) -> int:
        """Of the newest token from the current server; 0 if there is none."""
        return self.runs[-1][0] if len(self.tokens) > self.num_sent else 0

    def sample(self) -> Sample:
        assert self.stop_reason is not None, "the request has not ended"
        output = self.tokens, self.logprobs, self.versions
        return Sample(*output, self.stop_reason, self.routed_experts)

    def response(self, *, latency: float) -> ModelResponse:
        assert self.stop_reason is not None, "the request has not ended"
        return ModelResponse(
            input_tokens=self.request.input_ids,
            output_tokens=self.tokens.tolist(),
            output_logprobs=self.logprobs.tolist(),
            output_versions=self.versions.tolist(),
            stop_reason=self.stop_reason,
            tokenizer=self.request.tokenizer,
            processor=self.request.processor,
            latency=latency,
            ttft=self.ttft,
            cached_tokens=self.cached_tokens,
            routed_experts=self.routed_experts,
        )


DraftsByRid = Mapping[str, Draft]


_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class NamedBucket:
    """Weights that are broadcast one by one, in this order."""

    group: str
    tensors: Mapping[str, torch.Tensor]
    version: int
    is_last: bool  # of its version


class ServerProtocol(ABC):
    kind: str  # the server's name in error messages
    batches: bool = False  # requests sent together share one exchange
    # Replies carry the version of each token, and running requests survive an update. Otherwise the
    # client counts versions, and interrupts requests before it loads weights.
    versions_tokens: bool = False
    weight_types: Sequence[str]  # of WeightUpdateMeta
    offloads: bool = False
    wants_names: bool = False  # of the weights of each bucket (`xccl`), before it is sent

    @abstractmethod
    def check_request(self, request: ModelRequest) -> None:
        """ValueError names an option this server lacks."""

    @abstractmethod
    def generate(
        self, session: aiohttp.ClientSession, address: str, drafts: DraftsByRid, version: int
    ) -> Results:
        """One HTTP exchange for all `drafts`, one unless `batches`.

        Yields results and, for single requests, errors: ValueError if the server refuses one,
        BadReplyError for a malformed reply, ServerError if another server may do better. Raises the
        same for all of them, or the error of a lost connection. `version` is that of the live
        weights where the client counts it.

        With `on_tokens` of a draft's request its tokens are yielded as the server samples them.
        Leaving an exchange frees its requests.
        """

    async def abort(self, session: aiohttp.ClientSession, address: str, rid: str) -> None:
        """Free one request of an exchange that goes on for others. Needed if it `batches`."""
        raise NotImplementedError(f"a {self.kind} has one request per exchange")

    @abstractmethod
    def pause(self, control: ControlClient) -> None:
        """Suspend in-flight requests; hold new ones too."""

    @abstractmethod
    def resume(self, control: ControlClient) -> None: ...

    def interrupt(self, control: ControlClient) -> None:
        """Abort in-flight requests, which return "abort" and their tokens. Hold new ones."""
        raise NotImplementedError(f"a {self.kind} loads weights while requests run")

    @abstractmethod
    def weight_order(self, meta: WeightUpdateMeta) -> WeightOrder:
        """For published weights, which are verified here unless the server does that."""

    @abstractmethod
    def load_weights(self, control: ControlClient, order: WeightOrder) -> None:
        """Returns when they are live. Unless `versions_tokens`, called between `interrupt` and
        `resume`."""

    def load_delta(self, control: ControlClient, meta: WeightUpdateMeta) -> bool:
        """False if the server lacks the version that the delta changes."""
        raise NotImplementedError(f"a {self.kind} takes no delta")

    def group_devices(self, control: ControlClient) -> list[str]:
        """`device_identity` of each worker that will join a process group (`xccl`)."""
        raise NotImplementedError(f"a {self.kind} joins no process group")

    def join_group(self, control: ControlClient, place: GroupPlace) -> None:
        """Returns when all members have joined. `place` is that of its first worker; the others
        have the following ranks."""
        raise NotImplementedError(f"a {self.kind} joins no process group")

    def receive(self, control: ControlClient, group: str, meta: WeightUpdateMeta) -> None:
        """Receive `meta.version` through the group of this name; returns when it is live."""
        raise NotImplementedError(f"a {self.kind} joins no process group")

    def receive_bucket(self, control: ControlClient, bucket: NamedBucket) -> None:
        """As `receive`, for servers that want names: one bucket, live when this returns."""
        raise NotImplementedError(f"a {self.kind} joins no process group")

    def served_version(self, control: ControlClient) -> int | None:
        """The version that the server reports; None if it records none."""
        return None

    def served_model(self, control: ControlClient) -> str | None:
        """The model folder that the server reports; None if it reports none."""
        return None

    def identify(self, control: ControlClient) -> str:
        """The model that a server was started with. ServerError, or an error of reading its reply,
        if it is of another kind or lacks an option that a run needs."""
        raise NotImplementedError(f"a {self.kind} cannot be attached to")

    def load_adapter(self, control: ControlClient, name: str, folder: str) -> list[str]:
        """Register the LoRA adapter of a PEFT folder as `name`. Returns the names of all that the
        server now has, as far as it tells."""
        raise NotImplementedError(f"a {self.kind} has no adapters")

    def unload_adapter(self, control: ControlClient, name: str) -> None:
        raise NotImplementedError(f"a {self.kind} has no adapters")

    def score(self, control: ControlClient, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probabilities, one per token of each sequence."""
        raise NotImplementedError(f"a {self.kind} cannot score given tokens")

    def weight_checksums(self, control: ControlClient) -> Checksums:
        """Of the live weights."""
        raise NotImplementedError(f"a {self.kind} does not show its weights")

    def probe(self, control: ControlClient, version: int | None) -> list[tuple[int, float]]:
        """Some tokens and their log-probabilities, which depend on the weights alone. `version` is
        that of the live weights, if the server records it."""
        raise NotImplementedError(f"a {self.kind} cannot be compared with another")

    def layer_trace(self, control: ControlClient, tokens: list[int]) -> dict[str, Any]:
        """What each layer computes for `tokens` (models/common/layer_trace.py)."""
        raise NotImplementedError(f"a {self.kind} does not show its layers")

    def offload(self, control: ControlClient, tags: Sequence[str] | None) -> None:
        raise NotImplementedError(f"a {self.kind} cannot leave its device")

    def onload(self, control: ControlClient, tags: Sequence[str] | None) -> None:
        raise NotImplementedError(f"a {self.kind} cannot leave its device")

    @abstractmethod
    def stats(self, control: ControlClient) -> dict[str, float]:
        """Counters and gauges under the native server's names."""

    def busy_intervals(
        self, control: ControlClient, since: float
    ) -> list[tuple[float, float]] | None:
        """When it computed after `since` (`time.time()`); None if it does not report that."""
        return None


def bad_reply(kind: str, address: str, fault: object) -> BadReplyError:
    return BadReplyError(f"{kind} {address}: malformed reply: {fault}")
