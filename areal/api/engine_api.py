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
scaling in `engine/train/base.py`, queues and staleness in `rollout/executor.py`). An engine that
only generates refuses the calls that run episodes; `rollout/controller.py` adds them to any engine.
"""

from __future__ import annotations

import asyncio
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar, overload

from areal.api.io_struct import Sample, WeightUpdateMeta

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from areal.api.alloc_mode import ParallelStrategy
    from areal.api.io_struct import (
        FinetuneSpec,
        ModelRequest,
        ModelResponse,
        ParamSpec,
        SaveLoadMeta,
    )

    Trajectory = dict[str, torch.Tensor]
    Checksums = dict[str, tuple[str, int]]  # of tensors, by name: dtype, checksum of the bytes
    WorkflowLike = Any  # that of workflow_api, which imports this module
    AcceptFn = Callable[[Trajectory], bool] | str  # a function of a whole group, or its import path


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


def _sample_of(call: asyncio.Future[ModelResponse]) -> Sample | Exception:
    error = call.exception()
    if error is None:
        return Sample.of(call.result())
    if not isinstance(error, Exception):
        raise error
    return error


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
    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """ValueError: the request is invalid. A call that is cancelled frees its generation."""

    async def agenerate_group(
        self, req: ModelRequest, seeds: Sequence[int | None]
    ) -> list[Sample | Exception]:
        """One sample of `req` per seed, or why there is none.

        A cancelled call frees the generation of all.
        """
        requests = [replace(req, gconfig=req.gconfig.with_seed(seed)) for seed in seeds]
        calls = [asyncio.ensure_future(self.agenerate(request)) for request in requests]
        try:
            await asyncio.wait(calls)
        finally:
            for call in calls:
                call.cancel()
        return [_sample_of(call) for call in calls]

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

    def take_in_flight(self) -> dict[str, list[tuple[float, float]]]:
        """Server -> (start, end) of the times in which a copy in another process had requests
        there, since the last call, for `add_in_flight`; empty if servers measure their time."""
        return {}

    def add_in_flight(self, intervals: Mapping[str, list[tuple[float, float]]]) -> None:
        """Add the times of a copy in another process."""
        del intervals

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

    def weight_checksums(self) -> dict[str, Checksums]:
        """By server, of its live weights: name -> (dtype, checksum)."""
        raise NotImplementedError(f"{type(self).__name__} does not show its weights")

    def layer_trace(self, tokens: Sequence[int]) -> dict[str, dict[str, Any]]:
        """By server, what each layer computes for `tokens` (models/common/layer_trace.py)."""
        raise NotImplementedError(f"{type(self).__name__} does not show its layers")

    def offload(self, tags: Sequence[str] | None = None) -> None:
        """Free the device memory of `tags`: weights, kv_cache; None is both. Requests keep their
        tokens and wait for `onload`."""
        raise NotImplementedError(f"{type(self).__name__} cannot be offloaded")

    def onload(self, tags: Sequence[str] | None = None) -> None:
        """Restore what `offload` freed. Requests continue once nothing is missing."""
        raise NotImplementedError(f"{type(self).__name__} cannot be offloaded")

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counters and gauges since the start: tokens generated, pages in use, preemptions. Names
        of seconds end in `_s`."""

    def progress(self) -> dict[str, float]:
        """Those of `stats` that change only while the engine works: no seconds, which count idle
        time too, and no NaN, which differs from itself."""
        found = self.stats().items()
        return {k: v for k, v in found if not k.endswith("_s") and math.isfinite(v)}

    def export_stats(self) -> dict[str, float]:
        """Numbers for a tracker: those of `stats`, and of episodes where the engine runs them."""
        return self.stats()

    @abstractmethod
    def busy_intervals(self, since: float) -> dict[str, list[tuple[float, float]]]:
        """Server -> (start, end) of its work after `since`, in seconds since the epoch."""

    def set_version(self, version: int) -> None:
        """Check that `version` serves: versions come with the weights. An engine that runs episodes
        also starts those which the new version allows."""
        serving = self.get_version()
        if serving != version:
            raise RuntimeError(
                f"set_version: the engine serves version {serving}, not {version}: send the "
                "weights first, with TrainEngine.update_weights(version)"
            )

    def update_weights_from_disk(self, meta: WeightUpdateMeta) -> Future[None]:
        """`update_weights` of a publication (a folder written by `TrainEngine.update_weights` or
        `weight_sync.publication.publish`), in a thread."""
        done: Future[None] = Future()

        def load() -> None:
            try:
                self.update_weights(meta)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=load, name="update-weights", daemon=True).start()
        return done

    def init_weights_update_group(
        self, meta: WeightUpdateMeta, rank_ids: Sequence[int] | None = None
    ) -> Future[None]:
        """Refused: the sender opens the group and tells the servers, in one call."""
        self._refuse_distributed("init_weights_update_group")

    def update_weights_from_distributed(
        self, meta: WeightUpdateMeta, param_specs: Sequence[ParamSpec]
    ) -> Future[None]:
        """Refused: the sender announces each bucket itself, just before it is broadcast."""
        self._refuse_distributed("update_weights_from_distributed")

    def _refuse_distributed(self, call: str) -> NoReturn:
        raise NotImplementedError(
            f"{call}: a process group of weights is opened and used by its sender alone; call "
            "TrainEngine.connect_engine(engine, WeightUpdateMeta.from_fsdp_xccl(allocation)), then "
            "TrainEngine.update_weights(version)"
        )

    # Episodes: see rollout/controller.py.

    def submit(
        self,
        data: dict[str, Any],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFn | None = None,
        group_size: int = 1,
        task_id: int | None = None,
        is_eval: bool = False,
        reward_normalization: bool = False,
        drop_incomplete_group: bool = False,
    ) -> int:
        """Queue one row for `workflow`; returns its task id. Does not wait."""
        return self._executor_for("submit").submit(
            data,
            workflow,
            workflow_kwargs,
            should_accept_fn,
            group_size,
            task_id,
            is_eval,
            reward_normalization,
            drop_incomplete_group,
        )

    def wait(
        self, count: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> list[Trajectory | None]:
        """Results of `count` submitted rows; None is a rejection."""
        return self._executor_for("wait").wait(count, timeout, raise_timeout)

    def wait_for_task(
        self, task_id: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> Trajectory | None:
        """The result of one submitted row."""
        return self._executor_for("wait_for_task").wait_for_task(task_id, timeout, raise_timeout)

    def rollout_batch(
        self,
        data: Sequence[dict[str, Any]],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFn | None = None,
        group_size: int = 1,
    ) -> list[Trajectory]:
        """Run these rows now and wait for them; rejected ones are left out."""
        self._refuse_episodes("rollout_batch")

    def prepare_batch(
        self,
        dataloader: Any,
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFn | None = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> list[Trajectory]:
        """The next training batch, `dataloader.batch_size` accepted groups. Episodes run ahead of
        it, within `max_head_offpolicyness` versions. The first call sets the arguments for all."""
        self._refuse_episodes("prepare_batch")

    def pause(self) -> None:
        """Start no more episodes; running ones continue."""
        self._executor_for("pause").pause()

    def resume(self) -> None:
        """Undo `pause`."""
        self._executor_for("resume").resume()

    def _executor_for(self, call: str) -> Any:
        """The WorkflowExecutor of an engine that runs episodes; `call` is the method that asks."""
        self._refuse_episodes(call)

    def _refuse_episodes(self, call: str) -> NoReturn:
        raise NotImplementedError(
            f"{call}: {type(self).__name__} only generates; areal.RolloutController(engine, "
            "config.rollout) runs episodes on it"
        )


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
    def forward_batch(self, input_: dict[str, Any], *, with_entropy: bool = False) -> torch.Tensor:
        """Log-probabilities or values `[B, S]` aligned as in `train_batch`, zero on padding.

        `with_entropy`: `[B, S, 2]`, log-probabilities and the entropies of the distributions they
        are taken from. Not of a critic.
        """

    def forward(
        self,
        input_: dict[str, Any],
        output_seqlens: Sequence[int] | None = None,
        aggregate_fn: Callable[[list[torch.Tensor]], Any] | None = None,
    ) -> Any:
        """`forward_batch` without padding: `aggregate_fn` (default `torch.cat`) of one tensor per
        row, the first `output_seqlens[i]` outputs of row i (default: as many as its tokens)."""
        import torch

        lengths = output_seqlens or input_["attention_mask"].sum(dim=1).tolist()
        rows = zip(self.forward_batch(input_), lengths, strict=True)
        return (aggregate_fn or torch.cat)([row_S[:length] for row_S, length in rows])

    def train(self, mode: bool = True) -> Self:
        """Returns the engine, and changes nothing: `train_batch` learns, `eval_batch` and
        `forward_batch` do not, and dropout is always off."""
        del mode
        return self

    def eval(self) -> Self:
        """As `train(False)`."""
        return self.train(False)

    @broadcast
    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Forget gradients that `optimizer_step` has not used."""

    @broadcast
    @abstractmethod
    def optimizer_step(self) -> dict[str, float]:
        """Update with the gradients of `forward_backward_batch`, and clear them; returns
        update_successful, grad_norm, lr. `train_batch` does both."""

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

    @property
    @abstractmethod
    def connected_engine(self) -> InferenceEngine:
        """That of `connect_engine`; RuntimeError if there is none."""

    def rollout_batch(
        self, data: Sequence[dict[str, Any]], workflow: WorkflowLike, **options: Any
    ) -> list[Trajectory]:
        """`InferenceEngine.rollout_batch` of the connected engine."""
        return self.connected_engine.rollout_batch(data, workflow, **options)

    def prepare_batch(
        self, dataloader: Any, workflow: WorkflowLike, **options: Any
    ) -> list[Trajectory]:
        """`InferenceEngine.prepare_batch` of the connected engine."""
        return self.connected_engine.prepare_batch(dataloader, workflow, **options)

    @abstractmethod
    def export_stats(self) -> dict[str, float]:
        """What was recorded with `stats_tracker` since the last call, over all data-parallel ranks;
        every rank calls."""

    @broadcast
    @abstractmethod
    def update_weights(self, version: int | WeightUpdateMeta) -> None:
        """Send the current weights to the connected inference engine as `version`, or as that of
        a `WeightUpdateMeta`; they travel as `connect_engine` said."""

    @broadcast
    def weight_checksums(self, dtypes: Mapping[str, str]) -> Checksums:
        """Of the tensors that `update_weights` sends, each rounded to the dtype that its receiver
        has (`dtypes`, by name, as its own checksums say; of others as it is)."""
        raise NotImplementedError(f"{type(self).__name__} does not show its weights")

    @broadcast
    def layer_trace(self, tokens: Sequence[int]) -> dict[str, Any]:
        """What each layer computes for `tokens` (models/common/layer_trace.py)."""
        raise NotImplementedError(f"{type(self).__name__} does not show its layers")

    @broadcast
    @abstractmethod
    def set_version(self, version: int) -> None: ...

    @head
    @abstractmethod
    def get_version(self) -> int: ...

    @broadcast
    def start_profile(self) -> None:
        """Record what torch does in the process of each rank, until `save_profile`."""
        raise NotImplementedError(f"{type(self).__name__} takes no profiles")

    @broadcast
    def save_profile(self, name: str) -> None:
        """End the recording and write it: a Chrome trace, `{name}-rank0.json` and so on."""
        raise NotImplementedError(f"{type(self).__name__} takes no profiles")

    @broadcast
    def offload(self) -> None:
        """Move weights and optimizer to host memory; until `onload` the engine accepts no other
        call. Training then continues bit-identically."""
        raise NotImplementedError(f"{type(self).__name__} cannot be offloaded")

    @broadcast
    def onload(self) -> None:
        """Back to the device."""
        raise NotImplementedError(f"{type(self).__name__} cannot be offloaded")
