"""The servers and rollout workers of a living run, each with its state, from what the run says of
itself about every second (run/mailbox.py).

    living_members(run)     # {"servers": [...], "workers": [...], "why": ""}

`why` says why nothing is known: the run is not alive, or has neither. Processes are told apart from
files that a killed one left behind by the time of the newest sign.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from areal.dashboard.reader import RunReader
from areal.run.mailbox import SILENCE_S, RunSilentError, last_sign, read_state

_LARGEST = sys.float_info.max  # a page reads numbers as doubles
_LOAD = ("version", "running", "waiting")


def living_members(run: RunReader, now: float | None = None) -> dict[str, Any]:
    try:
        state = read_state(run.paths.fleet)
        silent_s = (now or time.time()) - last_sign(run.paths.fleet)
    except (RunSilentError, ValueError, OSError) as error:
        return _nobody(str(error))
    if silent_s > SILENCE_S:
        return _nobody(f"the run gave no sign for {silent_s:.0f} s: it was killed, or hangs")
    states, loads = _mapping(state.get("servers")), _mapping(state.get("loads"))
    servers = [
        {"name": str(address), "state": str(one), **_load(loads.get(address))}
        for address, one in states.items()
    ]
    workers = state.get("workers")
    found = workers if isinstance(workers, list) else []
    return {
        "servers": servers,
        "workers": [_worker(one) for one in found if isinstance(one, dict)],
        "why": "",
    }


def _nobody(why: str) -> dict[str, Any]:
    return {"servers": [], "workers": [], "why": why}


def _worker(found: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": str(found.get("name")),
        "state": str(found.get("state")),
        "pid": _number(found.get("pid")),
        "groups": _number(found.get("groups")),
    }


def _load(found: Any) -> dict[str, float | None]:
    """At the end of the newest step; None before the first."""
    load = _mapping(found)
    return {name: _number(load.get(name)) for name in _LOAD}


def _mapping(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _number(found: Any) -> float | None:
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return found if is_number and abs(found) <= _LARGEST else None  # NaN is not
