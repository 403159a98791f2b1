"""RemoteEngine: inference servers of any kind behind the InferenceEngine contract.

    process = ServerProcess(lambda: launch_vllm_server(path, python=..., token=token))
    engine = RemoteEngine(VLLMProtocol(path), [process.address], token, processes=[process])
    engine.initialize()
    reply = await engine.agenerate(ModelRequest(input_ids=[5, 7]))

Generation runs on the event loop of its first caller (client.py); control calls block and may come
from any other thread. Servers come and go while requests run (server_pool.py): a dead one is
restarted with the live weights if this process started it, otherwise dropped while another one
serves. Its requests continue elsewhere with the tokens they had.

How an update goes depends on the protocol:

    servers version tokens       tell all where the weights are; requests run on
    the client counts versions   verify the publication -> close the gate -> abort in-flight
                                 requests and drain -> load on all servers -> open the gate at the
                                 new version

A copy in a training rank that sends weights leaves the gate closed. `note_weights` of the owner
opens it, once servers that it replaced meanwhile have them too.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelRequest, ModelResponse, Sample, WeightUpdateMeta
from areal.engine.native.scoring import padded_scores, token_lists
from areal.engine.remote.admission import (
    LOOK_S,
    JoinsWithNextWeights,
    UpdateUnderWayError,
    verify_newcomer,
    wait_until_idle,
)
from areal.engine.remote.client import GenerateClient, runs_here
from areal.engine.remote.deadlines import Deadlines
from areal.engine.remote.protocol import ServerProtocol, WeightOrder
from areal.engine.remote.server_pool import ServerPool
from areal.engine.remote.server_process import ServerProcess
from areal.engine.remote.server_reports import server_reports
from areal.engine.remote.update_gate import UpdateGate
from areal.engine.remote.weight_senders import CollectiveSender, DeltaSender
from areal.engine.server_time import Intervals, ServerTimes
from areal.utils import logging

if TYPE_CHECKING:
    import torch

    from areal.weight_sync.bucket import Checksums

logger = logging.getLogger("RemoteEngine")

_COUNTS = ("requests_resent", "tokens_kept", "replies_refused")  # including those of copies
_LASTING = ("shm", "disk")  # can be loaded again later
_LOAD = ("version", "running", "waiting")
_STRAGGLERS_S = 2.0  # for aborted requests to return; one may reach its server after the abort
_JOIN_AGAIN_S = 0.5
_DROP_S = 30.0  # a live event loop needs milliseconds
_CLOSE_S = 60.0  # it needs seconds with thousands of requests in flight


class RemoteEngine(InferenceEngine):
    """`addrs` are "host:port". `request_timeout_s` bounds one attempt of a request and every
    control call, `setup_timeout_s` how long `initialize` waits for the servers, and
    `weight_group_timeout_s` how long a worker may keep a broadcast of weights waiting.

    Tokens at or beyond `vocab_size` are refused; `max_context` is the servers' limit on prompt and
    output tokens. `processes` are those of the servers, in the order of `addrs`; without them no
    server is restarted. `max_restarts` bounds restarts of each between two weight updates, or
    batches of `compute_logp`. Copies of this engine in other processes find restarted servers, and
    the version where it is counted here, in `address_file` and a file beside it. With
    `awaits_weights` the servers may have any: send them some before the first request.
    """

    def __init__(
        self,
        protocol: ServerProtocol,
        addrs: list[str],
        token: str,
        *,
        request_timeout_s: float = 3600.0,
        request_retries: int = 3,
        setup_timeout_s: float = 300.0,
        weight_group_timeout_s: float = 120.0,
        max_context: int | None = None,
        vocab_size: int | None = None,
        processes: Sequence[ServerProcess] = (),
        max_restarts: int = 3,
        address_file: Path | None = None,
        awaits_weights: bool = False,
    ) -> None:
        if not addrs:
            raise ValueError("addrs: expected at least one server address, got none")
        self._protocol = protocol
        self._setup_timeout_s = setup_timeout_s
        self._request_timeout_s = request_timeout_s
        self._request_retries = request_retries
        self._max_context = max_context
        self._vocab_size = vocab_size
        self._awaits_weights = awaits_weights
        self._pool = ServerPool(
            protocol,
            addrs,
            token,
            timeout_s=request_timeout_s,
            setup_timeout_s=setup_timeout_s,
            processes=processes,
            max_restarts=max_restarts,
            address_file=address_file,
        )
        self._gate: UpdateGate | None = None
        if not protocol.versions_tokens:
            file = None if address_file is None else address_file.with_suffix(".version.json")
            self._gate = UpdateGate(file)
        self._deadlines = Deadlines(request_timeout_s)  # of requests
        self._counts: Counter[str] = Counter()  # of requests, including those of copies
        self._collective = CollectiveSender(protocol, timeout_s=weight_group_timeout_s)
        self._delta = DeltaSender(protocol)
        self._joining = JoinsWithNextWeights(protocol, self._pool)
        self._start_here()

    def __getstate__(self) -> dict[str, Any]:
        """Training ranks and rollout workers have copies with their own connections."""
        own = {"_client": None, "_counts": Counter(), "_times": None, "_updating": None}
        return {**self.__dict__, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start_here()

    def _start_here(self) -> None:
        """What each process has for itself."""
        self._client: GenerateClient | None = None
        self._times = ServerTimes()  # of servers that do not measure it
        self._reported: dict[str, dict[str, float]] = {}  # by each server, when last asked
        self._updating = threading.Lock()

    @property
    def servers(self) -> list[str]:
        return self._pool.addresses

    def initialize(self) -> None:
        self._pool.open(awaits_weights=self._awaits_weights)
        self._times.follow(self.servers)
        if self._gate is None or self._pool.is_copy:
            return
        if self._awaits_weights:
            self._gate.close()
        else:
            self._gate.open(self._pool.newest_version or 0)
            self.get_version()  # raises unless all servers agree

    def destroy(self) -> None:
        """From any thread. Cancels pending calls."""
        self._collective.close()
        client, self._client = self._client, None
        if client is not None:
            _close_on_its_loop(client.events, client.close)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        return await self._client_here().generate(req)

    async def agenerate_group(
        self, req: ModelRequest, seeds: Sequence[int | None]
    ) -> list[Sample | Exception]:
        return await self._client_here().generate_group(req, seeds)

    def join(
        self, address: str, weights: WeightUpdateMeta | None = None, *, token: str | None = None
    ) -> None:
        """Add a server: it loads the live weights, which are verified, then it gets requests.

        `weights` is the update that brings these, by default the last one noted here; `token` is
        its own, by default that of the others. RuntimeError if it serves another model, or lacks
        the weights and no update can bring them.
        """
        deadline = time.monotonic() + self._setup_timeout_s
        while True:
            # Loaded before the lock is taken: the next update waits for what happens below it.
            preloaded = None if weights is not None else self._pool.preload(address, token)
            try:
                with self._updating:
                    return self._join(address, weights, token, preloaded)
            except UpdateUnderWayError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_JOIN_AGAIN_S)

    def _join(
        self,
        address: str,
        weights: WeightUpdateMeta | None,
        token: str | None,
        preloaded: WeightOrder | None,
    ) -> None:
        order = None if weights is None else self._protocol.weight_order(weights)
        gate, verify = self._gate, partial(verify_newcomer, self._protocol)
        version = None if gate is None else gate.version
        held = f"requests are held back, so {address} cannot be verified"
        if gate is not None and (self._pool.is_paused or not gate.serves(gate.version)):
            raise UpdateUnderWayError(held)
        try:
            self._pool.join(address, order, token=token, preloaded=preloaded, verify=verify)
        except RuntimeError as error:
            if gate is not None and version is not None and not gate.serves(version):
                raise UpdateUnderWayError(held) from error  # by a rank, which has a copy of this
            raise

    def join_with_next_weights(
        self, address: str, *, token: str | None = None, timeout_s: float
    ) -> None:
        """As `join`, where nothing holds the weights of the others (`xccl`, `delta`): the next
        update sends them to this server too. Returns when it has joined; RuntimeError if it cannot,
        or if no update comes in time. Call it from another thread than that of updates."""
        self._joining.join(address, token, timeout_s=timeout_s)

    def leave(self, address: str) -> None:
        """Remove a server: it gets no more requests; returns when its in-flight ones are done, also
        those of copies of this engine. A server that was started here is ended."""
        client = self._client
        if client is not None and not client.events.is_running():
            client = None
        if client is not None and runs_here(client.events):
            raise RuntimeError("leave blocks: call it from another thread than agenerate")
        control = self._pool.drain(address)
        try:
            if client is not None:
                drained = asyncio.run_coroutine_threadsafe(client.drain(address), client.events)
                drained.result(self._request_timeout_s)
            wait_until_idle(self._protocol, control, timeout_s=self._request_timeout_s)
        except BaseException:
            self._pool.stop_draining(address)
            raise
        self._pool.leave(address)

    def member_states(self) -> dict[str, str]:
        """`serving`, `draining`, `restarting` or `joining` (with the next weights), by address.
        Asks nobody."""
        return {**self._pool.states(), **dict.fromkeys(self._pool.awaiting, "joining")}

    def member_loads(self) -> dict[str, dict[str, float]]:
        """By address, version and requests of each server at the last `stats()`; asks nobody."""
        return self._reported

    def server_states(self) -> list[dict[str, Any]]:
        """Of each server address, state (`serving`, `draining`), and what it reports of version
        and load; `silent` instead of the state if it reports nothing."""
        return server_reports(self._protocol, self._pool)

    def pause_generation(self) -> None:
        self._pool.set_paused(True)
        self._times.begin("paused")

    def continue_generation(self) -> None:
        self._pool.set_paused(False)
        self._times.end("paused")

    def update_weights(
        self,
        meta: WeightUpdateMeta,
        named_tensors: Iterator[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        load, order = self._loading(meta, named_tensors)
        with self._updating:
            if self._gate is not None:
                self._update_between_requests(self._gate, meta.version, load, order)
                return
            self._pool.expect_weights(meta.version)
            load()
            if named_tensors is None:
                self._pool.remember_weights(meta.version, order)

    def expect_weights(self, version: int) -> None:
        self._pool.expect_weights(version)
        self._joining.begin_update()

    @property
    def newest_version(self) -> int | None:
        return self._pool.newest_version

    def note_weights(self, meta: WeightUpdateMeta) -> None:
        # Where it is counted here and the same, they were sent from here, not by a copy.
        if self._gate is None or self._pool.version != meta.version:
            self._pool.note_weights(meta.version, self._lasting_order(meta))
            if self._gate is not None:
                self._book_update(self._gate)
                self._gate.open(meta.version)
        self._joining.admit(meta.version)

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Register a LoRA adapter as `name`, for requests with that `gconfig.lora_name`."""
        self._pool.load_adapter(name, str(Path(folder).absolute()))

    def unload_adapter(self, name: str) -> None:
        self._pool.unload_adapter(name)

    def compute_logp(self, data: dict[str, Any]) -> torch.Tensor:
        """Each server scores a share of the rows."""
        rows = token_lists(data)
        count = min(len(self._pool.controls), len(rows))
        shares = [rows[index::count] for index in range(count)]
        scores: list[list[float]] = [[] for _ in rows]

        def score(index: int) -> list[list[float]]:
            return self._pool.on_one(index, lambda c: self._protocol.score(c, shares[index]))

        with ThreadPoolExecutor(count, thread_name_prefix="score") as threads:
            for index, answer in enumerate(threads.map(score, range(count))):
                scores[index::count] = answer
        self._pool.restarts.renew()  # servers of a teacher get no weight updates
        return padded_scores(scores, data)

    def weight_checksums(self) -> dict[str, Checksums]:
        found = self._pool.on_all(self._protocol.weight_checksums)
        return {control.address: checksums for control, checksums in found.items()}

    def layer_trace(self, tokens: Sequence[int]) -> dict[str, dict[str, Any]]:
        found = self._pool.on_all(lambda c: self._protocol.layer_trace(c, list(tokens)))
        return {control.address: trace for control, trace in found.items()}

    def offload(self, tags: Sequence[str] | None = None) -> None:
        """The time until `onload` does not count towards the timeout of waiting requests."""
        if not self._protocol.offloads:
            raise NotImplementedError(f"a {self._protocol.kind} cannot leave its device")
        self._deadlines.stop()
        self._times.begin("offloaded")
        self._pool.offload(tags)

    def onload(self, tags: Sequence[str] | None = None) -> None:
        self._pool.onload(tags)
        if not self._pool.offloaded:
            self._times.end("offloaded")
            self._deadlines.resume()

    def get_version(self) -> int:
        """The oldest version any server serves. Where it is counted here, RuntimeError if a server
        records another."""
        served = self._pool.on_all(self._protocol.served_version)
        if self._gate is None:
            return min(version for version in served.values() if version is not None)
        counted = self._gate.version
        for control, noted in served.items():
            if noted not in (None, counted):
                raise RuntimeError(
                    f"{control.kind} {control.address} serves version {noted}, expected "
                    f"{counted}: it was started again, or somebody else gave it weights"
                )
        return counted

    def stats(self) -> dict[str, float]:
        """Summed over the servers, except the version, which is the oldest; counters of a dead
        server are lost."""
        by_server = self._pool.on_all(self._protocol.stats)
        self._reported = {
            control.address: {
                name: stats[name] for name in _LOAD if math.isfinite(stats.get(name, math.nan))
            }
            for control, stats in by_server.items()
        }
        answers = list(by_server.values())
        total: dict[str, float] = {}
        for stats in answers:
            for name, value in stats.items():
                total[name] = total.get(name, 0) + value
        if self._gate is None:
            total["version"] = min(stats["version"] for stats in answers)
        else:
            total["version"] = self._gate.version
            self._times.follow([control.address for control in by_server])
            self._book_update(self._gate)
            total |= self._times.stats()
        return {
            **total,
            **{name: self._counts[name] for name in _COUNTS},
            "servers": len(answers),
            "restarts": self._pool.restarts.num_all,
        }

    def take_counts(self) -> dict[str, int]:
        taken = dict(self._counts)
        self._counts.clear()
        return taken

    def add_counts(self, counts: Mapping[str, int]) -> None:
        self._counts.update(counts)

    def take_in_flight(self) -> dict[str, Intervals]:
        return {} if self._gate is None else self._times.in_flight.take()

    def add_in_flight(self, intervals: Mapping[str, Intervals]) -> None:
        self._times.add_busy(intervals)

    def busy_intervals(self, since: float) -> dict[str, Intervals]:
        """Per server address, when it computed after `since` (`time.time()`): for the trace. For
        servers that do not report it, when requests were in flight."""
        answers = self._pool.on_all(lambda c: self._protocol.busy_intervals(c, since))
        found = {c.address: intervals for c, intervals in answers.items() if intervals is not None}
        return found or self._times.busy_since(since)

    def _loading(
        self, meta: WeightUpdateMeta, named_tensors: Iterator[tuple[str, torch.Tensor]] | None
    ) -> tuple[Callable[[], object], WeightOrder | None]:
        """A function that loads the weights on all servers, and the order for later servers."""
        types = self._protocol.weight_types
        if meta.type in types:
            if meta.type == "xccl" and named_tensors is not None:
                return partial(self._broadcast, meta, named_tensors), None
            if meta.type == "delta" and named_tensors is not None:
                return partial(self._delta.send, self._pool, meta, named_tensors), None
            if named_tensors is None:
                order = self._protocol.weight_order(meta)
                load = partial(self._pool.on_all, lambda c: self._protocol.load_weights(c, order))
                return load, order if meta.type in _LASTING else None
        raise ValueError(
            f"a {self._protocol.kind} takes whole models by {', '.join(types)}, got type "
            f"{meta.type!r}; set actor.weight_update_mode to one of these"
        )

    def _broadcast(
        self, meta: WeightUpdateMeta, named_tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        self._pool.follow_owner()
        members = self._pool.controls
        # One that joins may have died since `expect_weights`.
        newcomers = self._pool.receivers[len(members) :]
        there = tuple(control for control in newcomers if control.is_there(LOOK_S))
        self._collective.send(members, meta, named_tensors, newcomers=there)

    def _lasting_order(self, meta: WeightUpdateMeta) -> WeightOrder | None:
        """None for transports that leave nothing to load later."""
        return self._protocol.weight_order(meta) if meta.type in _LASTING else None

    def _update_between_requests(
        self,
        gate: UpdateGate,
        version: int,
        load: Callable[[], object],
        order: WeightOrder | None,
    ) -> None:
        self._interrupt_all(gate)
        try:
            # A server replaced from here on loads these, so that none is stale when the gate opens.
            self._pool.remember_weights(version, order)
            gate.begin_load()
            load()
            self._resume_unless_paused()
        except BaseException as err:
            # Servers may have part of the new weights, so no version is consistent any more.
            self._book_update(gate)
            gate.fail(f"no weights serve: version {version} did not load: {err}")
            raise
        if not self._pool.is_copy:
            self._book_update(gate)
            gate.open(version)

    def _book_update(self, gate: UpdateGate) -> None:
        """The time since a weight update closed the gate, here or in a copy."""
        if (closed_at := gate.closed_at) is not None:
            self._times.add("control", closed_at, time.time())

    def _interrupt_all(self, gate: UpdateGate) -> None:
        """Returns when no request is in flight and the gate is closed; resumes all on an error."""
        client = self._client
        if client is not None and runs_here(client.events):
            raise RuntimeError("update_weights blocks: call it from another thread than agenerate")
        gate.close()
        try:
            self._pool.on_all(self._protocol.interrupt)
            if not gate.wait_empty(_STRAGGLERS_S) and client is not None:
                client.events.call_soon_threadsafe(client.drop_exchanges)
                if not gate.wait_empty(_DROP_S):
                    raise RuntimeError(
                        f"requests to {', '.join(self.servers)} did not end within {_DROP_S:g} s: "
                        "the event loop that generates is blocked"
                    )
        except BaseException:
            self._book_update(gate)
            gate.open(gate.version)
            with suppress(RuntimeError):  # the original error matters more
                self._resume_unless_paused()
            raise

    def _resume_unless_paused(self) -> None:
        if not self._pool.is_paused:
            self._pool.on_all(self._protocol.resume)

    def _client_here(self) -> GenerateClient:
        """The client of the running event loop; a closed loop is replaced by the next."""
        client = self._client
        if client is None or client.events.is_closed():
            client = self._client = GenerateClient(
                self._protocol,
                self._pool,
                gate=self._gate,
                deadlines=self._deadlines,
                retries=self._request_retries,
                max_context=self._max_context,
                vocab_size=self._vocab_size,
                counts=self._counts,
                in_flight=self._times.in_flight,
            )
        elif not runs_here(client.events):
            raise RuntimeError("agenerate was called from two event loops; use one engine per loop")
        return client


def _close_on_its_loop(
    events: asyncio.AbstractEventLoop, close: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Runs `close()` on `events`; waits for it, unless this is the loop's own thread."""
    if events.is_closed():
        return
    if not events.is_running():
        events.run_until_complete(close())
    elif runs_here(events):
        events.create_task(close(), name="client-close")
    else:
        try:
            asyncio.run_coroutine_threadsafe(close(), events).result(_CLOSE_S)
        except TimeoutError:
            logger.warning(
                "connections to servers are not closed after %g s: left to end", _CLOSE_S
            )
