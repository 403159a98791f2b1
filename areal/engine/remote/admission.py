"""Who may come and go: weights of a server that joins are verified, one that leaves is idle first.

    verify_newcomer(protocol, newcomer, member)      # raises unless both have the same weights
    wait_until_idle(protocol, control, timeout_s=60) # after it gets no more requests

Servers that show checksums of their tensors are compared by these, bit for bit. Of others the
log-probabilities of a few tokens are compared: that finds another model, not a version or two.
"""

from __future__ import annotations

import time

from areal.engine.remote.protocol import ServerProtocol
from areal.engine.remote.server_control import ControlClient, ServerError, ServerRefusedError
from areal.utils import logging
from areal.utils.waits import waiting

logger = logging.getLogger("ServerPool")

# Mean |log p - log p| of two servers that compute in bfloat16 with the same weights.
_MAX_GAP = 0.1
_ANSWER_S = 120.0  # checksums of a large model take seconds; a hung server holds up the next update
_POLL_S = 0.1
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
