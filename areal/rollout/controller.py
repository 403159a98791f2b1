"""RolloutController: any inference engine, with episodes that run on it.

    rollout = RolloutController(NativeLocalEngine(path), InferenceEngineConfig(), seed=1)
    rollout.initialize()
    rollout.rollout_batch(rows, workflow=RLVRWorkflow, workflow_kwargs={...})   # now, and wait
    for step in range(steps):                                                   # ahead of training
        batch = rollout.prepare_batch(dataloader, workflow=RLVRWorkflow, workflow_kwargs={...})
        ...                                             # train on it
        rollout.pause(); actor.update_weights(step + 1); rollout.set_version(step + 1)
        rollout.resume()
    rollout.destroy()

For training loops of one's own; `PPOTrainer` is the loop with a ledger on disk, recovery and
statistics. Both run episodes on the same WorkflowExecutor. The ledger here is scratch: it lives as
long as the controller, and a killed script starts from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from areal.api.config.inference import InferenceEngineConfig
from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelRequest, ModelResponse, Sample, WeightUpdateMeta
from areal.api.scratch import ScratchFolder
from areal.rollout.event_loop import TaskRunner
from areal.rollout.executor import WorkflowExecutor
from areal.rollout.failures import FailureLimits
from areal.rollout.ledger import Ledger
from areal.rollout.source import LoaderSource
from areal.rollout.staleness import StalenessManager
from areal.rollout.tasks import TaskFailedError
from areal.run.database import RunDatabase
from areal.utils import import_path, stats_tracker
from areal.workflow.resolve import build_workflow, find_workflow

if TYPE_CHECKING:
    import torch

    from areal.api.engine_api import AcceptFn, Trajectory
    from areal.api.workflow_api import RolloutWorkflow, WorkflowLike

_MAX_IN_FLIGHT = 64  # submitted rows, if the config bounds them neither by number nor by staleness
_WORKFLOW_SCOPES = ("rollout", "eval-rollout")  # of `workflow_context.stat_scope()`


class RolloutController(InferenceEngine):
    """Generation and weights are those of `engine`; copies in other processes are copies of it."""

    def __init__(
        self, engine: InferenceEngine | None, config: InferenceEngineConfig, *, seed: int = 1
    ) -> None:
        """`seed` determines the samples, as that of a run does. None: `initialize` of a subclass
        sets the engine."""
        for key in ("workers", "dump_to_file"):
            if getattr(config, key):
                raise ValueError(
                    f"rollout.{key}: needs the folder and the processes of a run; use PPOTrainer, "
                    f"or leave it out, got {getattr(config, key)!r}"
                )
        self._engine = engine
        self._config = config
        self._seed = seed
        self._closing = ExitStack()
        self._runner: TaskRunner | None = None
        self._ledger: Ledger | None = None
        self._executor: WorkflowExecutor | None = None  # opened by the first episode
        self._dataloader: Any = None  # of the stream, once it has started
        self._num_batches = 0

    def __reduce__(self) -> tuple[Callable[[InferenceEngine], InferenceEngine], tuple[Any]]:
        """Training ranks send weights and run no episodes."""
        return _itself, (self.engine,)

    @property
    def engine(self) -> InferenceEngine:
        """The engine that generates."""
        if self._engine is None:
            raise RuntimeError("the engine is not running; call initialize() first")
        return self._engine

    @property
    def initialized(self) -> bool:
        return self._runner is not None

    @property
    def workflow_executor(self) -> WorkflowExecutor:
        """What runs the episodes."""
        return self._open(None)

    def initialize(self) -> None:
        if self._runner is not None:
            return
        runner = TaskRunner()
        runner.start()
        self._closing.callback(runner.close)
        self._closing.callback(self.engine.destroy)
        try:
            self.engine.initialize()
        except BaseException:
            self._closing.close()
            raise
        self._runner = runner

    def destroy(self) -> None:
        self._runner = self._executor = self._ledger = self._dataloader = None
        self._closing.close()

    # Episodes.

    def rollout_batch(
        self,
        data: Sequence[dict[str, Any]],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFn | None = None,
        group_size: int = 1,
    ) -> list[Trajectory]:
        """A failed row raises TaskFailedError once all rows have ended."""
        found = find_workflow(workflow)
        built = build_workflow(found, workflow_kwargs)
        failures: list[TaskFailedError] = []
        trajectories: list[Trajectory] = []
        try:
            tasks = [self.submit(row, built, None, should_accept_fn, group_size) for row in data]
            for task in tasks:
                try:
                    trajectory = self.wait_for_task(task)
                except TaskFailedError as failure:
                    failures.append(failure)
                else:
                    trajectories += [] if trajectory is None else [trajectory]
        finally:
            if built is not found:
                built.close()
        if failures:
            raise failures[0]
        return trajectories

    def prepare_batch(
        self,
        dataloader: Any,
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFn | None = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> list[Trajectory]:
        executor = self._open(dataloader)
        if self._dataloader is None:
            accept = should_accept_fn
            if isinstance(accept, str):
                accept = import_path.load(accept, key="should_accept_fn")
            executor.start(
                LoaderSource(dataloader),
                self._built(workflow, workflow_kwargs, executor),
                group_size=group_size,
                should_accept_fn=accept,
                dynamic_bs=dynamic_bs,
            )
            self._dataloader = dataloader
        elif dataloader is not self._dataloader:
            raise ValueError(
                "dataloader: prepare_batch goes on with that of its first call; give the same one, "
                "or use another RolloutController"
            )
        batch = executor.prepare_batch()
        executor.mark_trained(batch, self._num_batches)
        assert self._ledger is not None  # opened with the executor
        self._ledger.prune(self._num_batches)
        self._num_batches += 1
        return batch.trajectories

    def set_version(self, version: int) -> None:
        super().set_version(version)
        self.workflow_executor.set_version(version)

    def export_stats(self) -> dict[str, float]:
        """What workflows recorded since the last call, groups by state, and the engine's own."""
        found = {f"server/{name}": value for name, value in self.stats().items()}
        if self._executor is not None:
            found |= {f"rollout/{name}": n for name, n in self._executor.stats().items()}
        for scope in _WORKFLOW_SCOPES:
            found |= stats_tracker.get(scope).export()
        return found

    # The engine's own.

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        return await self.engine.agenerate(req)

    async def agenerate_group(
        self, req: ModelRequest, seeds: Sequence[int | None]
    ) -> list[Sample | Exception]:
        return await self.engine.agenerate_group(req, seeds)

    def pause_generation(self) -> None:
        self.engine.pause_generation()

    def continue_generation(self) -> None:
        self.engine.continue_generation()

    def update_weights(
        self,
        meta: WeightUpdateMeta,
        named_tensors: Iterator[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        self.engine.update_weights(meta, named_tensors)

    def take_counts(self) -> dict[str, int]:
        return self.engine.take_counts()

    def add_counts(self, counts: Mapping[str, int]) -> None:
        self.engine.add_counts(counts)

    def take_in_flight(self) -> dict[str, list[tuple[float, float]]]:
        return self.engine.take_in_flight()

    def add_in_flight(self, intervals: Mapping[str, list[tuple[float, float]]]) -> None:
        self.engine.add_in_flight(intervals)

    def expect_weights(self, version: int) -> None:
        self.engine.expect_weights(version)

    @property
    def newest_version(self) -> int | None:
        return self.engine.newest_version

    def note_weights(self, meta: WeightUpdateMeta) -> None:
        self.engine.note_weights(meta)

    @property
    def servers(self) -> list[str]:
        return self.engine.servers

    def get_version(self) -> int:
        return self.engine.get_version()

    def compute_logp(self, data: dict[str, Any]) -> torch.Tensor:
        return self.engine.compute_logp(data)

    def offload(self, tags: Sequence[str] | None = None) -> None:
        self.engine.offload(tags)

    def onload(self, tags: Sequence[str] | None = None) -> None:
        self.engine.onload(tags)

    def stats(self) -> dict[str, float]:
        return self.engine.stats()

    def busy_intervals(self, since: float) -> dict[str, list[tuple[float, float]]]:
        return self.engine.busy_intervals(since)

    def _executor_for(self, call: str) -> WorkflowExecutor:
        return self._open(None)

    def _built(
        self, workflow: WorkflowLike, kwargs: dict[str, Any] | None, executor: WorkflowExecutor
    ) -> RolloutWorkflow:
        """A workflow of the stream: closed at the end, after the episodes that use it."""
        found = find_workflow(workflow)
        built = build_workflow(found, kwargs)
        if built is not found:
            self._closing.callback(built.close)
            self._closing.callback(executor.close)
        return built

    def _open(self, dataloader: Any) -> WorkflowExecutor:
        """The executor; the first caller decides how many groups make a batch."""
        if self._runner is None:
            raise RuntimeError("the engine is not running; call initialize() first")
        batch_size = self._batch_size(dataloader)
        if self._executor is None:
            self._executor = self._new_executor(self._runner, batch_size or 1)
        elif batch_size not in (None, self._num_groups):
            raise ValueError(
                f"rollout.consumer_batch_size: set it to {batch_size}, the dataloader's "
                f"batch_size; episodes have begun with {self._num_groups}"
            )
        return self._executor

    def _batch_size(self, dataloader: Any) -> int | None:
        """Groups of a batch; None if neither the config nor a dataloader has said it."""
        configured = self._config.consumer_batch_size
        if dataloader is None:
            return configured
        found = getattr(dataloader, "batch_size", None)
        if not isinstance(found, int) or configured not in (None, found):
            wanted = configured or "a number"
            raise ValueError(
                f"dataloader.batch_size: expected {wanted} (rollout.consumer_batch_size), "
                f"got {found!r}"
            )
        return found

    def _new_executor(self, runner: TaskRunner, batch_size: int) -> WorkflowExecutor:
        config = self._config
        folder = self._closing.enter_context(ScratchFolder("rollout"))
        database = RunDatabase(folder / "run.db")
        self._closing.callback(database.close)
        self._ledger = Ledger(database)
        self._num_groups = batch_size
        staleness = config.max_head_offpolicyness
        executor = WorkflowExecutor(
            runner,
            self,
            self._ledger,
            StalenessManager(
                max_concurrent_rollouts=config.max_concurrent_rollouts
                or max((staleness + 1) * batch_size, _MAX_IN_FLIGHT),
                consumer_batch_size=batch_size,
                max_staleness=staleness,
            ),
            run_seed=self._seed,
            limits=FailureLimits(
                max_failure_ratio=config.max_failure_ratio,
                max_retries=config.request_retries,
                timeout_s=config.request_timeout,
            ),
        )
        self._closing.callback(executor.close)
        return executor


def _itself(engine: InferenceEngine) -> InferenceEngine:
    return engine
