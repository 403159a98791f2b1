"""How a call travels to an object that lives on several ranks: marks on the methods of a contract.

    class TrainEngine(ABC):
        @split                      # each data-parallel place gets its rows of the first argument
        def train_batch(self, input_, ...): ...

        @split(merges_rows=True)    # and the rows of the answers are put back in their order
        def forward_batch(self, input_): ...

        @broadcast                  # the same call on every rank; the first rank's answer
        def save(self, meta): ...

        @head                       # the first rank alone: nothing in it may need another rank
        def get_version(self): ...

A method without a mark does not travel. Marks change nothing about the method itself, so an object
in this process is called as ever; `infra/train_controller.py` reads them for one that is not.

What a training engine and an inference engine are to the rest of areal.

Both are small on purpose: everything that can be derived is written once elsewhere (micro-batching
and loss scaling in `engine/train/base.py`, queues and staleness in `rollout/executor.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from areal.api.alloc_mode import ParallelStrategy
    from areal.api.io_struct import (
        FinetuneSpec,
        ModelRequest,
        ModelResponse,
        SaveLoadMeta,
        WeightUpdateMeta,
    )


Method = TypeVar("Method", bound=Callable[..., Any])

_ATTRIBUTE = "__areal_mark__"


@dataclass(frozen=True, slots=True)
class Mark:
    kind: Literal["split", "broadcast", "head"]
    merges_rows: bool = False  # of split: the answer has the rows of the argument


@overload
def split(method: Method) -> Method: ...
@overload
def split(*, merges_rows: bool) -> Callable[[Method], Method]: ...
def split(method: Any = None, *, merges_rows: bool = False) -> Any:
    """Rows of the padded batch in the first argument are divided by their tokens. Every
    `rows_per_unit` (a keyword of the method, default 1) neighbours stay together; a place may get
    none. What is not merged must be the same on every rank."""

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
    """The engine is gone for good: no episode can go on, and none is to blame. The run stops."""


class InferenceEngine(ABC):
    """Token ids in; token ids, log-probabilities and weight versions out.

    Safe to call from one event loop; `agenerate` of many coroutines is the normal load. One that
    talks to servers pickles without its connections: training ranks send it their weights.
    """

    @abstractmethod
    def initialize(self) -> None:
        """Connect to the server (or build the model). Raises RuntimeError with the cause."""

    @abstractmethod
    def destroy(self) -> None:
        """End what `initialize` began. Calling it twice, or without initialize, is fine."""

    @abstractmethod
    async def agenerate(self, req: ModelRequest) -> ModelResponse: ...

    @abstractmethod
    def pause_generation(self) -> None:
        """Hold every running request where it is, between two steps."""

    @abstractmethod
    def continue_generation(self) -> None: ...

    @abstractmethod
    def update_weights(
        self,
        meta: WeightUpdateMeta,
        named_tensors: Iterator[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        """Load `meta.version` between two steps; running requests go on with it.

        `named_tensors` comes with the types that publish nothing by themselves: `direct`, `xccl`
        and `delta`. What does not verify raises RuntimeError and the old weights go on serving.
        """

    def take_counts(self) -> dict[str, int]:
        """What a copy in another process has counted since the last call, for `add_counts`."""
        return {}

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """What a copy in another process has counted; an engine that counts nothing drops it."""
        del counts

    def expect_weights(self, version: int) -> None:
        """Weights of this version are about to be sent, by whomever: replies may name it from now
        on, and none that is newer. An engine that counts versions itself has no use for it."""
        del version

    @property
    def newest_version(self) -> int | None:
        """The newest version that a token can have; None where that is not known."""
        return None

    def note_weights(self, meta: WeightUpdateMeta) -> None:
        """These weights serve, whoever sent them: a server that dies may be replaced by one with
        them, and one that came meanwhile gets them now. An engine whose servers stay has no use for
        it."""
        return None

    @property
    def servers(self) -> list[str]:
        """Addresses of the servers that may come and go: when they change, copies are of the past.
        None where there are no such."""
        return []

    @abstractmethod
    def get_version(self) -> int:
        """Version of the weights that serve now."""

    def compute_logp(self, data: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities `[B, S]` of the tokens of a padded batch under the weights that serve.

        `data` has input_ids and attention_mask. Aligned as `TrainEngine.forward_batch`: at t, log p
        of the token at t + 1; zero at a row's last token and on padding.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot score given tokens")

    def offload(self, tags: Sequence[str] | None = None) -> None:
        """Free the device memory of `tags`: weights, kv_cache; None is both. Requests keep their
        tokens and wait for `onload`."""
        raise NotImplementedError(f"{type(self).__name__} cannot leave its device")

    def onload(self, tags: Sequence[str] | None = None) -> None:
        """Take back what `offload` freed. Requests go on when nothing is missing any more."""
        raise NotImplementedError(f"{type(self).__name__} cannot leave its device")

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counters and gauges since the start: tokens generated, pages in use, preemptions."""

    @abstractmethod
    def busy_intervals(self, since: float) -> dict[str, list[tuple[float, float]]]:
        """By server, the (start, end) of its work after `since`, in seconds since the epoch."""


class TrainEngine(ABC):
    """One model, its optimizer, and the exact global mean over micro-batches and ranks.

    `input_` is a padded dict `[B, S]`; the engine packs it into micro-batches of a token budget.
    `loss_fn(logprobs_T, entropy_T, mb)` sees one packed micro-batch; `logprobs[t]` is
    log p(input_ids[t+1] | ...), so the last position of each sequence is junk and must be masked.
    `loss_weight_fn(mb)` gives the micro-batch's weight (usually its number of loss tokens).
    Every `rows_per_unit` consecutive rows share a micro-batch and stay neighbours in it.

    A critic's engine has values in place of log-probabilities: `loss_fn(values_T, mb)`, where
    `values[t]` is the value before the token at t + 1.

    The marks (api/engine_api.py) say how a call reaches an engine whose ranks are other processes.
    What such a call takes and returns must pickle: loss functions are functions of a module, bound
    methods of small objects, or partials of those.
    """

    @broadcast
    @abstractmethod
    def create_process_group(self, parallel_strategy: ParallelStrategy) -> None:
        """Join the ranks of the layout; before `initialize`. One rank joins nobody."""

    @property
    @abstractmethod
    def data_parallel_rank(self) -> int:
        """Ranks with the same number compute the same rows, others have other rows."""

    @abstractmethod
    def is_data_parallel_head(self) -> bool:
        """Whether this rank answers for all that compute the same rows together: it is one on which
        loss functions run, so it has the statistics they record."""

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
        """Copy the resumable state to host memory; what is returned writes it to a folder.

        The folder is that of `save` as `dcp` with the optimizer. The writing may happen in another
        thread while training goes on, one write at a time. On several ranks all call both.
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
        """Remember where `update_weights` sends weights and by which transport."""

    @broadcast
    @abstractmethod
    def update_weights(self, version: int) -> None:
        """Move the current weights to the connected inference engine as `version`."""

    @broadcast
    @abstractmethod
    def set_version(self, version: int) -> None: ...

    @head
    @abstractmethod
    def get_version(self) -> int: ...

    @broadcast
    def offload(self) -> None:
        """Move weights and optimizer to the memory of the host; nothing else may be asked of the
        engine until `onload`. Training then goes on bit for bit as if nothing had happened."""
        raise NotImplementedError(f"{type(self).__name__} cannot leave its device")

    @broadcast
    def onload(self) -> None:
        """Back to the device."""
        raise NotImplementedError(f"{type(self).__name__} cannot leave its device")
