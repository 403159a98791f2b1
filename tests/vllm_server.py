"""A server with vLLM's routes for weights, and workers that only keep what they are given.

    python vllm_server.py --model DIR --port 8000 --tensor-parallel-size 2 ...

For tests of what travels: it generates nothing, and imports no more than torch and the class that
`--worker-extension-cls` names. As in vLLM the class becomes a base of the worker, every worker has
a rank, and /collective_rpc calls a method on all of them at once. Started by a script in place of
`python -m vllm.entrypoints.openai.api_server` (see vllm_python).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch


def vllm_python(folder: Path) -> Path:
    """A program to be called like a python with vllm in it."""
    script = folder / "python"
    script.write_text(
        "#!/bin/sh\n"
        '[ "$1 $2" = "-m vllm.entrypoints.openai.api_server" ] || exit 2\n'
        "shift 2\n"
        f'exec "{sys.executable}" "{__file__}" "$@"\n'
    )
    script.chmod(0o755)
    return script


class KeepingWorker:
    """Has of vLLM's worker what the extension uses."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.device = torch.device("cpu")
        self.weights: dict[str, torch.Tensor] = {}
        self.num_loads = 0

    def reload_weights(self, *, weights_iterator) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights_iterator}
        self.num_loads += 1

    def report(self) -> dict:
        sums = {name: tensor.double().sum().item() for name, tensor in self.weights.items()}
        place = self._areal_group and self._areal_group.place
        return {
            "loads": self.num_loads,
            "sums": sums,
            "place": place and [place.name, place.rank, place.world_size],
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    workers: list[KeepingWorker] = []
    version = "default"

    def do_GET(self) -> None:
        found = {"/weight_info": {"weight_version": Handler.version}}
        self.reply(200, found.get(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/update_weight_version":
            Handler.version = body["new_version"]
        if self.path != "/collective_rpc":
            return self.reply(200, {})
        try:
            with ThreadPoolExecutor(len(self.workers)) as pool:
                calls = [
                    pool.submit(getattr(worker, body["method"]), **body["kwargs"])
                    for worker in self.workers
                ]
            self.reply(200, {"results": [call.result() for call in calls]})
        except Exception as error:
            self.reply(500, {"error": {"message": str(error)}})

    def reply(self, status: int, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("host", "worker-extension-cls", "model"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "tensor-parallel-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    module, _, name = args.worker_extension_cls.rpartition(".")
    before = set(sys.modules)
    extension = getattr(importlib.import_module(module), name)
    brought = {loaded.partition(".")[0] for loaded in set(sys.modules) - before}
    assert brought <= {"areal", *sys.stdlib_module_names}, brought
    worker = type("Worker", (KeepingWorker, extension), {})
    Handler.workers = [worker(rank) for rank in range(args.tensor_parallel_size)]
    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
