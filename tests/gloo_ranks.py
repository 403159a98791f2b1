"""Real processes joined by gloo, for tests of everything that is spread over ranks.

    def body(folder: str) -> float: ...               # in tests/engine/test_x.py
    results = run_ranks(2, "engine.test_x:body", str(tmp_path))   # one result per rank

Each rank is a process of its own with RANK and WORLD_SIZE set and torch.distributed initialised.
Modules are named from the folder of tests; arguments and results travel as JSON (pass tensors as
files). The first rank that fails ends all others, and its traceback becomes the test's failure.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fork_server import fork


def run_ranks(world_size: int, target: str, *args: Any, timeout_s: float = 900) -> list[Any]:
    """What `target` ("module:function") returned on each rank, given `args`."""
    with tempfile.TemporaryDirectory(prefix="areal-ranks-") as folder:
        ranks = [
            fork(_run_rank, folder, rank, world_size, target, json.dumps(args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, folder, target, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return [json.loads(_file(folder, rank, "json").read_text()) for rank in range(world_size)]


def _wait(ranks: list[BaseProcess], folder: str, target: str, deadline: float) -> None:
    while True:
        codes = [process.exitcode for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            # A rank that lost its partner fails too, but later: the marker is written by time.
            first = min(failed, key=lambda rank: _failed_at(folder, rank))
            raise AssertionError(f"{target} failed on rank {first}:\n{_log(folder, first)}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            logs = "\n".join(f"rank {r}:\n{_log(folder, r)}" for r in range(len(ranks)))
            waiting = [rank for rank, code in enumerate(codes) if code is None]
            raise AssertionError(f"{target}: ranks {waiting} did not end in time\n{logs}")
        time.sleep(0.02)


def _file(folder: str, rank: int, kind: str) -> Path:
    return Path(folder) / f"rank{rank}.{kind}"


def _log(folder: str, rank: int) -> str:
    return _file(folder, rank, "log").read_text(errors="replace")[-6000:]


def _failed_at(folder: str, rank: int) -> float:
    """A process that died without a word (a signal) is as early as can be."""
    marker = _file(folder, rank, "failed")
    return float(marker.read_text()) if marker.is_file() else 0.0


def _run_rank(folder: str, rank: int, world_size: int, target: str, args: str) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    with _file(folder, rank, "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder) / "rendezvous"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        module, _, function = target.partition(":")
        result = getattr(importlib.import_module(module), function)(*json.loads(args))
        _file(folder, rank, "json").write_text(json.dumps(result))
        dist.barrier()  # nobody leaves while another still talks to it
    except BaseException:
        _file(folder, rank, "failed").write_text(str(time.time()))
        raise
    dist.destroy_process_group()
