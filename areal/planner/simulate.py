"""A discrete-event model of a run: what the averages of a plan hide.

    spec = Spec.of(plan, setup)
    simulate(spec, steps=20, seed=1) -> Simulated

    gate      admits groups as rollout/staleness.py does
    servers   decode their sequences together, each step as long as its number of rows makes it;
              prompts and caches that are computed (again) come first
    episodes  wait for their environment after the last token
    trainer   takes the oldest groups that are complete, trains, publishes; servers stand still
              while they load, and then compute their caches again
    failures  a server fails at random; its sequences begin again elsewhere

Lengths and delays are drawn from one seed: the same spec and seed give the same numbers. Time is
conserved: busy, stalled, down and idle seconds of a server add up to the length of the run, and so
do those of the trainer.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from areal.planner.engines import Servers
from areal.planner.plan import Plan, Setup
from areal.planner.workload import Workload

_MAX_SERVERS = 8  # simulated; more servers get a share of the prompts
_MAX_SAMPLES = 20_000  # simulated in all: about half a second
_MAX_IN_FLIGHT = 60_000  # samples at a time: seconds to follow
_RESTART_S = 60.0  # of a server that failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What is simulated; seconds, and rates per second."""

    load: Workload
    num_servers: int
    max_running: int  # sequences of a server
    step_s: Callable[[float], float]  # of so many rows
    prefill_s: float  # of a prompt
    recompute_s: float  # of one running sequence's cache, after an update; 0: caches are kept
    train_s: float  # of a batch of average length
    publish_s: float
    stall_s: float
    generates_at: float = 1.0  # speed of servers while the trainer computes
    trains_at: float = 1.0  # speed of the trainer while servers compute
    failures_per_hour: float = 0.0  # of a server
    scale: float = 1.0  # tokens of the run, of one that is simulated
    draw: Callable[[float], int] | None = None  # length from a number in (0, 1); None: the load's

    @classmethod
    def of(cls, plan: Plan, setup: Setup, *, failures_per_hour: float = 0.0) -> Spec:
        servers, load, count = setup.servers, plan.load, setup.servers.count
        if count > _MAX_SERVERS:
            load = _fewer_prompts(load, max(1, round(load.prompts * _MAX_SERVERS / count)))
            count = _MAX_SERVERS
        if (in_flight := load.in_flight * load.samples) > _MAX_IN_FLIGHT:
            raise ValueError(
                f"--simulate follows at most {_MAX_IN_FLIGHT:,} samples in flight, and of these "
                f"{count} server(s) {in_flight:,} are: lower train_dataset.batch_size, "
                "gconfig.n_samples, rollout.max_head_offpolicyness or max_concurrent_rollouts"
            )
        device, rates = plan.device, (1.0, 1.0)
        if setup.takes_turns:
            rates = (0.0, 1.0)
        elif plan.shares_devices or plan.is_cpu:
            rates = (device.generation_beside, device.training_beside)
        running = servers.running(load)
        recompute = servers.recompute_s(load) / running
        return cls(
            load=load,
            num_servers=count,
            max_running=_max_running(servers, load),
            step_s=_step_times(servers, load),
            prefill_s=servers.prompt_s(load),
            recompute_s=recompute,
            train_s=plan.times.train,
            publish_s=plan.times.publish,
            stall_s=plan.times.stall,
            generates_at=rates[0],
            trains_at=rates[1],
            failures_per_hour=failures_per_hour,
            scale=plan.load.prompts / load.prompts,
        )


