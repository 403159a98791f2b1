"""Weights through a process group into the workers of vLLM servers: which ranks they have, what
they are given, and what is refused. The real vLLM is in test_vllm_remote.py."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
from server_checks import RECEIVER, request
from tiny import tiny_model, write_tiny_model
from vllm_server import KeepingModel, make_engine, offer_vllm, vllm_python
from weight_sync.test_collective import open_groups

from areal.api.engine_api import EngineLostError
from areal.api.io_struct import WeightUpdateMeta
from areal.engine.remote.engine import RemoteEngine
from areal.engine.remote.server_process import ServerProcess
from areal.engine.remote.vllm import VLLMProtocol, launch_vllm_server
from areal.engine.train.export import send_weights
from areal.weight_sync.collective import GroupError

TOKEN = "token-of-this-run"
BACKEND = "areal.engine.remote.vllm_worker"


def meta_of(version):
    return WeightUpdateMeta(
        type="xccl", version=version, gen_allocation=RECEIVER, weight_chunked_mem_mb=1
    )


def weights_of(version):
    return tiny_model(seed=version, vocab_size=8000).named_hf_tensors()  # several buckets


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=8000)


@pytest.fixture(scope="module")
def launched(folder, tmp_path_factory):
    """Servers of two workers and of one, and the children of their processes."""
    root, children = tmp_path_factory.mktemp("servers"), []

    def start(index):
        def launch():
            child, address = launch_vllm_server(
                folder,
                python=vllm_python(root),
                token=TOKEN,
                scratch=root / f"scratch{index}",
                tensor_parallel=2 - index,
                log_path=root / f"server{index}.log",
                setup_timeout_s=900,
            )
            children.append(child)
            return child, address

        return ServerProcess(launch)

    with ThreadPoolExecutor(2) as pool:
        processes = list(pool.map(start, range(2)))
    yield processes, children
    for process in processes:
        process.close()


def test_every_worker_of_two_servers_takes_every_version(folder, launched):
    processes, children = launched
    engine = RemoteEngine(
        VLLMProtocol(folder),
        [process.address for process in processes],
        TOKEN,
        processes=processes,
        request_timeout_s=60,
        request_retries=0,
    )
    engine.initialize()
    assert engine.get_version() == 0
    places = set()
    for version in (1, 2):
        send_weights(engine, meta_of(version), weights_of(version))
        expected = {name: t.double().sum().item() for name, t in weights_of(version)}
        assert "lm_head.weight" not in expected
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
        reports = [report for control in engine._pool.controls for report in reports_of(control)]
        assert [report["place"][1:] for report in reports] == [[1, 4], [2, 4], [3, 4]]
        places |= {report["place"][0] for report in reports}
        for report in reports:
            assert report["loads"] == version and report["sums"] == expected
        assert engine.get_version() == version
    assert len(places) == 1  # one group for both versions

    breaks_off_and_recovers(engine)

    for control in engine._pool.controls:  # as a sender that is killed between two routes
        control.post("/start_weight_update")
    send_weights(engine, meta_of(5), weights_of(5))
    assert engine.get_version() == 5

    os.killpg(children[0].pid, signal.SIGKILL)
    os.killpg(children[1].pid, signal.SIGKILL)
    lost = "SIGKILL.* cannot be replaced: the weights of version 5 came through a process group"
    with pytest.raises(EngineLostError, match=f"(?s){lost}"):
        engine.stats()
    with pytest.raises(EngineLostError, match=f"(?s){lost}"):
        asyncio.run(engine.agenerate(request()))
    assert len(children) == 2
    engine.destroy()


def reports_of(control):
    return control.post("/collective_rpc", method="report", kwargs={})["results"]


def breaks_off_and_recovers(engine):
    def broken():
        yield "model.norm.weight", torch.ones(32)
        raise OSError("the trainer lost a weight")

    with pytest.raises(OSError, match="the trainer lost a weight"):
        engine.update_weights(meta_of(3), broken())
    with pytest.raises(RuntimeError, match="no weights serve: version 3 did not load"):
        asyncio.run(engine.agenerate(request()))
    engine.update_weights(meta_of(4), weights_of(4))  # through a new group
    reports = [report for control in engine._pool.controls for report in reports_of(control)]
    assert [report["loads"] for report in reports] == [3, 3, 3] and engine.get_version() == 4


@pytest.fixture
def engine_of_worker(monkeypatch):
    """The transfer engine of a worker, and the model it loads into."""
    vllm: dict[str, ModuleType] = {}
    offer_vllm(vllm)
    for name, module in vllm.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)
    importlib.import_module(BACKEND)
    monkeypatch.delitem(sys.modules, BACKEND)
    model = KeepingModel()
    return make_engine(0, 1, model), model


def test_what_does_not_verify_is_not_loaded(engine_of_worker):
    engine, model = engine_of_worker
    order = {"group": "g", "version": 1, "with_lm_head": False}
    for group in ("g", "none"):
        with pytest.raises(GroupError, match=f"through the group {group}, this worker is in none"):
            engine.update_weights({**order, "group": group})
    with pytest.raises(TypeError, match="paths"):
        engine.update_weights({**order, "paths": "/"})
    with ThreadPoolExecutor(2) as pool:
        sender, engine._group = open_groups(pool, 1)
        taking = pool.submit(engine.update_weights, order)
        header = {"weights": [["a", "F32", [4], 0]], "checksum": 1, "nbytes": 16}
        sender._send_header({"version": 1, **header})
        flat = torch.zeros(16, dtype=torch.uint8)
        sender._finish(sender._broadcast(flat, sender._buckets))
        with pytest.raises(GroupError, match=r"\(a ...\) is not what was sent"):
            taking.result()
        assert model.num_loads == 0 and engine._group is None
        sender.close()

        sender, engine._group = open_groups(pool, 1)
        taking = pool.submit(engine.update_weights, {**order, "with_lm_head": True})
        sender.send(1, [("model.norm.weight", torch.ones(4))], bucket_bytes=100)
        with pytest.raises(ValueError, match=r"version 1: expected one weight named \*embed_tok"):
            taking.result()
        assert model.num_loads == 0
        sender.close()


def test_an_update_that_fails_late_leaves_the_group_joined_meanwhile(engine_of_worker):
    engine, model = engine_of_worker
    order = {"group": "g", "version": 1, "with_lm_head": False}
    with ThreadPoolExecutor(2) as pool:
        ended = open_groups(pool, 1)
        engine._group = ended[1]
        taking = pool.submit(engine.update_weights, order)
        while not ended[1]._under_way and not taking.done():
            time.sleep(0.01)
        sender, joined = open_groups(pool, 1)
        engine._group = joined
        ended[0].close()
        with pytest.raises(GroupError):
            taking.result()
        assert engine._group is joined
        taking = pool.submit(engine.update_weights, order)
        sender.send(1, [("model.norm.weight", torch.ones(4))], bucket_bytes=100)
        taking.result()
        assert model.num_loads == 1
        engine.shutdown()
        assert engine._group is None
        sender.close()
