"""Pool of inference servers: health, replacement, join and leave.

    lost (no connection, or its engine has ended)
      |-- its process was started here and has ended --> restarted, with the same weights
      |-- it answers again within a moment           --> kept
      |-- otherwise                                  --> dropped with a warning; the others serve on

The first caller that notices a loss handles it; later ones get the outcome. The last server is
never dropped: its loss is raised. A new server, restarted or joined, gets the live weights and the
pause state before its address is known to others. Calls come from any thread; only `_changing` is
held for long.

    watcher of a process   waits for: its end        unblocked by: it, or the process's `close`
    a lost call            waits for: a replacement  unblocked by: it, or EngineLostError

Copies of the client in other processes start no server; they find the new address in a file
(`AddressFile`):

    owner (the controller)               writes: address by slot, again after a restart; or why
                                         there is no server any more
    copy (training rank, rollout worker) reads: after a lost connection, until the slot has another
                                         address or the old one answers (`FollowedSlots`)
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from areal.api.engine_api import EngineLostError
from areal.engine.native.engine import device_parts, parts_that_leave
from areal.engine.remote.server_control import (
    ControlClient,
    ServerEndedError,
    ServerError,
    ServerLostError,
    ServerRefusedError,
    on_all,
)
from areal.engine.remote.server_process import ServerProcess, ServerSlots
from areal.utils import logging
from areal.utils.fs import atomic_write_text
from areal.utils.waits import waiting

logger = logging.getLogger("NativeRemoteEngine")

T = TypeVar("T")

_COME_BACK_S = 2.0  # grace for a live server whose connection broke


class ServerPool:
    """`processes` are those of the servers, in the order of `addresses`, or none; `max_restarts`
    bounds restarts between two weight updates. `address_file` is where copies find the address of a
    restarted server; without it they only retry."""

    def __init__(
        self,
        addresses: Sequence[str],
        token: str,
        *,
        timeout_s: float,
        setup_timeout_s: float,
        processes: Sequence[ServerProcess] = (),
        max_restarts: int = 3,
        address_file: Path | None = None,
    ) -> None:
        self._token = token
        self._timeout_s = timeout_s
        self._setup_timeout_s = setup_timeout_s
        self._processes = processes
        self._slots = ServerSlots(addresses, processes, max_restarts=max_restarts)
        self._file = None if address_file is None else AddressFile(address_file)
        self.controls = tuple(map(self._connect, addresses))  # replaced as a whole
        self._left_out: set[str] = set()  # addresses
        self._version: int | None = None  # of the live weights, once noted
        self._weights: dict[str, Any] | None = None  # the order that loads them, if any
        self.newest_version: int | None = None  # that any server can have; None: unknown
        self._is_copy = False  # a copy is not told of updates
        self._paused = False
        self.offloaded: frozenset[str] = frozenset()
        self._follows = False  # a copy: the owner of the processes decides and writes the file
        self._changing = threading.Lock()  # guards all above but reading `controls`

    def __getstate__(self) -> dict[str, Any]:
        left = {"_changing": None, "_processes": (), "newest_version": None, "_is_copy": True}
        if self._file is not None:
            left["_follows"] = True
            left["_slots"] = FollowedSlots(
                self._slots.addresses, self._token, self._file, timeout_s=self._setup_timeout_s
            )
        return {**self.__dict__, **left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._changing = threading.Lock()

    @property
    def num_restarts(self) -> int:
        return self._slots.num_restarts

    @property
    def addresses(self) -> list[str]:
        return [control.address for control in self.controls]

    def open(self) -> None:
        """Waits until all answer, and starts to watch the processes."""
        if self._follows:  # an unreachable server is being replaced
            return
        # Our own servers have reported ready; one that is gone by now will not come back.
        timeout_s = 0.0 if self._processes else self._setup_timeout_s
        self.on_all(lambda control: control.wait_until_healthy(timeout_s))
        self.expect_weights(max(self.on_all(served_version).values()))
        self._tell_copies()
        for index, process in enumerate(self._processes):
            name = f"native-server{index}-watch"
            threading.Thread(target=self._watch, args=(process,), name=name, daemon=True).start()

    def on_all(self, call: Callable[[ControlClient], T]) -> dict[ControlClient, T]:
        """Results of `call` on all remaining servers; an error if none remains.

        `call` may run twice on a server whose connection broke.
        """
        answers = on_all(self.controls, lambda control: self._attempt(control, call))
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
            self._paused = paused
        self.on_all(lambda control: control.post("/pause" if paused else "/continue"))

    def offload(self, tags: Sequence[str] | None) -> None:
        with self._changing:
            self.offloaded |= parts_that_leave(tags)
        self.on_all(lambda control: control.post("/offload", **_tags(tags)))

    def onload(self, tags: Sequence[str] | None) -> None:
        with self._changing:
            self.offloaded -= device_parts(tags)
        self.on_all(lambda control: control.post("/onload", **_tags(tags)))

    def note_weights(self, version: int, order: dict[str, Any] | None) -> None:
        """`version` is live; `order` loads it into a server that lacks it, if anything can."""
        self.remember_weights(version, order)
        for control, served in self.on_all(served_version).items():
            # The sender may have missed a server that was started or joined meanwhile.
            if served != version:
                if order is None:
                    raise RuntimeError(
                        f"native server {control.address} lacks version {version} of the weights, "
                        "and they cannot be sent again: set actor.weight_update_mode to shm or disk"
                    )
                self._attempt(control, lambda server: server.post("/update_weights", **order))

    def expect_weights(self, version: int) -> None:
        """Servers may have `version` from now on."""
        if not self._is_copy:
            with self._changing:
                self.newest_version = max(version, self.newest_version or 0)

    def remember_weights(self, version: int, order: dict[str, Any] | None) -> None:
        """As `note_weights`, for a caller that has just sent them to all servers."""
        self.expect_weights(version)
        with self._changing:
            self._version, self._weights = version, order
        self._slots.renew_restarts()

    def is_gone(self, address: str) -> bool:
        """Whether a server whose connection was lost has ended or was dropped; `successor` may be
        replacing it."""
        return self._slots.has_ended(address) or address in self._left_out

    def successor(self, address: str) -> str | None:
        """Address to use after a lost connection: that of the restarted server, None if it was
        dropped, the same while its process runs or is not ours.

        EngineLostError if it was the last server and cannot be restarted.
        """
        with self._changing:
            if address in self._left_out:
                return None
            try:
                successor = self._slots.replace(address, self._prepare_new)
            except EngineLostError as lost:
                if self.addresses == [address] or self._follows:
                    raise
                self._leave_out(address, str(lost))
                return None
            if successor is None:  # decided by the owner of the processes
                self._drop(address)
            elif successor != address and address in self.addresses:
                self._take_place(address, successor)
            return None if successor in self._left_out else successor

    def join(self, address: str, order: dict[str, Any] | None) -> None:
        """Add a server of the same model once it has the weights; `order` loads them, by default
        the last one noted."""
        control = self._connect(address)
        control.wait_until_healthy(self._setup_timeout_s)
        others = self.on_one(0, lambda other: other.get("/health"))
        with self._changing:
            if address in self.addresses:
                raise ValueError(f"native server {address} is one of this engine's already")
            _require_model(control, others.get("model"))
            self._prepare(control, order or self._weights)
            # During an update the others may be ahead of the noted version until the next note.
            _require_version(control, _version_in(others, control), self._version)
            self._left_out.discard(address)
            self.controls = (*self.controls, control)

    def leave(self, address: str) -> None:
        with self._changing:
            if address not in self.addresses:
                raise ValueError(f"native server {address} is not one of {self.addresses}")
            if len(self.controls) == 1:
                raise ValueError(f"native server {address} is the last one: let another join first")
            self._drop(address)

    def _connect(self, address: str) -> ControlClient:
        return ControlClient(address, self._token, timeout_s=self._timeout_s)

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
            return self._connect(address)
        if isinstance(error, ServerLostError) and _comes_back(control):
            return control
        if not isinstance(error, ServerLostError | ServerEndedError):
            raise error
        with self._changing:
            if address in self.addresses:
                if len(self.controls) == 1:
                    raise error
                self._leave_out(address, str(error))
        return None

    def _watch(self, process: ServerProcess) -> None:
        """Needed because calls of copies bypass this object, so the end might go unnoticed."""
        while process.wait_end():
            try:
                if self.successor(process.address) is None:
                    return
            except EngineLostError as error:  # raised again by the next call, here or in a copy
                logger.error("native server %s is lost: %s", process.address, error)
                if self._file is not None:
                    self._file.write_loss(str(error))
                return

    def _prepare_new(self, slot: int, address: str) -> None:
        """A replacement was started in slot `slot` and has reported ready."""
        control = self._connect(address)
        control.get("/health")
        self._prepare(control, self._weights)

    def _take_place(self, former: str, address: str) -> None:
        self._left_out.discard(address)  # a port may be reused
        control = self._connect(address)
        self.controls = tuple(control if c.address == former else c for c in self.controls)
        self._tell_copies()

    def _tell_copies(self) -> None:
        if self._file is not None and not self._follows:
            gone = self._left_out
            self._file.write([None if a in gone else a for a in self._slots.addresses])

    def _prepare(self, control: ControlClient, order: dict[str, Any] | None) -> None:
        """Bring a new server to the state of the others before its address is known."""
        if self.offloaded:  # first, because the device is in use by the trainer
            control.post("/offload", tags=sorted(self.offloaded))
        if order is not None:
            control.post("/update_weights", **order)
        if self._paused:
            control.post("/pause")

    def _leave_out(self, address: str, cause: str) -> None:
        logger.warning("a server is lost, the others go on: %s", cause)
        self._drop(address)

    def _drop(self, address: str) -> None:
        self.controls = tuple(c for c in self.controls if c.address != address)
        self._left_out.add(address)
        self._tell_copies()


def served_version(control: ControlClient) -> int:
    return _version_in(control.get("/health"), control)


def _version_in(health: dict[str, Any], control: ControlClient) -> int:
    version = health.get("version")
    if type(version) is not int or version < 0:
        raise ServerError(f"native server {control.address}: no version is {version!r:.60}")
    return version


def _tags(tags: Sequence[str] | None) -> dict[str, list[str]]:
    return {} if tags is None else {"tags": list(tags)}


def _comes_back(control: ControlClient) -> bool:
    try:
        control.wait_until_healthy(_COME_BACK_S)
    except ServerError:
        return False
    return True


def _require_model(control: ControlClient, expected: str | None) -> None:
    served = control.get("/health").get("model")
    if served != expected:
        raise RuntimeError(
            f"native server {control.address} serves the model {served}, the others {expected}: "
            "start it with the same --model"
        )


def _require_version(control: ControlClient, expected: int, noted: int | None) -> None:
    version = served_version(control)
    if version not in (expected, noted):
        raise RuntimeError(
            f"native server {control.address} has version {version} of the weights, the others "
            f"serve {expected}: give `join` the order that brought them"
        )


_LOOK_S = 0.1  # poll interval of a copy
_ANSWER_S = 5.0  # timeout of a health probe


class AddressFile:
    """`path` must be readable by every process of the run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, addresses: Sequence[str | None]) -> None:
        """By slot; None where a server was dropped without a replacement."""
        self._write({"addresses": list(addresses)})

    def write_loss(self, cause: str) -> None:
        """No server is left; later readers get EngineLostError with `cause`."""
        self._write({"lost": cause})

    def read(self) -> list[str | None]:
        """EngineLostError if the owner has written a loss."""
        found = json.loads(self._path.read_text(encoding="utf-8"))
        if "lost" in found:
            raise EngineLostError(found["lost"])
        return found["addresses"]

    def _write(self, content: dict[str, object]) -> None:
        # No other run reads it, so it need not survive a power failure.
        atomic_write_text(self._path, json.dumps(content), durable=False)


