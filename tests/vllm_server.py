"""A server with vLLM's routes for weights, and workers that only keep what they are given.

    python vllm_server.py --model DIR --port 8000 --tensor-parallel-size 2 ...

For tests of what travels: it generates nothing, and imports no more than torch and the class that
`--worker-extension-cls` names. As in vLLM the class becomes a base of the worker, every worker has
a rank and makes the transfer engine of `--weight-transfer-config`, and a route calls all of them at
once. An update has a start, parts and a finish, in this order, or it is refused. Started by a
script in place of `python -m vllm.entrypoints.openai.api_server` (see vllm_python).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import torch

Init, Update = TypeVar("Init"), TypeVar("Update")
# Method of every worker by route, and the part of the body that is its argument.
ROUTES = {
    "/init_weight_transfer_engine": ("init_weight_transfer_engine", "init_info"),
    "/start_weight_update": ("start_weight_update", None),
    "/update_weights": ("update_weights", "update_info"),
    "/finish_weight_update": ("finish_weight_update", None),
}


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


class WeightTransferEngine(ABC, Generic[Init, Update]):
    """What vLLM asks of a backend, as its documentation has it."""

    init_info_cls: Any
    update_info_cls: Any

    def __init__(self, config, vllm_config, device, model) -> None:
        self.device, self.model = device, model
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config

    def parse_init_info(self, init_dict):
        return self.init_info_cls(**init_dict)

    def parse_update_info(self, update_dict):
        return self.update_info_cls(**update_dict)

    def update_weights(self, update_info) -> None:
        raise NotImplementedError("torch.accelerator.synchronize fails on a CPU: override this")

    @abstractmethod
    def init_transfer_engine(self, init_info) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class WeightTransferEngineFactory:
    known: dict[str, Any] = {}

    @classmethod
    def register_engine(cls, name, engine_cls) -> None:
        cls.known[name] = engine_cls


def offer_vllm(modules: MutableMapping[str, ModuleType]) -> None:
    """The modules of vLLM that areal's backend imports."""
    names = ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.model_executor")
    names += ("vllm.model_executor.model_loader", "vllm.model_executor.model_loader.reload")
    made = {name: ModuleType(name) for name in names}
    vars(made["vllm.distributed.weight_transfer"]).update(
        WeightTransferEngine=WeightTransferEngine,
        WeightTransferEngineFactory=WeightTransferEngineFactory,
    )
    vars(made["vllm.model_executor.model_loader.reload"]).update(
        initialize_layerwise_reload=lambda model: model.begin(),
        finalize_layerwise_reload=lambda model, config: model.end(),
    )
    for name, module in made.items():
        modules[name] = module


class KeepingModel:
    """Loads only between the two calls of a layerwise reload."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.num_loads = 0
        self.is_loading = False

    def begin(self) -> None:
        assert not self.is_loading
        self.is_loading = True

    def load_weights(self, named_tensors) -> None:
        assert self.is_loading
        self.weights = {name: tensor.clone() for name, tensor in named_tensors}

    def end(self) -> None:
        assert self.is_loading
        self.is_loading = False
        self.num_loads += 1


def make_engine(rank: int, world_size: int, model: KeepingModel) -> Any:
    parallel = SimpleNamespace(rank=rank, world_size=world_size, data_parallel_index=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    engine_cls = WeightTransferEngineFactory.known["areal"]
    return engine_cls(SimpleNamespace(backend="areal"), config, torch.device("cpu"), model)


class KeepingWorker:
    """Has of vLLM's worker what the routes and the extension use."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.device = torch.device("cpu")
        self.model = KeepingModel()
        self.engine = make_engine(rank, world_size, self.model)
        self.is_updating = False

    def init_weight_transfer_engine(self, init_info) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        if self.is_updating:
            raise RuntimeError("a weight update is already active")
        self.engine.start_weight_update()
        self.is_updating = True

    def update_weights(self, update_info) -> None:
        if not self.is_updating:
            raise RuntimeError("start_weight_update must be called before update_weights")
        try:
            self.engine.update_weights(update_info)
        except BaseException:
            self.is_updating = False
            raise

    def finish_weight_update(self) -> None:
        if not self.is_updating:
            raise RuntimeError("finish_weight_update without a matching start_weight_update")
        self.engine.finish_weight_update()
        self.is_updating = False

    def reset_encoder_cache(self) -> None: ...

    def report(self) -> dict:
        sums = {name: tensor.double().sum().item() for name, tensor in self.model.weights.items()}
        place = self.engine._group and self.engine._group.place
        return {
            "loads": self.model.num_loads,
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
        try:
            self.reply(200, self.answer(body))
        except Exception as error:
            self.reply(500, {"error": {"message": str(error)}})

    def answer(self, body: dict) -> dict:
        if self.path == "/update_weight_version":
            Handler.version = body["new_version"]
        elif self.path == "/collective_rpc":
            return {"results": self.on_workers(body["method"], **body["kwargs"])}
        elif self.path in ROUTES:
            method, argument = ROUTES[self.path]
            self.on_workers(method, **({} if argument is None else {argument: body[argument]}))
            if self.path == "/finish_weight_update" and body.get("weight_version") is not None:
                Handler.version = body["weight_version"]
        return {}

    def on_workers(self, method: str, **kwargs: Any) -> list[Any]:
        with ThreadPoolExecutor(len(self.workers)) as pool:
            calls = [pool.submit(getattr(one, method), **kwargs) for one in self.workers]
        return [call.result() for call in calls]

    def reply(self, status: int, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("host", "worker-extension-cls", "weight-transfer-config", "model"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "tensor-parallel-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    offer_vllm(sys.modules)
    module, _, name = args.worker_extension_cls.rpartition(".")
    before = set(sys.modules)
    extension = getattr(importlib.import_module(module), name)
    brought = {loaded.partition(".")[0] for loaded in set(sys.modules) - before}
    assert brought <= {"areal", *sys.stdlib_module_names}, brought
    assert json.loads(args.weight_transfer_config) == {"backend": "areal"}
    worker, count = type("Worker", (KeepingWorker, extension), {}), args.tensor_parallel_size
    Handler.workers = [worker(rank, count) for rank in range(count)]
    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
