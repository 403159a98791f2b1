"""NativeRemoteEngine: native servers behind the InferenceEngine contract, and how to start one.

    child, address = launch_native_server(path, token=token)
    engine = NativeRemoteEngine([address], token)
    engine.initialize()
    reply = await engine.agenerate(ModelRequest(input_ids=[5, 7]))
    engine.destroy()
    child.terminate()

Generation runs on the event loop of its first caller (batching_client.py); control calls block and
may come from any other thread (server_control.py).

Servers come and go while requests run (server_pool.py). A dead server is restarted with the live
weights if this process started it (`processes`); otherwise it is dropped while another one serves.
Its requests continue elsewhere with the tokens they had. `join` adds a server and loads the live
weights into it, `leave` removes one once its requests are finished.

Weight senders: `NativeGroupRoutes` are the servers' routes for a broadcast (collective_sender.py).
`DeltaSender` keeps the weights published last; after a failure, and for servers that lack the base
of a delta, it publishes in full.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelRequest, ModelResponse, WeightUpdateMeta, check_logprobs
from areal.engine.native.scoring import padded_scores, token_lists
from areal.engine.native.wire import check_supported
from areal.engine.remote.batching_client import Deadlines, GenerateClient
from areal.engine.remote.client import close_on_its_loop, runs_here
from areal.engine.remote.collective_sender import CollectiveSender, GroupRoutes
from areal.engine.remote.server_control import BadReplyError, ControlClient, ServerRefusedError
from areal.engine.remote.server_pool import ServerPool, served_version
from areal.engine.remote.server_process import ServerProcess
from areal.utils.child_process import ChildProcess
from areal.utils.device import best_device
from areal.weight_sync.collective import GroupPlace
from areal.weight_sync.delta import DeltaPublisher
from areal.weight_sync.transports import remove_old_versions

if TYPE_CHECKING:
    import torch


_COUNTS = ("requests_resent", "tokens_kept", "replies_refused")  # including those of copies


class NativeRemoteEngine(InferenceEngine):
    """`addrs` are "host:port". `request_timeout_s` bounds one attempt of a request and every
    control call, `setup_timeout_s` how long `initialize` waits for the servers, and
    `weight_group_timeout_s` how long a server may keep a broadcast of weights waiting.

    Tokens at or beyond `vocab_size` are refused.
    `processes` are those of the servers, in the order of `addrs`; without them no server is
    restarted. `max_restarts` bounds restarts between two weight updates. `address_file` is where
    copies of this engine in other processes find the address of a restarted server.
    """

    def __init__(
        self,
        addrs: list[str],
        token: str,
        *,
        request_timeout_s: float = 3600.0,
        request_retries: int = 3,
        setup_timeout_s: float = 300.0,
        weight_group_timeout_s: float = 120.0,
        vocab_size: int | None = None,
        processes: Sequence[ServerProcess] = (),
        max_restarts: int = 3,
        address_file: Path | None = None,
    ) -> None:
        if not addrs:
            raise ValueError("addrs: expected at least one server address, got none")
        self._token = token
        self._request_timeout_s = request_timeout_s
        self._request_retries = request_retries
        self._vocab_size = vocab_size
        self._pool = ServerPool(
            addrs,
            token,
            timeout_s=request_timeout_s,
            setup_timeout_s=setup_timeout_s,
            processes=processes,
            max_restarts=max_restarts,
            address_file=address_file,
        )
        self._deadlines = Deadlines(request_timeout_s)  # of requests
        self._client: GenerateClient | None = None
        self._counts: Counter[str] = Counter()  # of requests, including those of copies
        self._collective = CollectiveSender(NativeGroupRoutes(), timeout_s=weight_group_timeout_s)
        self._delta = DeltaSender()

    def __getstate__(self) -> dict[str, Any]:
        """Training ranks and rollout workers have copies with their own connections."""
        return {**self.__dict__, "_client": None, "_counts": Counter()}

    @property
    def servers(self) -> list[str]:
        return self._pool.addresses

    def initialize(self) -> None:
        self._pool.open()

    def destroy(self) -> None:
        """From any thread. Cancels pending calls."""
        self._collective.close()
        client, self._client = self._client, None
        if client is not None:
            close_on_its_loop(client.events, client.close)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        check_supported(req)
        start = time.perf_counter()
        reply = await self._client_here().generate(req)
        return reply.response(req, latency=time.perf_counter() - start)

    def join(self, address: str, weights: WeightUpdateMeta | None = None) -> None:
        """Add a server: it loads the live weights, then gets requests.

        `weights` is the update that brings these, by default the last one noted here. RuntimeError
        if it serves another model, or lacks the weights and no update can bring them.
        """
        self._pool.join(address, None if weights is None else _weight_order(weights))
        client = self._client
        if client is not None and not client.events.is_closed():
            client.events.call_soon_threadsafe(client.add_server, address)

    def leave(self, address: str) -> None:
        """Remove a server: it gets no more requests; returns when its in-flight ones are done."""
        client = self._client
        if client is not None and not client.events.is_running():
            client = None
        if client is not None and runs_here(client.events):
            raise RuntimeError("leave blocks: call it from another thread than agenerate")
        self._pool.leave(address)
        if client is not None:
            drained = asyncio.run_coroutine_threadsafe(client.drain(address), client.events)
            drained.result(self._request_timeout_s)

    def pause_generation(self) -> None:
        self._pool.set_paused(True)

    def continue_generation(self) -> None:
        self._pool.set_paused(False)

    def update_weights(
        self,
        meta: WeightUpdateMeta,
        named_tensors: Iterator[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        self._pool.expect_weights(meta.version)
        if meta.type == "xccl" and named_tensors is not None:
            return self._collective.send(self._pool.controls, meta, named_tensors)
        if meta.type == "delta" and named_tensors is not None:
            return self._delta.send(self._pool, meta, named_tensors)
        if meta.type == "direct" or named_tensors is not None:
            raise ValueError(
                "a server in another process cannot take tensors directly; "
                "set actor.weight_update_mode to shm or disk"
            )
        order = _weight_order(meta)
        self._pool.on_all(lambda control: control.post("/update_weights", **order))
        self._pool.remember_weights(meta.version, _lasting_order(meta))

    def expect_weights(self, version: int) -> None:
        self._pool.expect_weights(version)

    @property
    def newest_version(self) -> int | None:
        return self._pool.newest_version

    def note_weights(self, meta: WeightUpdateMeta) -> None:
        self._pool.note_weights(meta.version, _lasting_order(meta))

    def compute_logp(self, data: dict[str, Any]) -> torch.Tensor:
        """Each server scores a share of the rows."""
        rows = token_lists(data)
        count = len(self._pool.controls)
        shares = [rows[index::count] for index in range(count)]
        scores: list[list[float]] = [[] for _ in rows]
        with ThreadPoolExecutor(count, thread_name_prefix="native-score") as pool:
            answers = pool.map(
                lambda index: self._pool.on_one(index, lambda c: _post_score(c, shares[index])),
                range(count),
            )
            for index, answer in enumerate(answers):
                scores[index::count] = answer
        return padded_scores(scores, data)

    def offload(self, tags: Sequence[str] | None = None) -> None:
        """The time until `onload` does not count towards the timeout of waiting requests."""
        self._deadlines.stop()
        self._pool.offload(tags)

    def onload(self, tags: Sequence[str] | None = None) -> None:
        self._pool.onload(tags)
        if not self._pool.offloaded:
            self._deadlines.resume()

    def get_version(self) -> int:
        """The oldest version any server serves."""
        return min(self._pool.on_all(served_version).values())

    def stats(self) -> dict[str, float]:
        """Summed over the servers, except the version, which is the oldest; counters of a dead
        server are lost."""
        answers = list(self._pool.on_all(lambda control: control.get("/stats")).values())
        total: dict[str, float] = {}
        for stats in answers:
            for name, value in stats.items():
                total[name] = total.get(name, 0) + value
        return {
            **total,
            **{name: self._counts[name] for name in _COUNTS},
            "version": min(stats["version"] for stats in answers),
            "servers": len(answers),
            "restarts": self._pool.num_restarts,
        }

    def take_counts(self) -> dict[str, int]:
        taken = dict(self._counts)
        self._counts.clear()
        return taken

    def add_counts(self, counts: Mapping[str, int]) -> None:
        self._counts.update(counts)

    def busy_intervals(self, since: float) -> dict[str, list[tuple[float, float]]]:
        """Per server address, when it computed after `since` (`time.time()`): for the trace."""
        answers = self._pool.on_all(lambda control: control.get("/busy_intervals", since=since))
        return {
            control.address: [(start, end) for start, end in answer["intervals"]]
            for control, answer in answers.items()
        }

    def _client_here(self) -> GenerateClient:
        """The client of the running event loop; a closed loop is replaced by the next."""
        client = self._client
        if client is None or client.events.is_closed():
            client = self._client = GenerateClient(
                self._pool,
                self._token,
                deadlines=self._deadlines,
                retries=self._request_retries,
                vocab_size=self._vocab_size,
                counts=self._counts,
            )
        elif not runs_here(client.events):
            raise RuntimeError("agenerate was called from two event loops; use one engine per loop")
        return client


def launch_native_server(
    model_path: str | Path,
    *,
    token: str,
    threads: int = 1,
    page_size: int = 16,
    num_pages: int | None = None,
    max_running: int = 512,
    batch_invariant: bool = False,
    tensor_parallel: int = 1,
    dtype: str | None = None,
    device: str | None = "cpu",
    seed: int = 0,
    gpus: Sequence[str] | None = None,
    host: str = "127.0.0.1",
    log_path: str | Path | None = None,
    setup_timeout_s: float = 300.0,
) -> tuple[ChildProcess, str]:
    """Starts `areal serve` as a child of this process; (the child, its "host:port").

    `gpus` are those it may use, by default the ones this process sees; `device` None is the best it
    has. `host` is the address to listen on.

    RuntimeError with its last output if it exits or is not ready in time; it is then terminated.
    """
    options = {
        "model": model_path,
        "threads": threads,
        "page-size": page_size,
        "num-pages": num_pages,
        "max-running": max_running,
        "tensor-parallel": tensor_parallel,
        "dtype": dtype,
        "device": device or best_device(),
        "seed": seed,
        "host": host,
    }
    argv = [sys.executable, "-m", "areal.cli.main", "serve", "--port", "0"]
    for name, value in options.items():
        if value is not None:
            argv += [f"--{name}", str(value)]
    if batch_invariant:
        argv.append("--batch-invariant")
    # Not an argument, which every user of the machine can read.
    env = {"AREAL_SERVER_TOKEN": token, "OMP_NUM_THREADS": str(threads)}
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    child = ChildProcess(argv, name="native server", env=env, log_path=log_path)
    try:
        line = child.wait_ready(timeout_s=setup_timeout_s, is_ready=lambda line: line[:1] == "{")
    except BaseException:  # also Ctrl-C: a half-started server must not stay
        child.terminate()
        raise
    ready = json.loads(line)
    return child, f"{ready['host']}:{ready['port']}"


def _weight_order(meta: WeightUpdateMeta) -> dict[str, Any]:
    place = {"path": meta.path, "key": meta.key}
    return {**place, "version": meta.version, "recompute_kv": meta.recompute_kv}


def _lasting_order(meta: WeightUpdateMeta) -> dict[str, Any] | None:
    """The order to load a publication; None for transports that leave nothing to load later."""
    return _weight_order(meta) if meta.type in ("shm", "disk") else None


def _post_score(control: ControlClient, sequences: list[list[int]]) -> list[list[float]]:
    """One number per token of each sequence."""
    if not sequences:
        return []
    scores = control.post("/score", sequences=sequences).get("logprobs")
    try:
        if not isinstance(scores, list) or len(scores) != len(sequences):
            raise ValueError(f"logprobs: expected {len(sequences)} lists, got {scores!r:.60}")
        for sequence, its_scores in zip(sequences, scores, strict=True):
            check_logprobs(its_scores, low=-math.inf)
            if len(its_scores) != len(sequence):
                raise ValueError(f"logprobs: {len(its_scores)} came for {len(sequence)} tokens")
    except ValueError as err:
        raise BadReplyError(f"native server {control.address}: malformed reply: {err}") from err
    return scores


class NativeGroupRoutes(GroupRoutes):
    """One process of a server is in the group, and passes the weights to its other ranks."""

    def devices(self, control: ControlClient) -> list[str]:
        return [control.get("/health")["device"]]

    def join(self, control: ControlClient, place: GroupPlace) -> None:
        control.post("/init_weights_group", **asdict(place))

    def take(self, control: ControlClient, group: str, meta: WeightUpdateMeta) -> None:
        order = {"version": meta.version, "recompute_kv": meta.recompute_kv}
        control.post("/update_weights", kind="xccl", group=group, **order)


class DeltaSender:
    def __init__(self) -> None:
        self._publisher = DeltaPublisher()

    def send(
        self,
        pool: ServerPool,
        meta: WeightUpdateMeta,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        how = {"bucket_bytes": meta.weight_chunked_mem_mb << 20, "key": meta.key}
        try:
            self._publisher.publish(named_tensors, meta.path, meta.version, **how)
            if not _told_all(pool, meta):
                self._publisher.publish_whole(meta.path, meta.version, **how)
                _told_all(pool, meta)
        except BaseException:
            self._publisher.forget()
            raise
        if meta.clear_checkpoint_after_load:
            remove_old_versions(Path(meta.path).parent)


def _told_all(pool: ServerPool, meta: WeightUpdateMeta) -> bool:
    """Whether every server has the version now; False when one lacks the base of the delta."""
    order = {"path": meta.path, "key": meta.key, "version": meta.version}
    order["recompute_kv"] = meta.recompute_kv

    def tell(control: ControlClient) -> bool:
        if control.get("/health")["version"] == meta.version:  # already loaded from the delta
            return True
        try:
            control.post("/update_weights", kind="delta", **order)
        except ServerRefusedError as err:
            if err.status != 409:
                raise
            return False
        return True

    return all(pool.on_all(tell).values())
