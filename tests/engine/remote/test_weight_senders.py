"""Weights from training ranks to two server processes, and servers that die or hang meanwhile."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from engine.train.archon_world import make_batch, open_engine, train, weights_of
from gloo_ranks import run_ranks
from tiny import tiny_config, tiny_model, write_tiny_model

from areal.api.alloc_mode import ModelAllocation
from areal.api.io_struct import WeightUpdateMeta
from areal.engine.native.engine import NativeEngine
from areal.engine.remote.native import NativeRemoteEngine, launch_native_server
from areal.engine.remote.server_control import ControlClient, ServerRefusedError
from areal.engine.train.export import send_weights
from areal.models.hf_io import build_model
from areal.weight_sync.publication import open_publication

TOKEN = "token-of-this-run"
WAIT_S = 900
LARGE = {"vocab_size": 8000}  # 1 MB: several buckets of the smallest size
SENTENCES = [[5, 7, 9, 3, 1], [2, 2, 60]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), **LARGE)


@pytest.fixture(scope="module")
def servers(folder):
    """Two (process, address)."""
    options = {"token": TOKEN, "num_pages": 200, "setup_timeout_s": WAIT_S}
    with ThreadPoolExecutor(2) as pool:
        starting = [pool.submit(launch_native_server, folder, **options) for _ in range(2)]
    found = [future.result() for future in starting]
    yield found
    for child, _ in found:
        child.terminate()


def meta_of(kind: str, path: str, version: int = 0) -> WeightUpdateMeta:
    meta = WeightUpdateMeta(
        type=kind,
        path=path if kind == "delta" else "",
        gen_allocation=ModelAllocation.from_str("native:d2"),
        weight_chunked_mem_mb=1,
    )
    return meta.with_version(version)


def test_two_ranks_to_two_servers(folder, servers, tmp_path):
    addresses = [address for _, address in servers]
    (found, other) = run_ranks(
        2,
        "engine.remote.test_weight_senders:trainer_body",
        str(folder),
        addresses,
        str(tmp_path),
        timeout_s=900,
    )
    assert other is None and [entry["version"] for entry in found] == [1, 2, 3, 4, 5]
    for entry in found:
        one = NativeEngine(build_model(tiny_config(**LARGE), device="cpu", dtype=torch.float32))
        weights = torch.load(tmp_path / f"v{entry['version']}.pt")
        one.load_weights(weights.items(), entry["version"], recompute_kv=True)
        # The same bits of weights give the same bits of log-probabilities.
        assert entry["scores"] == [[s.logprobs for s in one.score(SENTENCES)]] * 2, entry["version"]
    assert found[0]["scores"] != found[1]["scores"] != found[2]["scores"]
    # The first change was refused by the server that had another version, and sent whole.
    assert [entry["base_version"] for entry in found[2:]] == [None, 3, None]


def trainer_body(folder: str, addresses: list[str], scratch: str) -> list[dict] | None:
    """xccl, xccl, then by delta: whole, changes, and whole again for a server that missed one."""
    engine = open_engine(folder, "archon:d2")
    receiver = NativeRemoteEngine(addresses, TOKEN, request_timeout_s=WAIT_S)
    controls = [ControlClient(address, TOKEN, timeout_s=WAIT_S) for address in addresses]
    is_first = dist.get_rank() == 0
    found = []
    for version, kind in enumerate(["xccl", "xccl", "delta", "delta", "delta"], start=1):
        train(engine, make_batch(version))
        engine.connect_engine(receiver, meta_of(kind, f"{scratch}/weights"))
        if version == 5 and is_first:  # as a server that was started again
            whole = f"{scratch}/weights/weight_update_v3"
            controls[1].post("/update_weights", kind="delta", path=whole, version=3)
        engine.update_weights(version)
        weights = weights_of(engine)
        if not is_first:
            continue
        torch.save(weights, f"{scratch}/v{version}.pt")
        answers = [control.post("/score", sequences=SENTENCES) for control in controls]
        assert {answer["version"] for answer in answers} == {version}
        entry = {"version": version, "scores": [answer["logprobs"] for answer in answers]}
        if kind == "delta":
            published = open_publication(f"{scratch}/weights/weight_update_v{version}")
            entry["base_version"] = published.manifest.base_version
        found.append(entry)
    receiver.destroy()
    return found if is_first else None


def test_a_damaged_delta_is_refused_and_the_old_weights_serve(servers, tmp_path):
    (_, first), (_, second) = servers
    engine = NativeRemoteEngine([first], TOKEN, request_timeout_s=WAIT_S)
    control = ControlClient(second, TOKEN, timeout_s=WAIT_S)
    for version in (1, 2):
        meta = meta_of("delta", str(tmp_path), version)
        send_weights(engine, meta, tiny_model(seed=version, **LARGE).named_hf_tensors())
    order = {"kind": "delta", "path": str(tmp_path / "weight_update_v2"), "version": 2}
    with pytest.raises(ServerRefusedError, match="409: .* changes version 1, here is "):
        control.post("/update_weights", **order)
    whole = str(tmp_path / "weight_update_v1")
    control.post("/update_weights", kind="delta", path=whole, version=1)
    bucket = tmp_path / "weight_update_v2" / "bucket_00000.safetensors"
    content = bytearray(bucket.read_bytes())
    content[-5] ^= 4
    bucket.write_bytes(content)
    with pytest.raises(ServerRefusedError, match="400: .*bucket_00000.safetensors is damaged"):
        control.post("/update_weights", **order)
    assert control.get("/health")["version"] == 1
    with pytest.raises(
        ServerRefusedError, match="kind: expected 'folder', 'delta' or 'xccl', got 'carrier'"
    ):
        control.post("/update_weights", kind="carrier", version=1)
    with pytest.raises(ServerRefusedError, match="rank: expected an integer of at least 1, got 0"):
        place = {"name": "g", "host": "127.0.0.1", "port": 1, "backend": "gloo"}
        control.post("/init_weights_group", rank=0, world_size=2, timeout_s=1.0, **place)
    engine.destroy()


@pytest.mark.slow
def test_a_server_that_joins_and_hangs_or_dies_meanwhile_ends_no_update(folder, servers):
    options = {"token": TOKEN, "num_pages": 200, "setup_timeout_s": WAIT_S}
    child, address = launch_native_server(folder, **options)
    member = servers[0][1]
    engine = NativeRemoteEngine([member], TOKEN, request_timeout_s=WAIT_S, weight_group_timeout_s=6)
    engine.initialize()
    control = ControlClient(member, TOKEN, timeout_s=WAIT_S)
    version = control.get("/health")["version"]
    weights = list(tiny_model(seed=1, **LARGE).named_hf_tensors())

    def publish(signal_number):
        def gathered():
            yield from weights[:3]  # the first bucket has left
            os.kill(child.pid, signal_number)
            yield from weights[3:]

        meta = meta_of("xccl", "", version)
        engine.expect_weights(version)
        send_weights(engine, meta, gathered())
        os.kill(child.pid, signal.SIGCONT)
        engine.note_weights(meta)

    try:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            version += 1
            with ThreadPoolExecutor(1) as threads:
                join = partial(engine.join_with_next_weights, timeout_s=WAIT_S)
                joined = threads.submit(join, address)
                while engine.member_states().get(address) != "joining":
                    assert not joined.done()
                    time.sleep(0.01)
                publish(number)
                with pytest.raises(RuntimeError, match=f"native server {address}"):
                    joined.result(WAIT_S)
            assert engine.servers == [member]
            assert control.get("/health")["version"] == version
    finally:
        engine.destroy()
        child.terminate()


def test_servers_that_hang_or_die_during_an_update(servers):
    """The last test: it ends a server."""
    (_, healthy), (child, address) = servers
    engine = NativeRemoteEngine(
        [healthy, address], TOKEN, request_timeout_s=WAIT_S, weight_group_timeout_s=6
    )
    weights = list(tiny_model(seed=1, **LARGE).named_hf_tensors())

    def send(version, signal_number=None):
        def gathered():
            yield from weights[:3]  # the first bucket has left
            if signal_number is not None:
                os.kill(child.pid, signal_number)
            yield from weights[3:]

        send_weights(engine, meta_of("xccl", "", version), gathered())

    send(1)
    controls = [ControlClient(each, TOKEN, timeout_s=WAIT_S) for each in (healthy, address)]
    with pytest.raises(ServerRefusedError, match=r"409: .* group old-9, this server is in update_"):
        controls[0].post("/update_weights", kind="xccl", group="old-9", version=2)

    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"within 6 s; no answer from native server {address}"):
        send(2, signal.SIGSTOP)
    assert time.monotonic() - start < 40
    os.kill(child.pid, signal.SIGCONT)
    send(3)  # through a new group
    assert [control.get("/health")["version"] for control in controls] == [3, 3]

    with pytest.raises(RuntimeError, match=rf"native server {address}"):
        send(4, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=rf"native server {address}, GET /health"):
        send(5)
    assert controls[0].get("/health")["version"] == 3
    engine.destroy()