def _fewer_prompts(load: Workload, prompts: int) -> Workload:
    concurrent = load.max_concurrent and max(1, load.max_concurrent * prompts // load.prompts)
    return replace(load, prompts=prompts, max_concurrent=concurrent)


def _max_running(servers: Servers, load: Workload) -> int:
    held = load.prompt / load.samples + load.output / 2 + servers.rank.page_size
    return max(1, min(servers.rank.max_running, int(servers.rank.cache_tokens / held)))


def _step_times(servers: Servers, load: Workload) -> Callable[[float], float]:
    @cache
    def step_s(rows: float) -> float:
        prompts = max(rows / load.samples, 1)
        return servers.generation.step_of_s(rows, load.prompt, load.output / 2, prompts)

    return step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What came out, of the steps after the first ones."""

    steps: int
    seconds: float  # of these steps
    tokens_per_s: float
    step_s: float
    staleness: float  # mean age of a group's tokens, in versions
    training: dict[str, float]  # share of the time: busy, publishing, waiting
    generation: dict[str, float]  # share of the time: busy, stalled, down, idle
    failures: int


def steps_for(load: Workload, wanted: int) -> int:
    """As many of the wanted steps as are quick to simulate, and at least 4."""
    return max(4, min(wanted, _MAX_SAMPLES // max(load.num_samples, 1)))


def simulate(spec: Spec, *, steps: int, seed: int) -> Simulated:
    if steps < 2:
        raise ValueError(f"a simulation needs at least 2 steps, got {steps}")
    run = _Run(spec, steps, random.Random(seed))
    run.run()
    return run.result()


@dataclass(slots=True)
class _Group:
    number: int
    version: int  # of the weights when it began
    left: int  # samples that are not complete
    tokens: float = 0.0


@dataclass(slots=True)
class _Server:
    decoded: float = 0.0  # tokens that a sequence running since the start would have
    running: list[tuple[float, int, int, _Group]] = field(default_factory=list)  # by their end
    waiting: deque[tuple[int, _Group]] = field(default_factory=deque)
    backlog_s: float = 0.0  # prompts and caches to compute
    stalled_s: float = 0.0  # that it still stands still
    down_s: float = 0.0  # until it is back
    spent: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("busy", "stalled", "down", "idle"), 0.0)
    )

    @property
    def rows(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.backlog_s > 0


class _Run:
    def __init__(self, spec: Spec, steps: int, rng: random.Random) -> None:
        self.spec, self.steps, self.rng = spec, steps, rng
        self.draw = spec.draw or spec.load.draw
        self.now = 0.0
        self.version = 0
        self.servers = [_Server() for _ in range(spec.num_servers)]
        self.num_started = self.num_accepted = self.num_drawn = self.num_failures = 0
        self.incomplete: Counter[int] = Counter()  # groups, by the version they began with
        self.waking: list[tuple[float, int, _Group]] = []  # ends of environments
        self.ready: list[tuple[int, _Group]] = []  # complete groups, oldest first
        self.batch: list[_Group] = []
        self.training_s = self.publishing_s = 0.0  # left of the step's
        self.spent: dict[str, float] = dict.fromkeys(("busy", "publishing", "waiting"), 0.0)
        self.ends: list[tuple[float, float, float]] = []  # of steps: time, tokens, staleness
        self.marks: list[tuple[dict[str, float], dict[str, float]]] = []
        self.next_failure = self._draw_failure()

    def run(self) -> None:
        self._admit()
        while len(self.ends) < self.steps:
            self._start_training()
            self._advance(self._until_next())
            self._finish_due()

    # What happens next.

    def _until_next(self) -> float:
        times = [self._until_sample(server) for server in self.servers]
        if self.waking:
            times.append(self.waking[0][0] - self.now)
        if self.training_s > 0:
            times.append(self.training_s / self._training_rate())
        elif self.publishing_s > 0:
            times.append(self.publishing_s)
        times.append(self.next_failure - self.now)
        until = min(times)
        assert until < math.inf, "nothing is running: the gate admitted too little"
        return max(until, 0.0)

    def _until_sample(self, server: _Server) -> float:
        """Until the next thing changes on it."""
        if server.down_s > 0:
            return server.down_s
        if server.stalled_s > 0:
            return server.stalled_s
        rate = self._generation_rate()
        if not server.has_work or rate == 0:
            return math.inf
        if server.backlog_s > 0:
            return server.backlog_s / rate
        return (server.running[0][0] - server.decoded) * self._step_s(server) / rate

    def _step_s(self, server: _Server) -> float:
        return self.spec.step_s(float(len(server.running)))

    def _generation_rate(self) -> float:
        return self.spec.generates_at if self.training_s > 0 else 1.0

    def _training_rate(self) -> float:
        if self.spec.trains_at == 1 or self.spec.generates_at == 0:
            return 1.0
        busy = any(s.has_work and s.down_s <= 0 and s.stalled_s <= 0 for s in self.servers)
        return self.spec.trains_at if busy else 1.0

    # Time passes.

    def _advance(self, seconds: float) -> None:
        training_rate, rate = self._training_rate(), self._generation_rate()
        for server in self.servers:
            self._advance_server(server, seconds, rate)
        if self.training_s > 0:
            self.spent["busy"] += seconds
            self.training_s = _less(self.training_s, seconds * training_rate)
        elif self.publishing_s > 0:
            self.spent["publishing"] += seconds
            self.publishing_s = _less(self.publishing_s, seconds)
        else:
            self.spent["waiting"] += seconds
        self.now += seconds

    def _advance_server(self, server: _Server, seconds: float, rate: float) -> None:
        if server.down_s > 0:
            server.spent["down"] += seconds
            server.down_s = _less(server.down_s, seconds)
        elif server.stalled_s > 0:
            server.spent["stalled"] += seconds
            server.stalled_s = _less(server.stalled_s, seconds)
        elif not server.has_work or rate == 0:
            server.spent["idle"] += seconds
        elif server.backlog_s > 0:
            server.spent["busy"] += seconds
            server.backlog_s = _less(server.backlog_s, seconds * rate)
        else:
            server.spent["busy"] += seconds
            server.decoded += seconds * rate / self._step_s(server)

    # What is due now.

    def _finish_due(self) -> None:
        for server in self.servers:
            while server.running and _reached(server.decoded, server.running[0][0]):
                _, _, length, group = heapq.heappop(server.running)
                group.tokens += length + self.spec.load.prompt
                self._wait_for_environment(group)
            if server.waiting:
                self._fill(server)
        while self.waking and self.waking[0][0] <= self.now:
            _, _, group = heapq.heappop(self.waking)
            self._complete_sample(group)
        if self.now >= self.next_failure:
            self._fail_one()
        if self.batch and self.training_s <= 0 and self.publishing_s <= 0:
            self._end_step()
        self._admit()

    def _wait_for_environment(self, group: _Group) -> None:
        mean = self.spec.load.environment_s
        delay = self.rng.uniform(0.4, 1.6) * mean if mean else 0.0
        self.num_drawn += 1
        heapq.heappush(self.waking, (self.now + delay, self.num_drawn, group))

    def _complete_sample(self, group: _Group) -> None:
        group.left -= 1
        if group.left == 0:
            self.num_accepted += 1
            self.incomplete[group.version] -= 1
            heapq.heappush(self.ready, (group.number, group))

    def _start_training(self) -> None:
        size = self.spec.load.prompts
        if self.batch or len(self.ready) < size or self._waits_for_oldest():
            return
        self.batch = [heapq.heappop(self.ready)[1] for _ in range(size)]
        tokens = sum(group.tokens for group in self.batch)
        self.training_s = self.spec.train_s * tokens / self.spec.load.tokens
        self.publishing_s = self.spec.publish_s

    def _waits_for_oldest(self) -> bool:
        """Whether a group that this step must train on, or it becomes too stale, is not there."""
        oldest = self.version - self.spec.load.staleness
        return any(count and version <= oldest for version, count in self.incomplete.items())

    def _end_step(self) -> None:
        tokens = sum(group.tokens for group in self.batch)
        age = sum(self.version - group.version for group in self.batch) / len(self.batch)
        self.batch = []
        self.version += 1
        self.incomplete = +self.incomplete  # without the versions that are done
        self.ends.append((self.now, tokens, age))
        generation = {
            key: sum(server.spent[key] for server in self.servers) for key in self.servers[0].spent
        }
        self.marks.append((dict(self.spent), generation))
        for server in self.servers:
            server.stalled_s = self.spec.stall_s
            server.backlog_s += self.spec.recompute_s * len(server.running)

    # The gate, and where its groups go.

    def _admit(self) -> None:
        load = self.spec.load
        for _ in range(self._capacity()):
            group = _Group(self.num_started, self.version, load.samples)
            self.num_started += 1
            self.incomplete[group.version] += 1
            server = min(self.servers, key=lambda server: (server.down_s > 0, server.rows))
            server.backlog_s += self.spec.prefill_s
            for _ in range(load.samples):
                server.waiting.append((self.draw(self.rng.random()), group))
            self._fill(server)

    def _capacity(self) -> int:
        """As StalenessManager.get_capacity."""
        load, running = self.spec.load, self.num_started - self.num_accepted
        budget = (load.staleness + self.version + 1) * load.prompts
        return max(0, min(load.in_flight - running, budget - (self.num_accepted + running)))

    def _fill(self, server: _Server) -> None:
        while server.waiting and len(server.running) < self.spec.max_running:
            length, group = server.waiting.popleft()
            self.num_drawn += 1
            heapq.heappush(server.running, (server.decoded + length, self.num_drawn, length, group))

    def _draw_failure(self) -> float:
        rate = self.spec.failures_per_hour * self.spec.num_servers / 3600
        return self.now + self.rng.expovariate(rate) if rate > 0 else math.inf

    def _fail_one(self) -> None:
        """A server is lost with the tokens of its sequences, which begin again elsewhere."""
        self.num_failures += 1
        self.next_failure = self._draw_failure()
        lost = self.rng.choice(self.servers)
        sequences = [(length, group) for _, _, length, group in lost.running]
        sequences += lost.waiting
        lost.running, lost.waiting, lost.backlog_s = [], deque(), 0.0
        lost.stalled_s, lost.down_s = 0.0, _RESTART_S
        for length, group in sequences:
            other = min(self.servers, key=lambda server: (server.down_s > 0, server.rows))
            other.waiting.append((length, group))
            other.backlog_s += self.spec.prefill_s / self.spec.load.samples
        for server in self.servers:
            self._fill(server)

    def result(self) -> Simulated:
        """Without the first fifth of the steps, in which the pipeline fills."""
        first = max(1, self.steps // 5)
        start, end = self.ends[first - 1][0], self.ends[-1][0]
        seconds, counted = end - start, self.ends[first:]
        (training_0, generation_0), (training, generation) = self.marks[first - 1], self.marks[-1]
        total = seconds * len(self.servers)
        return Simulated(
            steps=len(counted),
            seconds=seconds,
            tokens_per_s=self.spec.scale * sum(tokens for _, tokens, _ in counted) / seconds,
            step_s=seconds / len(counted),
            staleness=sum(age for _, _, age in counted) / len(counted),
            training={key: (training[key] - training_0[key]) / seconds for key in training},
            generation={key: (generation[key] - generation_0[key]) / total for key in generation},
            failures=self.num_failures,
        )


def _less(left: float, passed: float) -> float:
    """What is left; 0 where rounding alone remains."""
    return left - passed if left - passed > 1e-12 * max(left, 1.0) else 0.0


def _reached(decoded: float, end: float) -> bool:
    return decoded >= end - 1e-9 * max(end, 1.0)
