"""Pool of inference servers: health, replacement, join and leave.

    lost (no connection, or its engine has ended)
      |-- its process was started here and has ended --> restarted, with the same weights
      |-- it answers again within a moment           --> kept
      |-- otherwise                                  --> dropped with a warning; the others serve on

The first caller that notices a loss handles it; later ones get the outcome. Servers lost at the
same time are replaced at the same time, a few at once. The last server is never dropped: its loss
is raised. A new server, restarted or joined, gets the live weights and the pause state before its
address is known to others. Calls come from any thread.

    watcher of a process   waits for: its end        unblocked by: it, or the process's `close`
    a lost call            waits for: a replacement  unblocked by: it, or EngineLostError

Locks, in this order: that of one address while a loss of its server is handled, and `_changing` to
read and change the members. A start holds the first only, so that the others go on.

Copies of the client in other processes start no server; a file tells them what became of one
(address_file.py).

A server that is to leave drains first: it gets no more requests, but takes part in weight updates
until its last one has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from areal.api.engine_api import EngineLostError
from areal.engine.native.engine import device_parts, parts_that_leave
from areal.engine.remote.address_file import ANSWER_S, AddressFile, follow
from areal.engine.remote.protocol import ServerProtocol, WeightOrder
from areal.engine.remote.server_control import (
    ControlClient,
    ServerEndedError,
    ServerError,
    ServerLostError,
    ServerRefusedError,
)
from areal.engine.remote.server_process import Restarts, ServerProcess
from areal.utils import logging
from areal.utils.waits import waiting

logger = logging.getLogger("ServerPool")

T = TypeVar("T")

_COME_BACK_S = 2.0  # grace for a live server whose connection broke
_STARTS_AT_ONCE = 8  # the servers of one machine share its cores and its disk


class ServerPool:
    """`processes` are those of the servers, in the order of `addresses`, or none; `max_restarts`
    bounds restarts of each between two weight updates, or scored batches. `address_file` must be
    readable by every process of the run; without it copies only retry."""

    def __init__(
        self,
        protocol: ServerProtocol,
        addresses: Sequence[str],
        token: str,
        *,
        timeout_s: float,
        setup_timeout_s: float,
        processes: Sequence[ServerProcess] = (),
        max_restarts: int = 3,
        address_file: Path | None = None,
    ) -> None:
        self._protocol = protocol
        self._token = token
        self._timeout_s = timeout_s
        self._setup_timeout_s = setup_timeout_s
        self._processes = dict(zip(addresses, processes, strict=False))  # by current address
        self.restarts = Restarts(max_restarts)
        self._file = None if address_file is None else AddressFile(address_file)
        self._read_file: tuple[int, int] | None = None  # as a copy saw it last
        self._joined: dict[str, str] = {}  # token by address
        self._draining: frozenset[str] = frozenset()
        self._restarting: set[str] = set()  # addresses of ended servers being replaced
        self.awaiting: dict[str, str] = {}  # servers that join with the next weights: their tokens
        self.controls = tuple(map(self.connect, addresses))  # replaced as a whole
        self._accepting: tuple[object, object, list[str]] = (None, None, [])  # and what it is of
        self._moved: dict[str, str | None] = {}  # address of a lost server -> of its replacement
        self.version: int | None = None  # of the live weights, once noted
        self._weights: WeightOrder | None = None  # loads them, if anything can
        self._newcomers: set[str] = set()  # started or joined since a newer version was expected
        self._adapters: dict[str, str] = {}  # folder by name
        self.newest_version: int | None = None  # that any server can have; None: unknown
        self.is_copy = False  # it is not told of updates, and the owner decides about servers
        self.is_paused = False
        self.offloaded: frozenset[str] = frozenset()
        self._create_locks()

    def __getstate__(self) -> dict[str, Any]:
        own = {"_processes": {}, "restarts": Restarts(0), "_restarting": set()}
        own |= {"_changing": None, "_losses": None, "_starts": None}
        return {**self.__dict__, **own, "newest_version": None, "is_copy": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._create_locks()

    def _create_locks(self) -> None:
        self._changing = threading.Lock()  # guards all above but reading `controls`
        self._losses: dict[str, threading.Lock] = {}  # by address, held while a loss is handled
        self._starts = threading.BoundedSemaphore(_STARTS_AT_ONCE)

    @property
    def addresses(self) -> list[str]:
        return [control.address for control in self.controls]

    @property
    def accepting(self) -> list[str]:
        """Servers that get new requests: those that do not drain, unless all others are lost. The
        same list while nothing changes: every request asks."""
        controls, draining, accepting = self._accepting
        if controls is not self.controls or draining is not self._draining:
            controls, draining = self.controls, self._draining
            addresses = [control.address for control in controls]
            accepting = [one for one in addresses if one not in draining] or addresses
            self._accepting = controls, draining, accepting
        return accepting

    @property
    def receivers(self) -> tuple[ControlClient, ...]:
        """Servers that new weights are sent to: also those that join with them."""
        awaiting = tuple(self.connect(one, token) for one, token in self.awaiting.items())
        return (*self.controls, *awaiting) if awaiting else self.controls

    def token_of(self, address: str) -> str:
        return self._joined.get(address, self._token)

    def states(self) -> dict[str, str]:
        """`serving`, `draining` or `restarting`, by address. Does not wait for a restart."""
        states = dict.fromkeys(self.addresses, "serving")
        states |= dict.fromkeys(self._draining & states.keys(), "draining")
        return states | dict.fromkeys(self._restarting.copy() & states.keys(), "restarting")

    def follow_owner(self) -> None:
        """A copy learns which servers joined and left. Costs one `stat` while nothing changes, and
        never blocks: it is called on event loops."""
        file = self._owners_file
        if file is None or not self._changing.acquire(blocking=False):
            return
        try:
            seen = file.stamp()
            if seen != self._read_file:
                self._adopt(file.read())
                self._read_file = seen
        except (EngineLostError, OSError):
            pass  # read again, and raised, by the request that needs a server
        finally:
            self._changing.release()

    def _adopt(self, told: dict[str, Any]) -> None:
        """Take over what the owner says of members."""
        self._joined = told["joined"]
        self.awaiting = told["awaiting"]
        self._draining = frozenset(told["draining"])
        for address in told["joined"]:
            self._moved.pop(address, None)
            if address not in self.addresses and address not in told["moved"]:
                self.controls = (*self.controls, self.connect(address))
        for address in self.addresses:
            if address in told["moved"]:
                self._move(address, follow(told["moved"], address))

    def open(self, *, awaits_weights: bool = False) -> None:
        """Waits until all answer, and starts to watch the processes."""
        if self._owners_file is not None:  # an unreachable server is being replaced
            return
        # Our own servers have reported ready; one that is gone by now will not come back.
        timeout_s = 0.0 if self._processes else self._setup_timeout_s
        self.on_all(lambda control: control.wait_until_healthy(timeout_s))
        if not awaits_weights:
            versions = self.on_all(self._protocol.served_version).values()
            self.expect_weights(max(version or 0 for version in versions))
        self._tell_copies()
        for address, process in list(self._processes.items()):
            watch = threading.Thread(
                target=self._watch, args=(address, process), name=f"watch-{address}", daemon=True
            )
            watch.start()

    def on_all(
        self, call: Callable[[ControlClient], T], *, receivers: bool = False
    ) -> dict[ControlClient, T]:
        """Results of `call` on all remaining servers, or all `receivers` of weights; an error if
        none remains.

        `call` may run twice on a server whose connection broke.
        """
        self.follow_owner()
        controls = self.receivers if receivers else self.controls
        if len(controls) == 1:
            answers = [self._attempt(controls[0], call)]
        else:
            with ThreadPoolExecutor(len(controls), thread_name_prefix="server-control") as pool:
                answers = list(pool.map(lambda control: self._attempt(control, call), controls))
        return dict(answer for answer in answers if answer is not None)

    def on_one(self, index: int, call: Callable[[ControlClient], T]) -> T:
        """The result from the server chosen by `index`, or from another if it is lost."""
        while True:
            controls = self.controls
            answer = self._attempt(controls[index % len(controls)], call)
            if answer is not None:
                return answer[1]

    def set_paused(self, paused: bool) -> None:
        with self._changing:  # a joining server either sees the flag or is among those called
            self.is_paused = paused
        self.on_all(self._protocol.pause if paused else self._protocol.resume)

    def offload(self, tags: Sequence[str] | None) -> None:
        with self._changing:
            self.offloaded |= parts_that_leave(tags)
        self.on_all(lambda control: self._protocol.offload(control, tags))

    def onload(self, tags: Sequence[str] | None) -> None:
        with self._changing:
            self.offloaded -= device_parts(tags)
        self.on_all(lambda control: self._protocol.onload(control, tags))

    def load_adapter(self, name: str, folder: str) -> None:
        self.on_all(lambda control: self._protocol.load_adapter(control, name, folder))
        with self._changing:
            self._adapters[name] = folder

    def unload_adapter(self, name: str) -> None:
        with self._changing:
            self._adapters.pop(name, None)
        self.on_all(lambda control: self._protocol.unload_adapter(control, name))

    def note_weights(self, version: int, order: WeightOrder | None) -> None:
        """`version` is live; `order` loads it into a server that lacks it, if anything can.

        The sender may have missed a server that was started or joined meanwhile.
        """
        missed = self.remember_weights(version, order)
        for control, served in self.on_all(self._protocol.served_version).items():
            if served == version or (served is None and control.address not in missed):
                continue
            if order is None:
                raise RuntimeError(
                    f"{control.kind} {control.address} lacks version {version} of the weights, "
                    "and they cannot be sent again: set actor.weight_update_mode to shm or disk"
                )
            self._attempt(control, lambda one: self._load_member(one, order))

    def expect_weights(self, version: int) -> None:
        """Servers may have `version` from now on."""
        if not self.is_copy:
            with self._changing:
                if version > (self.newest_version or 0):
                    self._newcomers = set()
                self.newest_version = max(version, self.newest_version or 0)

    def remember_weights(self, version: int, order: WeightOrder | None) -> set[str]:
        """As `note_weights`, for a caller that sends them to all servers. Returns the servers that
        were started with other weights since `expect_weights`."""
        self.expect_weights(version)
        with self._changing:
            self.version, self._weights = version, order
            self.restarts.renew()
            self.restarts.forbidden = None
            newcomers, self._newcomers = self._newcomers, set()
            if order is None and version > 0:
                self.restarts.forbidden = (
                    f"the weights of version {version} came through a process group, as a delta or "
                    "by CUDA IPC, and nothing holds them for another server; set "
                    "actor.weight_update_mode to shm or disk for that"
                )
        return newcomers

    def has(self, address: str) -> bool:
        """Whether the server takes part in weight updates, as far as the owner has told."""
        file = self._owners_file
        moved = {} if file is None else file.read()["moved"]
        return address in self.addresses and address not in moved

    def is_gone(self, address: str) -> bool:
        """Whether a server whose connection was lost has ended or was dropped; `successor` may be
        replacing it."""
        try:
            if not self.has(address):
                return True
        except EngineLostError:  # raised by `successor`
            return True
        if self._owners_file is not None:
            return not self.connect(address).is_there(ANSWER_S)
        process = self._processes.get(address)
        return process is not None and process.describe_end() is not None

    def successor(self, address: str) -> str | None:
        """Address to use after a lost connection: that of the restarted server, None if it was
        dropped, the same while its process runs or is not ours.

        EngineLostError if it was the last server and cannot be restarted.
        """
        with self._changing:
            loss = self._losses.setdefault(address, threading.Lock())
        with loss:
            if address in self.addresses:
                with waiting(f"the replacement of the server {address}"):
                    if (file := self._owners_file) is not None:
                        self._ask_owner(file, address)
                    else:
                        self._restart_if_ended(address)
        with self._changing:
            return follow(self._moved, address)

    def join(
        self,
        address: str,
        order: WeightOrder | None,
        *,
        token: str | None,
        preloaded: WeightOrder | None,
        verify: Callable[[ControlClient, ControlClient], None],
    ) -> None:
        """Add a server of the same model once it has the weights; `order` loads them, by default
        the last one noted, unless it was `preloaded`. `token` is its own, by default that of the
        others. `verify(newcomer, member)` raises unless both have the same weights."""
        token = token or self._token
        control = self._check_model(address, token)
        version = self.on_one(0, self._protocol.served_version)
        with self._changing:
            self._refuse_member(address)
            order = order or self._weights
            self._prepare(control, None if order == preloaded else order)
            # During an update the others may be ahead of the noted version until the next note.
            has = self._protocol.served_version(control)
            if has is None:  # it records none
                has = 0 if order is None else order["version"]
            others = version if version is not None else self.version or 0
            if has not in (others, self.version):
                raise RuntimeError(
                    f"{control.kind} {address} has version {has} of the weights, the others serve "
                    f"{others}: give `join` the order that brought them"
                )
            verify(control, self.controls[0])
            self._newcomers.add(address)
            self._add(control, token)

    def _add(self, control: ControlClient, token: str) -> None:
        self._moved.pop(control.address, None)
        self._joined = {**self._joined, control.address: token}
        self.controls = (*self.controls, control)
        self._tell_copies()

    def _refuse_member(self, address: str) -> None:
        if address in self.addresses or address in self.awaiting:
            kind = self._protocol.kind
            raise ValueError(f"{kind} {address} is one of this engine's already")

    def _check_model(self, address: str, token: str) -> ControlClient:
        control = self.connect(address, token)
        control.wait_until_healthy(self._setup_timeout_s)
        model = self.on_one(0, self._protocol.served_model)
        served = self._protocol.served_model(control)
        if served != model:
            raise RuntimeError(
                f"{control.kind} {address} serves the model {served}, the others {model}: start it "
                "with the same --model"
            )
        return control

    def await_weights(self, address: str, token: str | None) -> None:
        """Send the next weights to this server of the same model too."""
        token = token or self._token
        self._check_model(address, token)
        with self._changing:
            self._refuse_member(address)
            self.awaiting = {**self.awaiting, address: token}
            self._tell_copies()

    def end_awaiting(self, address: str, *, joins: bool) -> None:
        """It is sent no weights for itself any more, and `joins` or not."""
        with self._changing:
            awaiting = dict(self.awaiting)
            token = awaiting.pop(address)
            self.awaiting = awaiting
            if joins:
                self._add(self.connect(address, token), token)
            else:
                self._tell_copies()

    def prepare_newcomer(self, address: str, token: str) -> ControlClient:
        """One that has the weights gets what else the others have."""
        control = self.connect(address, token)
        self._prepare(control, None)
        return control

    def preload(self, address: str, token: str | None) -> WeightOrder | None:
        """Load the noted weights into a server that will join, while nobody waits; returns what it
        was given. None if it is one of the pool, or nothing can be loaded."""
        if address in self.addresses or self._weights is None:
            return None
        control = self.connect(address, token)
        control.wait_until_healthy(self._setup_timeout_s)
        return self._load_ahead(control)

    def drain(self, address: str) -> ControlClient:
        """The server gets no more requests, and stays a member until `leave`."""
        with self._changing:
            name = f"{self._protocol.kind} {address}"
            if address not in self.addresses:
                raise ValueError(f"{name} is not one of {self.addresses}")
            if not set(self.addresses) - self._draining - {address}:
                raise ValueError(f"{name} is the last one: let another join first")
            self._draining |= {address}
            self._tell_copies()
            return next(control for control in self.controls if control.address == address)

    def stop_draining(self, address: str) -> None:
        with self._changing:
            self._draining -= {address}
            self._tell_copies()

    def leave(self, address: str) -> None:
        """Remove a drained server; one that was started here is ended."""
        with self._changing:
            process = self._processes.pop(address, None)
            if address in self.addresses:  # else it was lost meanwhile
                self._move(address, None)
            self._draining -= {address}
        if process is not None:
            process.close()

    def connect(self, address: str, token: str | None = None) -> ControlClient:
        kind, token = self._protocol.kind, token or self.token_of(address)
        return ControlClient(address, token, timeout_s=self._timeout_s, kind=kind)

    def _attempt(
        self, control: ControlClient, call: Callable[[ControlClient], T]
    ) -> tuple[ControlClient, T] | None:
        """The result and the server it came from; None if the server was dropped."""
        try:
            return control, call(control)
        except ServerError as error:
            if isinstance(error, ServerRefusedError) and not isinstance(error, ServerEndedError):
                raise
            successor = self._after(control, error)
            return None if successor is None else (successor, call(successor))

    def _after(self, control: ControlClient, error: ServerError) -> ControlClient | None:
        """The server to call instead of a failed one; None if it was dropped."""
        address = self.successor(control.address)
        if address is None:
            return None
        if address != control.address:
            return self.connect(address)
        if isinstance(error, ServerLostError) and control.comes_back(_COME_BACK_S):
            return control
        process = self._processes.get(address)
        is_closed = process is not None and process.is_closed  # the run is ending
        if is_closed or not isinstance(error, ServerLostError | ServerEndedError):
            raise error
        with self._changing:
            if address in self.addresses:
                if len(self.controls) == 1:
                    raise error
                self._leave_out(address, str(error))
        return None

    @property
    def _owners_file(self) -> AddressFile | None:
        """Of a copy."""
        return self._file if self.is_copy else None

    def _watch(self, address: str | None, process: ServerProcess) -> None:
        """Needed because calls of copies bypass this object, so the end might go unnoticed."""
        while address is not None and process.wait_end():
            try:
                address = self.successor(address)
            except EngineLostError as error:  # raised again by the next call, here or in a copy
                logger.error("%s %s is lost: %s", self._protocol.kind, address, error)
                self._tell_copies(loss=str(error))
                return

    def _restart_if_ended(self, address: str) -> None:
        process = self._processes.get(address)
        if process is None or (end := process.describe_end()) is None:
            return
        self._restarting.add(address)
        try:
            with self._starts:
                self._restart(address, process, end)
        except EngineLostError as lost:
            with self._changing:
                if self.addresses == [address]:
                    raise
                if self._processes.pop(address, None):  # else it left meanwhile
                    self._leave_out(address, str(lost))
            process.close()  # what the last attempt may have started
        finally:
            self._restarting.discard(address)

    def _restart(self, address: str, process: ServerProcess, end: str) -> None:
        """EngineLostError says how the last one ended if the budget is spent."""
        while True:
            with self._changing:
                self.restarts.spend(process, end)
            logger.warning("%s; starting another", end)
            try:
                control = self.connect(process.start_again())
                control.get("/health")
                order = self._load_ahead(control)
                with self._changing:
                    return self._replace(address, control, order)
            except EngineLostError:  # no worker left to start it in
                raise
            except RuntimeError as error:  # it did not start, or died again
                end = str(error)

    def _load_ahead(self, control: ControlClient) -> WeightOrder | None:
        """Load the noted weights into a server that nobody waits for yet; returns what it got.
        None if there are none, or the device is in use by the trainer."""
        order = self._weights
        if order is None or self.offloaded:
            return None
        try:
            self._load(control, order)
        except ServerError:
            if self._weights == order:
                raise
            return None  # an update has removed them
        return order

    def _replace(self, address: str, new: ControlClient, loaded: WeightOrder | None) -> None:
        """The server at `address` is `new` from now on."""
        if address not in self._processes:  # it left meanwhile, and its process was ended
            return
        self.restarts.refuse_if_forbidden(f"{new.kind} {address} has ended")
        self._prepare(new, None if self._weights == loaded else self._weights)
        self._processes[new.address] = self._processes.pop(address)
        self._newcomers.add(new.address)
        self._move(address, new.address)

    def _ask_owner(self, file: AddressFile, address: str) -> None:
        """A copy waits until the owner has replaced the server, or it answers again."""
        now = file.wait_for_news(self.connect(address), self._setup_timeout_s)
        if now != address:
            with self._changing:
                self._move(address, now)

    def _move(self, former: str, address: str | None) -> None:
        """The server at `former` is replaced by that at `address`, or dropped."""
        if address is None:
            self.controls = tuple(c for c in self.controls if c.address != former)
        else:
            new = self.connect(address)
            self.controls = tuple(new if c.address == former else c for c in self.controls)
            self._moved.pop(address, None)  # a port may be reused
        self._moved[former] = address
        if not self.is_copy:
            self._joined = {one: token for one, token in self._joined.items() if one != former}
        self._tell_copies()

    def _tell_copies(self, *, loss: str | None = None) -> None:
        if self._file is not None and not self.is_copy:
            told = {"moved": self._moved, "loss": loss, "joined": self._joined}
            told |= {"draining": sorted(self._draining), "awaiting": self.awaiting}
            self._file.write(told)

    def _prepare(self, control: ControlClient, order: WeightOrder | None) -> None:
        """Bring a new server to the state of the others before its address is known."""
        protocol = self._protocol
        if self.offloaded:  # first, because the device is in use by the trainer
            protocol.offload(control, sorted(self.offloaded))
        if order is not None:
            self._load(control, order)
        for name, folder in self._adapters.items():
            protocol.load_adapter(control, name, folder)
        if self.is_paused:
            protocol.pause(control)

    def _load(self, control: ControlClient, order: WeightOrder) -> None:
        """Into a server that has no requests whose replies count, and is not paused after it."""
        if not self._protocol.versions_tokens:
            self._protocol.interrupt(control)
        self._protocol.load_weights(control, order)
        if not self._protocol.versions_tokens:
            self._protocol.resume(control)

    def _load_member(self, control: ControlClient, order: WeightOrder) -> None:
        self._load(control, order)
        if self.is_paused and not self._protocol.versions_tokens:
            self._protocol.pause(control)

    def _leave_out(self, address: str, cause: str) -> None:
        logger.warning("a server is lost, the others go on: %s", cause)
        self._move(address, None)
