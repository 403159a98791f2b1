"""What each server of a pool says of itself now: version and load."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from areal.engine.remote.protocol import ServerProtocol
from areal.engine.remote.server_control import ServerError, ServerRefusedError
from areal.engine.remote.server_pool import ServerPool

_ANSWER_S = 5.0


def server_reports(protocol: ServerProtocol, pool: ServerPool) -> list[dict[str, Any]]:
    """State `silent` if it does not answer."""

    def report(address: str, state: str) -> dict[str, Any]:
        control = pool.connect(address).within(_ANSWER_S)
        found: dict[str, Any] = {"address": address, "state": state, "version": pool.version}
        try:
            version = protocol.served_version(control)
            found["version"] = pool.version if version is None else version
            stats = protocol.stats(control)
        except ServerRefusedError:  # a stock server without metrics
            return found
        except ServerError:
            return found | {"state": "silent"}
        return found | {name: stats[name] for name in ("running", "waiting") if name in stats}

    states = pool.states()
    if not states:  # all are lost
        return []
    with ThreadPoolExecutor(len(states), thread_name_prefix="server-reports") as threads:
        return list(threads.map(report, states, states.values()))
