"""The `rollout` section (how episodes are run) and the `native` section (our inference server)."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.agent import AgentConfig
from areal.api.config.checks import require_above, require_at_least, require_fraction
from areal.api.config.section import config_section
from areal.api.config.train_engine import check_inference_backend
from areal.api.scheduler_api import SchedulingSpec, SchedulingStrategy


@config_section
class InferenceEngineConfig:
    """How many episodes run at once, how old their weights may be, what a failure costs."""

    backend: str = "native:d1"
    """Engine and parallel layout, like `native:d1`; `native:d2` starts two servers, `native:d1t2`
    cuts the model over two processes, each with a device of its own. `vllm:d1` and `sglang:d1`
    start a stock server."""
    max_concurrent_rollouts: int | None = None
    """Most prompts in flight. Default: as many as staleness allows, (max_head_offpolicyness + 1)
    times consumer_batch_size."""
    consumer_batch_size: int | None = None
    """Prompts one training step takes. Default: train_dataset.batch_size."""
    max_head_offpolicyness: int = 0
    """A token sampled by weights more than this many versions old is never trained on. 0 is
    synchronous training."""
    max_failure_ratio: float = 0.1
    """The run stops when a larger share of episodes fails."""
    request_timeout: float = 3600.0
    """Seconds a generation may take, turns of training not counted; also the longest time nothing
    may finish."""
    request_retries: int = 3
    """Times a failed episode or request is tried again."""
    setup_timeout: float = 300.0
    """Seconds the server may take to come up."""
    dump_to_file: bool = False
    """Write every trajectory as text under the run's logs."""
    workers: int = 0
    """Processes that run the episodes, each with an event loop of its own: beside the controller,
    with Ray on whatever machines have a CPU for them. 0: the controller's event loop runs them,
    which carries more than a thousand samples a second."""
    recompute_kv: bool = True
    """After a weight update, compute the cache of running requests again with the new weights."""
    scheduling_spec: list[SchedulingSpec] = field(default_factory=list)
    """With Ray, what each server needs of its machine: one entry for all servers, or one for each.
    Default: a CPU for each of its threads, and a GPU for each of its processes."""
    scheduling_strategy: SchedulingStrategy = field(default_factory=SchedulingStrategy)
    """Devices of its own, or those of a model, in turns: `{type: colocation, target: actor}`. While
    one generates or trains, the other waits in the memory of the host."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """How agents run that talk to the model over HTTP."""

    def __post_init__(self) -> None:
        require_at_least(
            1,
            max_concurrent_rollouts=self.max_concurrent_rollouts,
            consumer_batch_size=self.consumer_batch_size,
        )
        require_at_least(
            0,
            max_head_offpolicyness=self.max_head_offpolicyness,
            workers=self.workers,
            request_retries=self.request_retries,
        )
        require_fraction(max_failure_ratio=self.max_failure_ratio)
        require_above(0, request_timeout=self.request_timeout, setup_timeout=self.setup_timeout)
        check_inference_backend(self.backend)

    @property
    def engine(self) -> str:
        """native, vllm or sglang."""
        return ModelAllocation.from_str(self.backend).backend

    @property
    def num_servers(self) -> int:
        return ModelAllocation.from_str(self.backend).parallel.data_parallel_size

    @property
    def tensor_parallel(self) -> int:
        """Processes the model of one server is cut over."""
        return ModelAllocation.from_str(self.backend).parallel.tensor_parallel_size


@config_section
class NativeServerConfig:
    """The native inference server: cache, batch and threads."""

    page_size: int = 16
    """Tokens per page of the key-value cache."""
    num_pages: int | None = None
    """Pages of the cache. Default: as many as max_running sequences need, within memory."""
    max_running: int = 512
    """Most sequences decoded together."""
    threads: int = 1
    """CPU threads of each server."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision. Default: that of the actor."""
    batch_invariant: bool = False
    """On CUDA, tokens and log-probabilities of a request do not depend on the others, bit for bit;
    with actor.batch_invariant they equal the trainer's. Slower. On the CPU it is always so."""

    def __post_init__(self) -> None:
        require_at_least(
            1,
            page_size=self.page_size,
            num_pages=self.num_pages,
            max_running=self.max_running,
            threads=self.threads,
        )
