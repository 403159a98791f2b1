"""Who may come and go: weights of a server that joins are verified, one that leaves is idle first.

    verify_newcomer(protocol, newcomer, member)      # raises unless both have the same weights
    wait_until_idle(protocol, control, timeout_s=60) # after it gets no more requests

Where nothing holds the weights that serve (`xccl`, `delta`), a server joins with the next ones:

    joining = JoinsWithNextWeights(protocol, pool)
    joining.join("host:port", token, timeout_s=60)   # a thread of its own, which waits
    joining.begin_update(); ...; joining.admit(8)    # that of updates, around sending version 8

Servers that show checksums of their tensors are compared by these, bit for bit. Of others the
log-probabilities of a few tokens are compared: that finds another model, not a version or two.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

from areal.engine.remote.protocol import ServerProtocol
from areal.engine.remote.server_control import ControlClient, ServerError, ServerRefusedError
from areal.engine.remote.server_pool import ServerPool
from areal.utils import logging
from areal.utils.waits import waiting

logger = logging.getLogger("ServerPool")

# Mean |log p - log p| of two servers that compute in bfloat16 with the same weights.
_MAX_GAP = 0.1
_ANSWER_S = 120.0  # checksums of a large model take seconds; a hung server holds up the next update
_POLL_S = 0.1
LOOK_S = 5.0  # for a server that joins to show that it is there
_NUM_IDLE = 3  # looks in a row: a request may be on its way when a server stops getting new ones
_NOT_SHOWN = (NotImplementedError, ServerRefusedError)


class UpdateUnderWayError(RuntimeError):
    """The weights of the two servers cannot be compared: one is being updated."""


def verify_newcomer(
    protocol: ServerProtocol, newcomer: ControlClient, member: ControlClient
) -> None:
    """RuntimeError names the difference. UpdateUnderWayError: try again."""
    newcomer, member = newcomer.within(_ANSWER_S), member.within(_ANSWER_S)
    version = protocol.served_version(newcomer)
    try:
        ours, theirs = protocol.weight_checksums(newcomer), protocol.weight_checksums(member)
    except _NOT_SHOWN:
        fault = _compare_logprobs(protocol, newcomer, member, version)
    else:
        names = [name for name in theirs | ours if ours.get(name) != theirs.get(name)]
        fault = f"{names[0]} ({len(names)} tensors differ)" if names else ""
    if fault and protocol.served_version(member) != version:
        raise UpdateUnderWayError(f"{member.kind} {member.address} is being updated")
    if fault:
        raise RuntimeError(
            f"{newcomer.kind} {newcomer.address} has other weights than {member.address} at "
            f"version {version}: {fault}; start it from the same model, with the same dtype"
        )


def _compare_logprobs(
    protocol: ServerProtocol, newcomer: ControlClient, member: ControlClient, version: int | None
) -> str:
    """What differs; empty if nothing does."""
    ours, theirs = (protocol.probe(control, version) for control in (newcomer, member))
    gaps = []
    for (token, logprob), (other, other_logprob) in zip(ours, theirs, strict=False):
        gaps.append(abs(logprob - other_logprob))
        if token != other:  # from here on the prefixes differ
            break
    gap = sum(gaps) / len(gaps) if gaps else float("nan")
    if gap <= _MAX_GAP:  # not if it is NaN
        return ""
    return f"log-probabilities differ by {gap:.2g} on average (at most {_MAX_GAP} is expected)"


class JoinsWithNextWeights:
    """Of the process that owns the pool; copies only read from it who is sent weights."""

    def __init__(self, protocol: ServerProtocol, pool: ServerPool) -> None:
        self._protocol = protocol
        self._pool = pool
        self._admissions: dict[str, Future[None]] = {}
        self._expecting: frozenset[str] = frozenset()  # that waited when the update began
        self._ending = threading.Lock()  # an admission ends once

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_admissions": {}, "_ending": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._ending = threading.Lock()

    def join(self, address: str, token: str | None, *, timeout_s: float) -> None:
        """Returns when it has joined; RuntimeError if it cannot, or no weights come in time."""
        admission: Future[None] = Future()
        # Before the pool knows the address: an update under way may admit it at once.
        if self._admissions.setdefault(address, admission) is not admission:
            raise ValueError(f"{self._protocol.kind} {address} is joining already")
        try:
            self._pool.await_weights(address, token)
        except BaseException:
            del self._admissions[address]
            raise
        try:
            with waiting(f"the next weights, with which the server {address} joins"):
                admission.result(timeout_s)
        except TimeoutError:
            late = f"no weights were sent for {timeout_s:g} s, so {address} has none"
            self._end(address, RuntimeError(late))
            admission.result()  # it may have joined just now

    def begin_update(self) -> None:
        """A server that is gone by now is not waited for in the update."""
        for address, token in list(self._pool.awaiting.items()):
            control = self._pool.connect(address, token)
            if not control.is_there(LOOK_S):
                lost = f"{control.kind} {address} does not answer"
                self._end(address, RuntimeError(lost))
        self._expecting = frozenset(self._pool.awaiting)

    def admit(self, version: int) -> None:
        """Servers that waited for `version`, which is live, join if they have it."""
        awaiting = self._pool.awaiting  # replaced as a whole: a `join` that gives up changes it
        for address in self._expecting & awaiting.keys():
            try:
                control = self._pool.prepare_newcomer(address, awaiting[address])
                served = self._protocol.served_version(control)
                if served not in (None, version):
                    raise RuntimeError(
                        f"{control.kind} {address} has version {served} of the weights, {version} "
                        "was sent"
                    )
                verify_newcomer(self._protocol, control, self._pool.controls[0])
            except RuntimeError as error:
                self._end(address, error)
            else:
                self._end(address, None)

    def _end(self, address: str, fault: RuntimeError | None) -> None:
        with self._ending:
            admission = self._admissions.pop(address, None)
            if admission is None:
                return
            self._pool.end_awaiting(address, joins=fault is None)
        if fault is None:
            admission.set_result(None)
        else:
            logger.warning("a server does not join: %s", fault)
            admission.set_exception(fault)


def wait_until_idle(protocol: ServerProtocol, control: ControlClient, *, timeout_s: float) -> None:
    """Until it has no request, as far as it tells; at once if it is gone. RuntimeError after
    `timeout_s`."""
    deadline, num_idle = time.monotonic() + timeout_s, 0
    with waiting(f"the last requests of {control.kind} {control.address}"):
        while num_idle < _NUM_IDLE:
            try:
                stats = protocol.stats(control)
            except ServerRefusedError as error:  # started without metrics
                logger.warning("cannot see whether a server is idle: %s", error)
                return
            except ServerError as error:  # its requests go on elsewhere
                logger.warning("a server was lost while it drained: %s", error)
                return
            num_idle = 0 if stats.get("running", 0) + stats.get("waiting", 0) else num_idle + 1
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{control.kind} {control.address} still has {stats.get('running', 0):.0f} "
                    f"requests after {timeout_s:g} s: it stays"
                )
            time.sleep(_POLL_S)
