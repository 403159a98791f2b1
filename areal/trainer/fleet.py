"""Servers that join and leave a living run: `areal serve join RUN` and `leave`.

    listen_for_servers(config, run, engine, stack)   # from the first step on, until `stack` closes

Requests come through the run's folder (run/mailbox.py). A server that joins must be of the run's
kind and model. The engine then brings it to the live weights, or where nothing holds them sends it
the next ones too, and verifies them before it gets a request (engine/remote/admission.py). One that
leaves is drained first. A request blocks its own thread only; its failure is answered and never
ends the run.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from areal.api.engine_api import InferenceEngine
from areal.api.redact import remember_secret
from areal.engine.remote.engine import RemoteEngine
from areal.run.mailbox import MailboxServer
from areal.trainer.servers import check_server, native_options, protocol_of
from areal.utils import logging

if TYPE_CHECKING:
    from areal.api.config.experiment import PPOConfig
    from areal.rollout.workers import RolloutWorkers
    from areal.run.run import Run

logger = logging.getLogger("Fleet")

_LASTING = ("shm", "disk")  # transports whose weights a server can load later
_SENT = ("xccl", "delta")  # those that leave nothing behind: a server joins with the next weights
_ADDRESS = re.compile(r"[A-Za-z0-9._-]{1,253}:[0-9]{1,5}")


def listen_for_servers(
    config: PPOConfig,
    run: Run,
    engine: InferenceEngine,
    workers: RolloutWorkers | None,
    stack: ExitStack,
) -> None:
    """No-op where no server can join: generation in this process, or in turns with training.

    The mailbox also tells the dashboard the state of the servers and of the rollout workers.
    """
    time_shared = config.rollout.scheduling_strategy.target is not None
    if not isinstance(engine, RemoteEngine) or time_shared:
        return
    fleet = _Fleet(config, run, engine, workers)
    mailbox = MailboxServer(run.paths.fleet, fleet.handle, fleet.describe)
    stack.callback(mailbox.close)
    mailbox.start()


class _Fleet:
    def __init__(
        self, config: PPOConfig, run: Run, engine: RemoteEngine, workers: RolloutWorkers | None
    ) -> None:
        self._config = config
        self._run = run
        self._engine = engine
        self._workers = workers
        self._left: set[str] = set()  # by request: whoever serves there has no reason to go on

    def describe(self) -> dict[str, Any]:
        """What a server must be to join, and who is there."""
        engine = self._config.rollout.engine
        options = native_options(self._config) if engine == "native" else {}
        model = self._config.actor.path
        members = {
            "servers": self._engine.member_states(),
            "loads": self._engine.member_loads(),
            "workers": [] if self._workers is None else self._workers.states(),
            "left": sorted(self._left),
        }
        return {"engine": engine, "model": model, "options": options, **members}

    def handle(self, op: str, fields: dict[str, Any]) -> dict[str, Any]:
        if op == "list":
            return {"servers": self._engine.server_states()}
        if op not in ("join", "leave"):
            raise ValueError(f"op: expected join, leave or list, got {op!r:.40}")
        address = fields.get("address")
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            raise ValueError(f"address: expected host:port, got {address!r:.80}")
        if op == "leave":
            return self._leave(address)
        token = fields.get("token")
        if not isinstance(token, str):
            raise ValueError("token: expected the server's token")
        return self._join(address, token)

    def _join(self, address: str, token: str) -> dict[str, Any]:
        remember_secret(token)
        config, engine = self._config, self._engine
        mode = config.actor.weight_update_mode
        if mode not in (*_LASTING, *_SENT):
            raise ValueError(
                f"actor.weight_update_mode: with {mode!r} the server is on the trainer's GPU, and "
                "no other can join; set it to disk, shm, delta or xccl"
            )
        if address not in engine.servers:
            check_server(config, protocol_of(config), address, token, key="join")
            if mode in _LASTING:
                engine.join(address, token=token)
            else:
                limit_s = config.actor.request_timeout  # of a training step
                engine.join_with_next_weights(address, token=token, timeout_s=limit_s)
            self._left.discard(address)
            self._record("joined", address)
        return {"servers": engine.member_states()}

    def _leave(self, address: str) -> dict[str, Any]:
        self._engine.leave(address)
        self._left.add(address)
        self._record("left", address)
        return {"servers": self._engine.member_states()}

    def _record(self, what: str, address: str) -> None:
        logger.info("server %s has %s; %d serve", address, what, len(self._engine.servers))
        self._run.database.record_event(f"server_{what}", address)
