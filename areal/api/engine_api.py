"""Contracts of training and inference engines, and how calls reach engines on several ranks.

Marks on the methods of a contract say how a call is distributed:

    class TrainEngine(ABC):
        @split                      # each data-parallel rank gets its rows of the first argument
        def train_batch(self, input_, ...): ...

        @split(merges_rows=True)    # and the rows of the results are merged in the original order
        def forward_batch(self, input_): ...

        @broadcast                  # the same call on every rank; the result of the first
        def save(self, meta): ...

        @head                       # the first rank only: must not communicate with other ranks
        def get_version(self): ...

An unmarked method is local only. Marks do not change the method, so an engine in this process is
called directly; `infra/train_controller.py` reads the marks for a remote one.

Both contracts are small: what can be derived is written once elsewhere (micro-batching and loss
scaling in `engine/train/base.py`, queues and staleness in `rollout/executor.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from areal.api.io_struct import WeightUpdateMeta

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from areal.api.alloc_mode import ParallelStrategy
    from areal.api.io_struct import FinetuneSpec, ModelRequest, ModelResponse, SaveLoadMeta


Method = TypeVar("Method", bound=Callable[..., Any])

_ATTRIBUTE = "__areal_mark__"


@dataclass(frozen=True, slots=True)
class Mark:
    kind: Literal["split", "broadcast", "head"]
    merges_rows: bool = False  # of split: the result has the rows of the argument


@overload
def split(method: Method) -> Method: ...
@overload
def split(*, merges_rows: bool) -> Callable[[Method], Method]: ...
def split(method: Any = None, *, merges_rows: bool = False) -> Any:
    """Rows of the padded batch in the first argument are balanced by tokens. Groups of
    `rows_per_unit` consecutive rows (a keyword of the method, default 1) stay together; a rank may
    get no rows. Results that are not merged must be equal on every rank."""

    def mark(marked: Method) -> Method:
        return _mark(marked, Mark("split", merges_rows))

    return mark if method is None else mark(method)


def broadcast(method: Method) -> Method:
    return _mark(method, Mark("broadcast"))


def head(method: Method) -> Method:
    return _mark(method, Mark("head"))


def marks_of(contract: type) -> dict[str, Mark]:
    """Method name -> its mark, for every marked method of the class and its bases."""
    names = {name for cls in contract.__mro__ for name in vars(cls)}
    marks = {name: getattr(getattr(contract, name), _ATTRIBUTE, None) for name in names}
    return {name: mark for name, mark in marks.items() if mark is not None}


def _mark(method: Method, mark: Mark) -> Method:
    setattr(method, _ATTRIBUTE, mark)
    return method


class EngineLostError(RuntimeError):
    """The engine is permanently lost: no episode can continue, and the run stops."""


class InferenceEngine(ABC):
    """Token ids in; token ids, log-probabilities and weight versions out.

    Safe to call from one event loop; concurrent `agenerate` calls are the normal load. An engine
    with remote servers pickles without its connections: training ranks send weights through it.
    """

    @abstractmethod
    def initialize(self) -> None:
        """Connect to the server (or build the model). Raises RuntimeError with the cause."""

    @abstractmethod
    def destroy(self) -> None:
        """Undo `initialize`. Idempotent, also without a prior `initialize`."""

    @abstractmethod
    async def agenerate(self, req: ModelRequest) -> ModelResponse: ...

    @abstractmethod
    def pause_generation(self) -> None:
        """Suspend every running request between two steps."""

    @abstractmethod
    def continue_generation(self) -> None: ...

    @abstractmethod
    def update_weights(
        self,
        meta: WeightUpdateMeta,
        named_tensors: Iterator[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        """Load `meta.version` between two steps; running requests continue with it.

        `named_tensors` is set for the types that publish nothing by themselves: `direct`, `xccl`
        and `delta`. A failed verification raises RuntimeError and the old weights keep serving.
        """

    def take_counts(self) -> dict[str, int]:
        """Counts of a copy in another process since the last call, for `add_counts`."""
        return {}

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Add the counts of a copy in another process; no-op for an engine without counters."""
        del counts

    def expect_weights(self, version: int) -> None:
        """Weights of this version are about to be sent, by any sender: from now on replies may
        carry it, and none newer. No-op for an engine that counts versions itself."""
        del version

    @property
    def newest_version(self) -> int | None:
        """The newest version a token can have; None if unknown."""
        return None

    def note_weights(self, meta: WeightUpdateMeta) -> None:
        """These weights are serving, whoever sent them: replacement servers start with them, and
        servers that joined meanwhile get them now. No-op for an engine with a fixed set of
        servers."""
        return None

    @property
    def servers(self) -> list[str]:
        """Addresses of servers that can join and leave; a change invalidates copies of this engine.
        Empty if there are none."""
        return []

    @abstractmethod
    def get_version(self) -> int:
        """Version of the serving weights."""

    def compute_logp(self, data: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities `[B, S]` of the tokens of a padded batch under the serving weights.

        `data` has input_ids and attention_mask. Aligned as `TrainEngine.forward_batch`: at t, log p
        of the token at t + 1; zero at a row's last token and on padding.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot score given tokens")

    def offload(self, tags: Sequence[str] | None = None) -> None:
        """Free the device memory of `tags`: weights, kv_cache; None is both. Requests keep their
        tokens and wait for `onload`."""
        raise NotImplementedError(f"{type(self).__name__} cannot leave its device")

    def onload(self, tags: Sequence[str] | None = None) -> None:
        """Restore what `offload` freed. Requests continue once nothing is missing."""
        raise NotImplementedError(f"{type(self).__name__} cannot leave its device")

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counters and gauges since the start: tokens generated, pages in use, preemptions."""

    @abstractmethod
    def busy_intervals(self, since: float) -> dict[str, list[tuple[float, float]]]:
        """Server -> (start, end) of its work after `since`, in seconds since the epoch."""


class TrainEngine(ABC):
    """One model, its optimizer, and the exact global mean over micro-batches and ranks.

    `input_` is a padded dict `[B, S]`; the engine packs it into micro-batches of a token budget.
    `loss_fn(logprobs_T, entropy_T, mb)` sees one packed micro-batch; `logprobs[t]` is
    log p(input_ids[t+1] | ...), so the last position of each sequence is junk and must be masked.
    `loss_weight_fn(mb)` gives the micro-batch's weight (usually its number of loss tokens).
    Every `rows_per_unit` consecutive rows share a micro-batch and stay neighbours in it.

    A critic's engine has values in place of log-probabilities: `loss_fn(values_T, mb)`, where
    `values[t]` is the value before the token at t + 1.

    The marks above say how a call reaches an engine whose ranks are other processes. Arguments and
    results of such a call must pickle: loss functions are module-level functions, bound methods of
    small objects, or partials of those.
    """

    @broadcast
    @abstractmethod
    def create_process_group(self, parallel_strategy: ParallelStrategy) -> None:
        """Join the ranks of the layout; before `initialize`. No-op for world size 1."""

    @property
    @abstractmethod
    def data_parallel_rank(self) -> int:
        """Ranks with the same number compute the same rows, others compute different rows."""

    @abstractmethod
    def is_data_parallel_head(self) -> bool:
        """Whether this rank reports for all ranks that compute the same rows: loss functions run on
        it, so it has the statistics they record."""

    @broadcast
    @abstractmethod
    def initialize(self, ft_spec: FinetuneSpec | None = None) -> None: ...

    @broadcast
    @abstractmethod
    def destroy(self) -> None: ...

    @split
    @abstractmethod
    def train_batch(
        self,
        input_: dict[str, Any],
        loss_fn: Callable[..., torch.Tensor],
        loss_weight_fn: Callable[[dict[str, Any]], torch.Tensor],
        *,
        rows_per_unit: int = 1,
    ) -> dict[str, float]:
        """One optimizer step; returns update_successful, grad_norm, lr, loss."""

    @split
    @abstractmethod
    def eval_batch(
        self,
        input_: dict[str, Any],
        loss_fn: Callable[..., torch.Tensor],
        loss_weight_fn: Callable[[dict[str, Any]], torch.Tensor],
        *,
        rows_per_unit: int = 1,
    ) -> torch.Tensor:
        """The weighted mean loss, without gradients."""

    @split(merges_rows=True)
    @abstractmethod
    def forward_batch(self, input_: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities or values `[B, S]` aligned as in `train_batch`, zero on padding."""

    @broadcast
    @abstractmethod
    def step_lr_scheduler(self) -> None: ...

    @broadcast
    @abstractmethod
    def save(self, meta: SaveLoadMeta) -> None: ...

    @broadcast
    @abstractmethod
    def capture(self) -> Callable[[str | Path], None]:
        """Copy the resumable state to host memory; the returned function writes it to a folder.

        The folder has the format of `save` as `dcp` with the optimizer. The write may run in
        another thread during training, one at a time. All ranks must call both.
        """

    @broadcast
    @abstractmethod
    def load(self, meta: SaveLoadMeta) -> None: ...

    @abstractmethod
    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) one by one, for weight sync and export."""

    @broadcast
    @abstractmethod
    def connect_engine(self, engine: InferenceEngine, meta: WeightUpdateMeta) -> None:
        """Set the target and the transport of `update_weights`."""

    @broadcast
    @abstractmethod
    def update_weights(self, version: int) -> None:
        """Send the current weights to the connected inference engine as `version`."""

    @broadcast
    @abstractmethod
    def set_version(self, version: int) -> None: ...

    @head
    @abstractmethod
    def get_version(self) -> int: ...

    @broadcast
    def offload(self) -> None:
        """Move weights and optimizer to host memory; until `onload` the engine accepts no other
        call. Training then continues bit-identically."""
        raise NotImplementedError(f"{type(self).__name__} cannot leave its device")

    @broadcast
    def onload(self) -> None:
        """Back to the device."""
        raise NotImplementedError(f"{type(self).__name__} cannot leave its device")
