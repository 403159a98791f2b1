"""NativeRemoteEngine: native servers behind the InferenceEngine contract, and how to start one.

    child, address = launch_native_server(path, token=token)
    engine = NativeRemoteEngine([address], token)
    engine.initialize()
    reply = await engine.agenerate(ModelRequest(input_ids=[5, 7]))
    engine.destroy()
    child.terminate()

Generation runs on the event loop of its first caller (exchange.py); control calls block and may
come from any thread (../server_control.py).

A server whose process this one started (`processes`) is replaced when it dies: whoever sees it
first starts another, which loads the weights that served last (`note_weights`) before it is given a
request. Nothing that was asked for is lost; what was half generated is made again. Copies of the
engine in other processes find the new address in a file (address_file.py).

    watcher of a process   waits for: its end        unblocked by: it, or the process's `close`
    a lost call            waits for: a replacement  unblocked by: it, or EngineLostError
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from areal.api.engine_api import EngineLostError, InferenceEngine
from areal.api.io_struct import ModelRequest, ModelResponse, WeightUpdateMeta
from areal.engine.event_loop import close_on_its_loop, runs_here
from areal.engine.native.address_file import AddressFile
from areal.engine.native.deadlines import Deadlines
from areal.engine.native.device_parts import device_parts, parts_that_leave
from areal.engine.native.exchange import GenerateClient
from areal.engine.native.score_rows import padded_scores, token_lists
from areal.engine.native.server_process import ServerProcess
from areal.engine.native.weight_senders import CollectiveSender, DeltaSender
from areal.engine.native.wire import check_supported
from areal.engine.server_control import ControlClient, ServerError, ServerRefusedError, on_all
from areal.utils import logging
from areal.utils.child_process import ChildProcess
from areal.utils.waits import waiting

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("NativeRemoteEngine")

T = TypeVar("T")

_LOOK_S = 0.1  # between two looks of a copy for the replacement
_ANSWER_S = 5.0  # for a server that is there to say so


class NativeRemoteEngine(InferenceEngine):
    """`addrs` are "host:port". `request_timeout_s` bounds one attempt of a request and every
    control call, `setup_timeout_s` how long `initialize` waits for the servers, and
    `weight_group_timeout_s` how long a server may keep a broadcast of weights waiting.

    `processes` are those of the servers, in the order of `addrs`; without them nobody is replaced.
    `max_restarts` bounds the replacements between two weight updates. `address_file` is where
    copies of this engine look for a replacement; without it they only try again.
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
        processes: Sequence[ServerProcess] = (),
        max_restarts: int = 3,
        address_file: Path | None = None,
    ) -> None:
        if not addrs:
            raise ValueError("addrs: expected at least one server address, got none")
        self._addrs = list(addrs)
        self._token = token
        self._request_timeout_s = request_timeout_s
        self._request_retries = request_retries
        self._setup_timeout_s = setup_timeout_s
        self._controls = [self._control(addr) for addr in addrs]
        self._deadlines = Deadlines(request_timeout_s)  # of requests
        self._client: GenerateClient | None = None
        self._processes = processes
        self._is_copy = False
        self._max_restarts = max_restarts
        self._file = None if address_file is None else AddressFile(address_file)
        self._replacing = threading.Lock()  # guards all below
        self._num_restarts = self._num_recent_restarts = 0
        self._replaced: dict[str, str] = {}  # address of a dead server -> of the one in its place
        self._weights: dict[str, Any] | None = None  # the order that brought those that serve
        self._paused = False
        self._offloaded: set[str] = set()
        self._collective = CollectiveSender(self._controls, timeout_s=weight_group_timeout_s)
        self._delta = DeltaSender(self._controls)

    def __getstate__(self) -> dict[str, Any]:
        """Training ranks and rollout workers have copies. Connections and processes stay where they
        are: a copy replaces nobody."""
        left = {"_client": None, "_processes": (), "_replacing": None, "_is_copy": True}
        return {**self.__dict__, **left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._replacing = threading.Lock()

    def initialize(self) -> None:
        """A copy has nothing to wait for: a server it cannot reach is just being replaced."""
        if self._is_copy:
            return
        # One of our own has said that it is ready; if it is gone by now it will not come back.
        timeout_s = 0.0 if self._processes else self._setup_timeout_s
        self._on_all(lambda control: control.wait_until_healthy(timeout_s))
        if self._file is not None:
            self._file.write(self._addrs)
        for index, process in enumerate(self._processes):
            threading.Thread(
                target=self._watch,
                args=(index, process),
                name=f"native-server{index}-watch",
                daemon=True,
            ).start()

    def destroy(self) -> None:
        """From any thread. Calls that still wait are cancelled."""
        self._collective.close()
        client, self._client = self._client, None
        if client is not None:
            close_on_its_loop(client.events, client.close)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        check_supported(req)
        start = time.perf_counter()
        reply = await self._client_here().generate(req)
        return reply.response(req, latency=time.perf_counter() - start)

    def pause_generation(self) -> None:
        self._paused = True
        self._on_all(lambda control: control.post("/pause"))

    def continue_generation(self) -> None:
        self._paused = False
        self._on_all(lambda control: control.post("/continue"))

    def update_weights(
        self,
        meta: WeightUpdateMeta,
        named_tensors: Iterator[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        if meta.type == "xccl" and named_tensors is not None:
            return self._collective.send(meta, named_tensors)
        if meta.type == "delta" and named_tensors is not None:
            return self._delta.send(meta, named_tensors)
        if meta.type == "direct" or named_tensors is not None:
            raise ValueError(
                "a server in another process cannot take tensors directly; "
                "set actor.weight_update_mode to shm or disk"
            )
        order = _weight_order(meta)
        self._on_all(lambda control: control.post("/update_weights", **order))

    def note_weights(self, meta: WeightUpdateMeta) -> None:
        with self._replacing:
            self._weights, self._num_recent_restarts = _weight_order(meta), 0

    def compute_logp(self, data: dict[str, Any]) -> torch.Tensor:
        """Each server scores a share of the rows."""
        rows = token_lists(data)
        shares = [rows[i :: len(self._controls)] for i in range(len(self._controls))]
        scores: list[list[float]] = [[] for _ in rows]
        with ThreadPoolExecutor(len(shares), thread_name_prefix="native-score") as pool:
            answers = pool.map(
                lambda index: self._on(index, lambda c: _post_score(c, shares[index])),
                range(len(shares)),
            )
            for index, answer in enumerate(answers):
                scores[index :: len(shares)] = answer
        return padded_scores(scores, data)

    def offload(self, tags: Sequence[str] | None = None) -> None:
        """The time until `onload` does not count as that of the requests which wait for it."""
        self._deadlines.stop()
        self._offloaded |= parts_that_leave(tags)
        self._on_all(lambda control: control.post("/offload", **_tags(tags)))

    def onload(self, tags: Sequence[str] | None = None) -> None:
        self._offloaded -= device_parts(tags)
        self._on_all(lambda control: control.post("/onload", **_tags(tags)))
        if not self._offloaded:
            self._deadlines.go_on()

    def get_version(self) -> int:
        """The oldest version any server serves."""
        return min(health["version"] for health in self._on_all(lambda c: c.get("/health")))

    def stats(self) -> dict[str, float]:
        """Summed over the servers, except the version; those of a server that died are gone."""
        resent = self._client.num_resent if self._client is not None else 0
        total: dict[str, float] = {"restarts": self._num_restarts, "requests_resent": resent}
        for stats in self._on_all(lambda control: control.get("/stats")):
            for name, value in stats.items():
                total[name] = value if name == "version" else total.get(name, 0) + value
        return total

    def busy_intervals(self, since: float) -> dict[str, list[tuple[float, float]]]:
        """Per server address, when it computed after `since` (`time.time()`): for the trace."""
        answers = self._on_all(lambda control: control.get("/busy_intervals", since=since))
        return {
            control.address: [(start, end) for start, end in answer["intervals"]]
            for control, answer in zip(self._controls, answers, strict=True)
        }

    def _on_all(self, call: Callable[[ControlClient], T]) -> list[T]:
        numbers = range(len(self._controls))
        return on_all(numbers, lambda index: self._on(index, call))

    def _on(self, index: int, call: Callable[[ControlClient], T]) -> T:
        """The call on one server, and again on its replacement when it turns out to be dead."""
        control = self._controls[index]
        try:
            return call(control)
        except ServerRefusedError:
            raise
        except ServerError:
            if self._replace(control.address) == control.address:
                raise
            return call(self._controls[index])

    def _replace(self, address: str) -> str:
        """The address of the server in the place of `address`; the same one while that runs."""
        with self._replacing:
            if address in self._replaced:  # whoever lost a connection first has seen to it
                return self._replaced[address]
            index = self._addrs.index(address)
            with waiting(f"the replacement of native server {address}"):
                replacement = self._find_other(index)
            if replacement != address:
                self._replaced.pop(replacement, None)  # a port may come again
                self._addrs[index] = self._replaced[address] = replacement
                self._controls[index] = self._control(replacement)
                if not self._is_copy and self._file is not None:
                    self._file.write(self._addrs)
            return replacement

    def _watch(self, index: int, process: ServerProcess) -> None:
        """Calls of copies do not pass here, so nobody else may see the end of the process."""
        while process.wait_end():
            try:
                self._replace(self._addrs[index])
            except EngineLostError as error:  # raised again by the next call, here or in a copy
                logger.error("native server %d is lost: %s", index, error)
                if self._file is not None:
                    self._file.write_loss(str(error))
                return

    def _find_other(self, index: int) -> str:
        """The address that counts from now on, the same one while its server runs."""
        if self._is_copy and self._file is not None:
            return self._wait_for_owner(index, self._file)
        end = self._processes[index].describe_end() if self._processes else None
        return self._addrs[index] if end is None else self._start_again(self._processes[index], end)

    def _wait_for_owner(self, index: int, file: AddressFile) -> str:
        """In a copy: the owner of the processes sees their end, too."""
        control = self._controls[index]
        deadline = time.monotonic() + self._setup_timeout_s
        while time.monotonic() < deadline:
            address = file.read()[index]
            if address != control.address or control.is_there(_ANSWER_S):
                return address
            time.sleep(_LOOK_S)
        limit = f"{self._setup_timeout_s:g} s (rollout.setup_timeout)"
        raise ServerError(f"native server {control.address}: no replacement within {limit}")

    def _start_again(self, process: ServerProcess, end: str) -> str:
        while self._num_recent_restarts < self._max_restarts:
            self._num_recent_restarts += 1
            self._num_restarts += 1
            logger.warning("%s; starting another", end)
            try:
                address = process.start_again()
                self._prepare(self._control(address))
                return address
            except RuntimeError as error:  # it did not start, or died again
                end = str(error)
        raise EngineLostError(end)

    def _prepare(self, control: ControlClient) -> None:
        """Make a new server what the dead one was, before anybody else knows its address."""
        control.get("/health")
        if self._offloaded:  # first: the device is needed for something else
            control.post("/offload", tags=sorted(self._offloaded))
        if self._weights is not None:
            control.post("/update_weights", **self._weights)
        if self._paused:
            control.post("/pause")

    def _control(self, address: str) -> ControlClient:
        return ControlClient(address, self._token, timeout_s=self._request_timeout_s)

    def _client_here(self) -> GenerateClient:
        """The client of the running event loop; a loop that was closed is replaced by the next."""
        client = self._client
        if client is None or client.events.is_closed():
            client = self._client = GenerateClient(
                self._addrs,
                self._token,
                deadlines=self._deadlines,
                retries=self._request_retries,
                replace=self._replace,
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
    device: str = "cpu",
    seed: int = 0,
    gpus: Sequence[str] | None = None,
    log_path: str | Path | None = None,
    setup_timeout_s: float = 300.0,
) -> tuple[ChildProcess, str]:
    """Starts `areal serve` as a child of this process; (the child, its "host:port").

    `gpus` are those it may use, by default the ones this process sees.

    RuntimeError with its last output when it ends, or is not ready in time; it is then gone.
    """
    options = {
        "model": model_path,
        "threads": threads,
        "page-size": page_size,
        "num-pages": num_pages,
        "max-running": max_running,
        "tensor-parallel": tensor_parallel,
        "dtype": dtype,
        "device": device,
        "seed": seed,
    }
    argv = [sys.executable, "-m", "areal.cli.main", "serve", "--port", "0"]
    for name, value in options.items():
        if value is not None:
            argv += [f"--{name}", str(value)]
    if batch_invariant:
        argv.append("--batch-invariant")
    # The token is not an argument: every user of the machine can read those.
    env = {"AREAL_SERVER_TOKEN": token, "OMP_NUM_THREADS": str(threads)}
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    child = ChildProcess(argv, name="native server", env=env, log_path=log_path)
    try:
        line = child.wait_ready(timeout_s=setup_timeout_s, is_ready=lambda line: line[:1] == "{")
    except BaseException:  # Ctrl-C too: a half-started server must not stay
        child.terminate()
        raise
    ready = json.loads(line)
    return child, f"{ready['host']}:{ready['port']}"


def _weight_order(meta: WeightUpdateMeta) -> dict[str, Any]:
    return {"path": meta.path, "version": meta.version, "recompute_kv": meta.recompute_kv}


def _post_score(control: ControlClient, sequences: list[list[int]]) -> list[list[float]]:
    return control.post("/score", sequences=sequences)["logprobs"] if sequences else []


def _tags(tags: Sequence[str] | None) -> dict[str, list[str]]:
    return {} if tags is None else {"tags": list(tags)}