class FollowedSlots:
    """The server slots (server_process.py) of a copy of the client: it starts no server, and waits
    up to `timeout_s` for the owner, which also notices the end of a process."""

    num_restarts = 0  # the owner counts them

    def __init__(
        self, addresses: Sequence[str], token: str, file: AddressFile, *, timeout_s: float
    ) -> None:
        self.addresses: list[str | None] = list(addresses)
        self._token = token
        self._file = file
        self._timeout_s = timeout_s
        self._replaced: dict[str, str | None] = {}
        self._lock = threading.Lock()  # guards all above

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def renew_restarts(self) -> None:
        """No-op: the owner counts restarts."""

    def has_ended(self, address: str) -> bool:
        return address in self._replaced or (
            address in self.addresses and not self._answers(address)
        )

    def replace(self, address: str, prepare: Callable[[int, str], None]) -> str | None:
        """The current address of the slot of `address`; None if the owner has dropped it."""
        with self._lock:
            if address in self._replaced:
                return self._replaced[address]
            if address not in self.addresses:
                return address
            slot = self.addresses.index(address)
            with waiting(f"the replacement of the server {address}"):
                found = self._wait_for_owner(slot, address)
            if found != address:
                if found is not None:
                    self._replaced.pop(found, None)  # a port may be reused
                self._replaced[address] = self.addresses[slot] = found
            return found

    def _wait_for_owner(self, slot: int, address: str) -> str | None:
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            found = self._file.read()[slot]
            if found != address or self._answers(address):
                return found
            time.sleep(_LOOK_S)
        limit = f"{self._timeout_s:g} s (rollout.setup_timeout)"
        raise ServerError(f"native server {address}: no replacement within {limit}")

    def _answers(self, address: str) -> bool:
        return ControlClient(address, self._token, timeout_s=_ANSWER_S).is_there(_ANSWER_S)
