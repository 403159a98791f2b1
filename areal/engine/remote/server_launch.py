"""Starts a stock inference server in an environment of its own and waits until it answers.

Its packages are not ours: the interpreter is the one of its environment, and no path of this
process's leads it to other packages. It listens on this machine only, on a port chosen here.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal.engine.remote.server_control import ControlClient
from areal.utils.child_process import ChildProcess

_PROBE_S = 5.0  # for one question whether it is ready


def launch_server(
    kind: str,
    command: Sequence[str],
    options: Mapping[str, Any],
    flags: Mapping[str, bool],
    extra_args: Sequence[str],
    *,
    env: Mapping[str, str],
    token: str,
    gpus: Sequence[str] | None,
    log_path: str | Path | None,
    setup_timeout_s: float,
) -> tuple[ChildProcess, str]:
    """(the child, its "host:port"). Options that are None and flags that are False are left out.

    RuntimeError with its last output when it ends, or is not ready in time; it is then gone.
    """
    address = f"127.0.0.1:{_free_port()}"
    host, _, port = address.partition(":")
    argv = [*command, "--host", host, "--port", port]
    for name, value in options.items():
        if value is not None:
            argv += [f"--{name}", str(value)]
    argv += [f"--{name}" for name, wanted in flags.items() if wanted]
    own = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", **env}
    if gpus is not None:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    child = ChildProcess([*argv, *extra_args], name=kind, env=own, log_path=log_path)
    control = ControlClient(address, token, timeout_s=_PROBE_S, kind=kind)
    try:
        child.wait_until(control.is_healthy, timeout_s=setup_timeout_s)
    except BaseException:  # Ctrl-C too: a half-started server must not stay
        child.terminate()
        raise
    return child, address


def _free_port() -> int:
    """A port nobody listens on now; a server that loses it meanwhile ends and says so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
