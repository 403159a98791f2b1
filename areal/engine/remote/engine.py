"""HttpEngine: stock inference servers (vLLM, SGLang) behind the InferenceEngine contract.

    process = ServerProcess(lambda: launch_vllm_server(path, python=..., token=token))
    engine = HttpEngine(
        VLLMProtocol(), [process.address], token, model_path=path, processes=[process]
    )
    engine.initialize()
    reply = await engine.agenerate(ModelRequest(input_ids=[5, 7]))

Generation runs on the event loop of its first caller (client.py); control calls block and come
from other threads. Stock servers have no versions, so they are counted here:

    update_weights   verify the publication -> close the gate -> abort in-flight requests and drain
                     -> load on every server -> open the gate at the new version

Weights may also come through a process group (`xccl`), if the server's workers can join one.

A dead server whose process this one started (`processes`) is replaced by one that loads the live
weights before it gets requests, which continue there with the tokens they have. Weights received
through a group cannot be loaded again, so then a dead server is not replaced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelRequest, ModelResponse, WeightUpdateMeta
from areal.engine.native.loop import BusyIntervals
from areal.engine.remote.client import HttpClient, UpdateGate, close_on_its_loop, runs_here
from areal.engine.remote.collective_sender import CollectiveSender
from areal.engine.remote.protocol import ServerProtocol
from areal.engine.remote.server_control import ControlClient, on_all, on_living
from areal.engine.remote.server_process import ServerProcess, ServerSlots
from areal.weight_sync.hf_folder import hf_folder_of
from areal.weight_sync.publication import open_publication

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_STRAGGLERS_S = 2.0  # for aborted requests to return; one may reach its server after the abort
_DROP_S = 30.0  # a live event loop needs milliseconds


class HttpEngine(InferenceEngine):
    """`addrs` are "host:port", `model_path` the folder the servers started from.

    `request_timeout_s` bounds one attempt of a request and every control call, `setup_timeout_s`
    how long `initialize` waits, `weight_group_timeout_s` how long a worker may keep a broadcast of
    weights waiting. Tokens at or beyond `vocab_size` are refused. `processes` are those of the
    servers, in the order of `addrs`; without them no server is replaced. `max_restarts` bounds the
    replacements between two updates.
    """

    def __init__(
        self,
        protocol: ServerProtocol,
        addrs: list[str],
        token: str,
        *,
        model_path: str | Path,
        max_context: int | None = None,
        vocab_size: int | None = None,
        processes: Sequence[ServerProcess] = (),
        max_restarts: int = 3,
        request_timeout_s: float = 3600.0,
        request_retries: int = 3,
        setup_timeout_s: float = 300.0,
        weight_group_timeout_s: float = 120.0,
    ) -> None:
        if not addrs:
            raise ValueError("addrs: expected at least one server address, got none")
        self._protocol = protocol
        self._slots = ServerSlots(addrs, processes, max_restarts=max_restarts)
        self._token = token
        self._model_path = Path(model_path)
        self._max_context = max_context
        self._vocab_size = vocab_size
        self._request_timeout_s = request_timeout_s
        self._request_retries = request_retries
        self._setup_timeout_s = setup_timeout_s
        self._controls = [self._control(addr) for addr in addrs]
        routes = protocol.group_routes(self._model_path)
        self._collective = (
            None if routes is None else CollectiveSender(routes, timeout_s=weight_group_timeout_s)
        )
        self._weights: tuple[Path, int] | None = (
            None  # folder and version; None: as started, or by a group
        )
        self._adapters: dict[str, str] = {}  # folder by name
        self._gate = UpdateGate()
        self._busy = BusyIntervals()
        self._busy_since = 0.0  # time.time() at the start of the first in-flight request
        self._num_running = 0
        self._updating = threading.Lock()
        self._is_paused = False
        self._client: HttpClient | None = None

    def initialize(self) -> None:
        self._on_all(lambda control: control.wait_until_healthy(self._setup_timeout_s))
        self._gate.open(self._served_versions()[0] or 0)
        self.get_version()  # raises unless all servers agree

    def destroy(self) -> None:
        """From any thread. Cancels pending calls."""
        if self._collective is not None:
            self._collective.close()
        client, self._client = self._client, None
        if client is not None:
            close_on_its_loop(client.events, client.close)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        client = self._client_here()
        if self._num_running == 0:
            self._busy_since = time.time()
        self._num_running += 1
        try:
            return await client.generate(req)
        finally:
            self._num_running -= 1
            self._busy.add(self._busy_since, time.time())

    def pause_generation(self) -> None:
        self._on_all(self._protocol.pause)
        self._is_paused = True

    def continue_generation(self) -> None:
        self._is_paused = False
        self._on_all(self._protocol.resume)

    def update_weights(
        self,
        meta: WeightUpdateMeta,
        named_tensors: Iterator[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        load = self._loading(meta, named_tensors)
        with self._updating:
            self._interrupt_all()
            try:
                load()
                self._resume_unless_paused()
            except Exception as err:
                # Servers may have part of the new weights, so no version is consistent any more.
                self._gate.fail(f"no weights serve: version {meta.version} did not load: {err}")
                raise
            self._gate.open(meta.version)
            self._slots.renew_restarts()

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Register a LoRA adapter as `name`, for requests with that `gconfig.lora_name`."""
        path = str(Path(folder).absolute())
        self._on_all(lambda control: self._protocol.load_adapter(control, name, path))
        self._adapters[name] = path

    def unload_adapter(self, name: str) -> None:
        self._adapters.pop(name, None)
        self._on_all(lambda control: self._protocol.unload_adapter(control, name))

    def get_version(self) -> int:
        """As counted here, checked against the servers that record it."""
        counted = self._gate.version
        for control, noted in zip(self._controls, self._served_versions(), strict=True):
            if noted not in (None, counted):
                raise RuntimeError(
                    f"{self._protocol.kind} {control.address} serves version {noted}, expected "
                    f"{counted}: it was started again, or somebody else gave it weights"
                )
        return counted

    def stats(self) -> dict[str, float]:
        """Summed over the servers, except the version; counters of a dead server are lost."""
        total: dict[str, float] = {
            "version": self._gate.version,
            "restarts": self._slots.num_restarts,
            "requests_resent": self._client.num_resent if self._client is not None else 0,
            "replies_refused": self._client.num_refused if self._client is not None else 0,
        }
        for stats in self._on_all(self._protocol.stats):
            for name, value in stats.items():
                total[name] = total.get(name, 0) + value
        return total

    def busy_intervals(self, since: float) -> dict[str, list[tuple[float, float]]]:
        """When requests were in flight: the servers do not report when they compute."""
        return {", ".join(self._slots.addresses): self._busy.since(since)}

    def _served_versions(self) -> list[int | None]:
        return self._on_all(self._protocol.served_version)

    def _loading(
        self, meta: WeightUpdateMeta, named_tensors: Iterator[tuple[str, torch.Tensor]] | None
    ) -> Callable[[], None]:
        """A function that loads the weights on all servers, once they are drained."""
        if meta.type in ("shm", "disk") and named_tensors is None and not meta.use_lora:
            return self._loading_of_folder(meta)
        collective = self._collective
        if meta.type == "xccl" and collective and named_tensors is not None and not meta.use_lora:
            return partial(self._broadcast, collective, meta, named_tensors)
        ways, modes = "from a folder", "shm or disk"
        if collective:
            ways, modes = "from a folder or a process group", "shm, disk or xccl"
        raise ValueError(
            f"a {self._protocol.kind} takes whole models {ways}, got type {meta.type!r}"
            f"{' with use_lora' if meta.use_lora else ''}; set actor.weight_update_mode to {modes}"
        )

    def _loading_of_folder(self, meta: WeightUpdateMeta) -> Callable[[], None]:
        publication = open_publication(meta.path, version=meta.version, key=meta.key)
        with_lm_head = self._protocol.wants_lm_head(self._model_path)
        folder = hf_folder_of(publication, self._model_path, with_lm_head=with_lm_head)

        def load() -> None:
            # A server replaced from here on loads these, so that none is stale when the gate opens.
            self._weights = folder, meta.version
            self._slots.forbid_restarts(None)
            self._on_all(lambda control: self._protocol.load_weights(control, folder, meta.version))

        return load

    def _broadcast(
        self,
        collective: CollectiveSender,
        meta: WeightUpdateMeta,
        named_tensors: Iterator[tuple[str, torch.Tensor]],
    ) -> None:
        self._weights = None
        self._slots.forbid_restarts(
            f"the weights of version {meta.version} came through a process group, and nothing "
            "holds them for another server; set actor.weight_update_mode to shm or disk for that"
        )
        collective.send(tuple(self._controls), meta, named_tensors)

    def _interrupt_all(self) -> None:
        """Returns when no request is in flight and the gate is closed; resumes all on an error."""
        client = self._client
        if client is not None and runs_here(client.events):
            raise RuntimeError("update_weights blocks: call it from another thread than agenerate")
        self._gate.close()
        try:
            self._on_all(self._protocol.interrupt)
            if not self._gate.wait_empty(_STRAGGLERS_S) and client is not None:
                client.events.call_soon_threadsafe(client.drop_attempts)
                if not self._gate.wait_empty(_DROP_S):
                    servers = ", ".join(self._slots.addresses)
                    raise RuntimeError(
                        f"requests to {servers} did not end within {_DROP_S:g} s: the event loop "
                        "that generates is blocked"
                    )
        except BaseException:
            self._gate.open(self._gate.version)
            with suppress(RuntimeError):  # the original error matters more
                self._resume_unless_paused()
            raise

    def _resume_unless_paused(self) -> None:
        if not self._is_paused:
            self._on_all(self._protocol.resume)

    def _on_all(self, call: Callable[[ControlClient], T]) -> list[T]:
        slots = range(len(self._controls))
        return on_all(slots, lambda slot: on_living(self._controls, slot, call, self._replace))

    def _replace(self, address: str) -> str:
        return self._slots.replace(address, self._prepare)

    def _prepare(self, slot: int, address: str) -> None:
        """Bring a replacement to the state of the dead server before its address is known."""
        control = self._control(address)
        if self._weights is not None:
            self._protocol.interrupt(control)
            self._protocol.load_weights(control, *self._weights)
            self._protocol.resume(control)
        for name, folder in self._adapters.items():
            self._protocol.load_adapter(control, name, folder)
        if self._is_paused:
            self._protocol.pause(control)
        self._controls[slot] = control

    def _control(self, address: str) -> ControlClient:
        return ControlClient(
            address, self._token, timeout_s=self._request_timeout_s, kind=self._protocol.kind
        )

    def _client_here(self) -> HttpClient:
        """The client of the running event loop; a closed loop is replaced by the next."""
        client = self._client
        if client is None or client.events.is_closed():
            client = self._client = HttpClient(
                self._protocol,
                self._slots.addresses,
                self._token,
                self._gate,
                timeout_s=self._request_timeout_s,
                retries=self._request_retries,
                max_context=self._max_context,
                vocab_size=self._vocab_size,
                replace=self._replace,
            )
        elif not runs_here(client.events):
            raise RuntimeError("agenerate was called from two event loops; use one engine per loop")
        return client
