"""The process of a native server: `areal serve`, as a child of this one.

    child, address = launch_native_server(path, token=token)     # also as a name of native.py

Imports no torch: on a cluster a process of its own starts each server and watches it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from areal.api.config.inference_servers import command_line
from areal.utils.child_process import ChildProcess


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
    device: str | None = "cpu",
    seed: int = 0,
    gpus: Sequence[str] | None = None,
    host: str = "127.0.0.1",
    log_path: str | Path | None = None,
    setup_timeout_s: float = 300.0,
) -> tuple[ChildProcess, str]:
    """Starts `areal serve` as a child of this process; (the child, its "host:port").

    `gpus` are those it may use, by default the ones this process sees; `device` None is the best it
    has. `host` is the address to listen on.

    RuntimeError with its last output if it exits or is not ready in time; it is then terminated.
    """
    options = {
        "model": model_path,
        "threads": threads,
        "page-size": page_size,
        "num-pages": num_pages,
        "max-running": max_running,
        "tensor-parallel": tensor_parallel,
        "dtype": dtype,
        "device": device or "best",
        "seed": seed,
        "host": host,
        "batch-invariant": batch_invariant,
    }
    serve = [sys.executable, "-m", "areal.cli.main", "serve", "--port", "0"]
    argv = [*serve, *command_line(options)]
    # Not an argument, which every user of the machine can read.
    env = {"AREAL_SERVER_TOKEN": token, "OMP_NUM_THREADS": str(threads)}
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    child = ChildProcess(argv, name="native server", env=env, log_path=log_path)
    try:
        line = child.wait_ready(timeout_s=setup_timeout_s, is_ready=lambda line: line[:1] == "{")
    except BaseException:  # also Ctrl-C: a half-started server must not stay
        child.terminate()
        raise
    ready = json.loads(line)
    return child, f"{ready['host']}:{ready['port']}"
