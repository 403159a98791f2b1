"""Asynchronous reinforcement learning: the training loop.

    inference server   generates continuously          <- weights of version v+1
    rollout executor   admits prompts, runs episodes   -> finished groups, oldest first
    this loop          takes a batch, trains, publishes version v+1

The loop blocks only in `prepare_batch`. While it trains, the server generates the next batches, as
far ahead as `rollout.max_head_offpolicyness` allows; with 0 the same loop is strictly on-policy.
Colocated training and generation alternate on the device (colocation.py). Durable state is in
run/run.py and rollout/ledger.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from areal.agents.preconditions import admin_key
from areal.api.workflow_api import RolloutWorkflow, WorkflowLike
from areal.infra.jobs import rollout_worker_job
from areal.planner.prediction import predictor_of
from areal.rollout.event_loop import TaskRunner, tune_gc
from areal.rollout.executor import WorkflowExecutor
from areal.rollout.failures import FailureLimits
from areal.rollout.ledger import Ledger
from areal.rollout.staleness import StalenessManager
from areal.rollout.trajectory import TrajectoryDump
from areal.rollout.worker import WorkflowRecipe
from areal.rollout.workers import RolloutWorkers
from areal.run.run import StepObserver
from areal.trainer.base import Trainer
from areal.trainer.colocation import TimeSharedDevice
from areal.trainer.episodes import (
    RewardSpread,
    build_filter,
    build_workflow,
    describe_batch,
    describe_evaluation,
    refuse_images,
)
from areal.trainer.fleet import listen_for_servers
from areal.trainer.ppo.actor import PPOLearner
from areal.trainer.probe import UpdateProbe
from areal.trainer.samples import SampleRecorder
from areal.trainer.servers import ServerTrace, open_inference, open_teacher
from areal.trainer.shown_images import ShownImages
from areal.utils.device import num_cores
from areal.utils.perf_tracer import phase
from areal.utils.startup import stage

if TYPE_CHECKING:
    from areal.api.io_struct import StepInfo
    from areal.rollout.executor import Batch


_CLOSE_S = 10.0  # for the router's last replies


class PPOTrainer(Trainer):
    """Trains a policy with PPO or GRPO on episodes that run while it trains.

    with PPOTrainer(config, train_rows, valid_rows) as trainer:
        trainer.train(workflow="rlvr", workflow_kwargs={"reward_fn": my_reward})
    """

    def _open(self, stack: ExitStack) -> None:
        self._share_cores()
        self.learner = PPOLearner(
            self.config,
            partial(self._open_engine, stack=stack),
            lambda: open_teacher(self.config, self.run.paths, stack, self.scheduler),
        )
        self.engine = self.learner.engine
        self.images = ShownImages(self.config)
        self.run.remember(**self.learner.states())
        self.device = TimeSharedDevice(
            [self.models[role] for role in self.config.time_shared_models()]
        )
        self.runner = self._start_runner(stack)
        rollout = self.config.rollout
        with stage(f"inference, {rollout.backend}", limit_s=rollout.setup_timeout):
            self.inference, self.weights = open_inference(
                self.config, self.run.paths, stack, self.scheduler
            )
        self.device.connect(self.inference)
        self._connect()
        self.run.watchdog.observe("inference", self.inference.progress)
        self.server_trace = ServerTrace(self.inference)
        self.reward_spread = RewardSpread()
        self.predict_speed = predictor_of(self.config, has_gpu=torch.cuda.is_available())
        self.samples = SampleRecorder(
            self.run.database, self.tokenizer, total_steps=self.run.total_steps
        )
        self.ledger = Ledger(self.run.database)
        self.run.on_settled = self.ledger.prune
        # Of servers that a kill has ended.
        shutil.rmtree(self.run.paths.agents, ignore_errors=True)
        self.workers = self._start_workers(self.runner, stack)
        self.rollout = self._open_executor(self.runner, stack)
        self.probe = UpdateProbe(
            self.config, self.runner, self.engine, self.inference, self.run.database
        )

    def train(
        self,
        workflow: WorkflowLike | None = None,
        eval_workflow: WorkflowLike | None = None,
        workflow_kwargs: dict[str, Any] | None = None,
        eval_workflow_kwargs: dict[str, Any] | None = None,
        dynamic_filter_fn: Callable[[dict], bool] | str | None = None,
        on_step: StepObserver | None = None,
    ) -> None:
        """Run to the last step. Arguments left out come from the config."""
        refuse_images(self.config, workflow, workflow_kwargs, self.train_dataset, is_eval=False)
        refuse_images(
            self.config,
            eval_workflow or workflow,
            eval_workflow_kwargs or workflow_kwargs,
            self.valid_dataset,
            is_eval=True,
        )
        episodes = self._workflow(workflow, workflow_kwargs)
        evaluation = self._workflow(
            eval_workflow or workflow, eval_workflow_kwargs or workflow_kwargs, is_eval=True
        )
        first = self._start(episodes, build_filter(self.config, dynamic_filter_fn))
        if first == 0 and self.run.evaluates_before:
            self.run.stats_logger.commit(-1, self.evaluate(evaluation))

        for step in self.run.steps(first):
            batch = self._next_batch()
            data = self.learner.train(self.images.fill_in(batch.trajectories))
            with phase("update_weights", "comm"):
                self.publish_weights(step.global_step + 1)
            stats = self._close_batch(batch, data, step)
            self.probe.look(batch.trajectories, version=step.global_step + 1)
            if self.run.evaluation_due(step):
                self.device.to_generation()  # a phase of its own
                with phase("evaluate", "sync"):
                    stats |= self.evaluate(evaluation)
            self.device.to_training()  # after an evaluation; saving needs the models on the device
            stats |= self._measure(stats)
            recorded = self.run.finish_step(step, self.tokenizer, stats)
            if on_step is not None:
                on_step(step.global_step + 1, self.run.total_steps, recorded)
        self.run.finish(self.tokenizer)

    def evaluate(self, workflow: RolloutWorkflow | WorkflowRecipe) -> dict[str, float]:
        """Statistics on the validation set; training episodes continue meanwhile."""
        self.device.to_generation()
        section, group_size = self.config.valid_dataset, self.config.eval_gconfig.n_samples
        groups = self.rollout.rollout_batch(
            self.valid_dataset,
            workflow,
            group_size=group_size,
            batch_size=1 if section is None else section.batch_size,
        )
        return describe_evaluation(groups, num_samples=len(groups) * group_size)

    def _share_cores(self) -> None:
        """Reserve cores for the servers if they run concurrently with training."""
        config = self.config
        time_shared = config.rollout.scheduling_strategy.target is not None
        together = config.rollout.max_head_offpolicyness > 0 and not time_shared
        is_ours = not config.rollout.api_url
        if together and is_ours and config.actor.weight_update_mode != "direct":
            taken = config.rollout.num_servers * config.server.threads
            torch.set_num_threads(max(1, num_cores() - taken))

    def _connect(self) -> None:
        """Connect the actor's ranks, which hold copies of the client, to the current servers."""
        self._receivers = self.inference.servers
        self.engine.connect_engine(self.inference, self.weights)

    def _next_batch(self) -> Batch:
        """A batch that is ready already (staleness > 0) needs no switch of a shared device."""
        batch = self.rollout.take_batch()
        if batch is None:
            self.room.clear()
            self.device.to_generation()
        with phase("rollout", "sync"):
            batch = batch or self.rollout.prepare_batch()
        self.device.to_training()
        return batch

    def _start_runner(self, stack: ExitStack) -> TaskRunner:
        """The event loop; started before the engine, so that it outlives its connections."""
        runner = TaskRunner()
        runner.start()
        stack.callback(runner.close)
        return runner

    def _start_workers(self, runner: TaskRunner, stack: ExitStack) -> RolloutWorkers | None:
        """The rollout worker processes, if the config has any."""
        config = self.config.rollout
        if config.workers == 0:
            return None
        workers = RolloutWorkers(
            runner,
            self.inference,
            self._open_scheduler(stack),
            rollout_worker_job(self.config),
            max_retries=config.request_retries,
            setup_timeout_s=config.setup_timeout,
        )
        stack.callback(workers.close)
        with stage(f"{config.workers} rollout workers", limit_s=config.setup_timeout):
            workers.start()
        if config.agent.mode == "online":
            self._start_router(runner, stack)
        return workers

    def _start_router(self, runner: TaskRunner, stack: ExitStack) -> None:
        """The one address of the workers' sessions."""
        from areal.agents.router import AgentRouter  # late: a web framework, for online runs alone

        router = AgentRouter(
            self.config.rollout.agent, admin_key=admin_key(), folder=self.run.paths.agents
        )
        runner.run(router.start()).result(self.config.rollout.setup_timeout)
        stack.callback(lambda: runner.run(router.stop()).result(_CLOSE_S))

    def _open_executor(self, runner: TaskRunner, stack: ExitStack) -> WorkflowExecutor:
        config = self.config.rollout
        dump = TrajectoryDump(self.run.paths.logs, self.tokenizer) if config.dump_to_file else None
        executor = WorkflowExecutor(
            runner,
            self.inference,
            self.ledger,
            StalenessManager(
                max_concurrent_rollouts=config.max_concurrent_rollouts,
                consumer_batch_size=config.consumer_batch_size,
                max_staleness=config.max_head_offpolicyness,
                total_steps=self.run.total_steps,
            ),
            run_seed=self.config.seed,
            limits=FailureLimits(
                max_failure_ratio=config.max_failure_ratio,
                max_retries=config.request_retries,
                timeout_s=config.request_timeout,
            ),
            on_trajectory=None if dump is None else dump.write,
            workers=self.workers,
        )
        stack.callback(executor.close)
        return executor

    def _workflow(
        self, given: WorkflowLike | None, kwargs: Any, is_eval: bool = False
    ) -> RolloutWorkflow | WorkflowRecipe:
        """The workflow, or the recipe by which workers build it."""
        choice = {"given": given, "kwargs": kwargs, "is_eval": is_eval}
        choice |= {"config": self.config, "tokenizer": self.tokenizer}
        choice["agents_folder"] = self.run.paths.agents
        if self.workers is not None:
            return WorkflowRecipe("areal.trainer.episodes.build_workflow", choice)
        workflow = build_workflow(**choice)
        self._closing.callback(workflow.close)
        # Close the executor before the workflow, else running episodes would be recorded as failed.
        self._closing.callback(self.rollout.close)
        return workflow

    def _start(
        self,
        episodes: RolloutWorkflow | WorkflowRecipe,
        accept: Callable[[dict], bool] | None,
    ) -> int:
        """Load the recover point if there is one and start episodes; returns the next step."""
        self.device.to_training()
        first = self.run.resume()
        resume = self.ledger.rewind(step=first - 1, version=first)
        if first > 0 or self.config.rollout.api_url:  # whose servers may have any weights
            with stage(f"weights of version {first} to the servers"):
                self.publish_weights(first)
        else:
            self.engine.set_version(first)
        tune_gc()
        self.rollout.start(
            self.source,
            episodes,
            group_size=self.config.gconfig.n_samples,
            reward_normalization=self.config.gconfig.reward_normalization,
            drop_incomplete_group=self.config.gconfig.drop_incomplete_group,
            should_accept_fn=accept,
            dynamic_bs=self.config.dynamic_bs,
            resume=resume,
        )
        listen_for_servers(self.config, self.run, self.inference, self.workers, self._closing)
        return first

    def publish_weights(self, version: int) -> None:
        """Send the weights of `version` to the servers, which generate with them from then on."""
        # First: a server that joins from here on is brought to `version` by `note_weights`.
        self.inference.expect_weights(version)
        if self.inference.servers != self._receivers:
            self._connect()
        self.engine.update_weights(version)
        self.engine.set_version(version)
        self.inference.note_weights(self.weights.with_version(version))

    def _close_batch(self, batch: Batch, data: dict[str, Any], step: StepInfo) -> dict[str, float]:
        """Mark the batch as trained, admit new prompts, and return the batch's statistics."""
        with phase("bookkeeping", "io"):
            self.rollout.mark_trained(batch, step.global_step)
            self.rollout.set_version(step.global_step + 1)
            self.samples.record(batch, data, step.global_step)
            stats = describe_batch(data, version=step.global_step)
            stats["rollout/groups_with_spread"] = self.reward_spread.share(batch.trajectories)
        return stats

    def _measure(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Counters of rollout and servers, and the speed that was predicted. At the end of a step:
        the time of its row must be that of its counters, also after an evaluation."""
        with phase("statistics", "io"):
            found = {f"rollout/{name}": value for name, value in self.rollout.stats().items()}
            found |= {f"server/{name}": value for name, value in self.inference.stats().items()}
            found |= self.predict_speed({**stats, **found})
            self.server_trace.update()
        return found
