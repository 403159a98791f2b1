"""The SGLang adapter against a server that speaks its protocol: tests/sglang_server.py."""

from __future__ import annotations

import asyncio
import pickle
import time

import pytest
from server_checks import (
    RECEIVER,
    ServerWorld,
    Told,
    check_adapters,
    check_generation,
    check_grpo_run,
    check_pause,
    check_refusals,
    check_scores,
    check_streams,
    check_update_in_the_middle,
    check_updates_while_generating,
    draw_adapters,
    request,
)
from sglang_server import sglang_python
from tiny import write_tiny_model

from areal.api.io_struct import WeightUpdateMeta
from areal.engine.remote.engine import RemoteEngine
from areal.engine.remote.server_control import ControlClient, ServerRefusedError
from areal.engine.remote.sglang import SGLangProtocol, launch_sglang_server
from areal.weight_sync.transports import PublicationRoot

pytestmark = pytest.mark.usefixtures("forked_children")

TOKEN = "token-of-this-run"
ADAPTERS = ("rollout.backend=sglang:d1", "actor.use_lora=true", "rollout.use_lora=true")
FLEET = ("rollout.backend=sglang:d2", "rollout.workers=2", "actor.backend=fsdp:d2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    large = {"intermediate_size": 2048}  # more than one bucket of weights
    return [write_tiny_model(root / f"weights{seed}", seed=seed, **large) for seed in (0, 7)]


@pytest.fixture(scope="module")
def address(folders, tmp_path_factory):
    python = sglang_python(tmp_path_factory.mktemp("env"))
    child, address = launch_sglang_server(
        folders[0], python=python, token=TOKEN, dtype="float32", lora_rank=4, setup_timeout_s=900
    )
    yield address
    child.terminate()


@pytest.fixture
async def world(address, folders):
    engine = RemoteEngine(SGLangProtocol(folders[0]), [address], TOKEN, request_timeout_s=60)
    engine.initialize()
    yield ServerWorld(engine, folders, "sglang-test", tolerance=1e-4)
    await asyncio.to_thread(engine.destroy)


def times_of(engine):
    """Seconds by cause: those of `stats` that are no progress."""
    return {name: value for name, value in engine.stats().items() if name.endswith("_s")}


async def test_one_server_through_its_life(world):
    """One start of the server, and everything in the order of a run."""
    began, before = time.time(), times_of(world.engine)
    latest = time.time()
    await check_generation(world)
    await check_scores(world)
    await check_refusals(world)
    await check_streams(world)
    await check_pause(world)
    await check_update_in_the_middle(world)
    await check_update_in_the_middle(world, "disk")
    await check_update_in_the_middle(world, "xccl")
    await asyncio.to_thread(world.publish, "xccl")  # by the group that is open already
    await check_updates_while_generating(world)
    version = next(world.versions) - 1
    counts = {"running": 0, "waiting": 0, "restarts": 0, "servers": 1}
    counts |= {"requests_resent": 0, "tokens_kept": 0, "replies_refused": 0}
    ended, after = time.time(), times_of(world.engine)
    gained = {name: after[name] - before[name] for name in after}
    assert ended - latest - 1e-2 <= sum(gained.values()) <= time.time() - began + 1e-2
    assert all(gained[name] > 0 for name in ("busy_s", "no_request_s", "paused_s", "control_s"))
    found = world.engine.progress()
    assert found == {"version": version, **counts}
    with pytest.raises(RuntimeError, match="adapter_config.json"):
        world.engine.load_adapter("mine", "adapter")
    ((start, end),) = list(world.engine.busy_intervals(0.0).values())[0][-1:]
    assert start < end


async def test_adapters_alone_travel_under_versioned_names(address, folders, tmp_path):
    protocol = SGLangProtocol(folders[0], lora_name="policy")
    control = ControlClient(address, TOKEN, timeout_s=60, kind=protocol.kind)
    protocol.load_model(control, str(folders[0]))  # another test may have left other weights
    engine = RemoteEngine(protocol, [address], TOKEN, request_timeout_s=60)
    engine.initialize()
    adapters, merged = draw_adapters(folders[0], tmp_path)
    world = ServerWorld(engine, merged, "adapters-test", tolerance=1e-4, adapters=adapters)
    await check_adapters(world, control)
    await asyncio.to_thread(engine.destroy)
    meta = WeightUpdateMeta(type="shm", path=str(tmp_path), use_lora=True)
    with pytest.raises(ValueError, match="adapters of 'policy' from version 1 on"):
        protocol.weight_order(meta)
    with pytest.raises(ValueError, match="adapters of '' from version 1 on, got 'policy'"):
        SGLangProtocol(folders[0]).weight_order(meta.with_version(1))


@pytest.mark.parametrize(
    ("route", "body", "fault"),
    [
        ("/generate", {"input_ids": [1], "sampling_params": {"max_tokens": 4}}, "max_tokens"),
        ("/generate", {"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k must be -1"),
        ("/generate", {"input_ids": [1], "sampling_params": {}, "lora_name": "a"}, "lora_name"),
        ("/pause_generation", {"mode": "keep"}, "mode"),
        ("/continue_generation", {"mode": "abort"}, "mode"),
        ("/update_weights_from_disk", {"model_path": "/x", "flush_cache": "yes"}, "flush_cache"),
        ("/update_weights_from_disk", {"path": "/x"}, "model_path"),
        ("/init_weights_update_group", {"master_address": "127.0.0.1"}, "master_port"),
        (
            "/update_weights_from_distributed",
            {"names": ["a"], "dtypes": ["float32"], "shapes": []},
            "of one length",
        ),
        ("/update_weights_from_distributed", {"names": ["a"], "dtype_names": []}, "dtypes"),
        ("/load_lora_adapter", {"lora_name": "a", "path": "/x"}, "lora_path"),
        ("/unload_lora_adapter", {"name": "a"}, "lora_name"),
    ],
)
def test_the_stand_in_takes_what_is_documented_and_nothing_else(address, route, body, fault):
    control = ControlClient(address, TOKEN, timeout_s=60)
    with pytest.raises(ServerRefusedError, match=f"400: .*{fault}"):
        control.post(route, **body)


async def test_a_server_joins_with_its_own_token_and_the_weights_that_serve(
    address, folders, tmp_path
):
    """Not with other weights than the rest; and it leaves without a lost token."""
    python, token = sglang_python(tmp_path), "token-of-the-newcomer"
    child, newcomer = launch_sglang_server(
        folders[1], python=python, token=token, dtype="float32", setup_timeout_s=900
    )
    options = {"request_timeout_s": 60, "address_file": tmp_path / "servers.json"}
    engine = RemoteEngine(SGLangProtocol(folders[0]), [address], TOKEN, **options)
    engine.initialize()
    copy = pickle.loads(pickle.dumps(engine))  # as that of a rollout worker
    copy.initialize()
    protocol = SGLangProtocol(folders[0])
    control = ControlClient(address, TOKEN, timeout_s=60, kind=protocol.kind)
    try:
        protocol.load_model(control, str(folders[0]))  # another test may have left other weights
        with pytest.raises(RuntimeError, match="has other weights than .*log-probabilities differ"):
            await asyncio.to_thread(engine.join, newcomer, token=token)
        assert engine.servers == [address]

        world = ServerWorld(engine, folders, "join-test", tolerance=1e-4)
        with PublicationRoot("shm", run_name="join-test", disk_root=tmp_path / "disk") as root:
            version = await asyncio.to_thread(world.publish_in, root)
            await asyncio.to_thread(engine.join, newcomer, token=token)
        assert engine.member_states() == {address: "serving", newcomer: "serving"}
        asked = [request(seed=seed, ids=(5, 7 + seed), max_new_tokens=120) for seed in range(8)]
        tasks = [asyncio.create_task(one.agenerate(r)) for r in asked for one in (engine, copy)]
        await asyncio.sleep(0.1)
        assert copy.servers == [address, newcomer]
        await asyncio.to_thread(engine.leave, newcomer)
        stats = await asyncio.to_thread(protocol.stats, control_of(newcomer, token))
        assert stats["running"] == stats["waiting"] == 0
        replies = await asyncio.gather(*tasks)
        assert all(reply.output_versions == [version] * 120 for reply in replies)
        world.check_logprobs(replies)
        assert (await copy.agenerate(request())).output_versions == [version] * 6
        assert copy.servers == engine.servers == [address]
        counts = await asyncio.to_thread(engine.stats)
        assert counts["requests_resent"] == 0
    finally:
        for one in (copy, engine):
            await asyncio.to_thread(one.destroy)
        child.terminate()


def control_of(address, token):
    return ControlClient(address, token, timeout_s=60)


@pytest.mark.slow
async def test_copies_in_other_processes_learn_of_updates(address, folders, tmp_path):
    """Whoever updates, and whoever asks: each token is of the version it names."""
    file = tmp_path / "servers.json"
    options = {"request_timeout_s": 60, "address_file": file}
    owner = RemoteEngine(SGLangProtocol(folders[0]), [address], TOKEN, **options)
    owner.initialize()
    copy = pickle.loads(pickle.dumps(owner))
    copy.initialize()
    world = ServerWorld(owner, folders, "copies-test", tolerance=1e-4)
    other = ServerWorld(copy, folders, "copies-test", tolerance=1e-4, versions=world.versions)
    await asyncio.to_thread(world.publish)
    replies = []
    for asking, publishing in ((copy, world), (owner, other), (copy, world), (owner, other)):
        asked = [request(seed=seed, max_new_tokens=240) for seed in range(4)]
        told = [Told(one) for one in asked[:2]]  # the others are answered at once
        tasks = [asyncio.create_task(asking.agenerate(one)) for one in asked]
        await asyncio.sleep(0.1)
        with PublicationRoot("shm", run_name="copies-test", disk_root=tmp_path / "disk") as root:
            version = await asyncio.to_thread(publishing.publish_in, root)
            meta = root.meta(gen_allocation=RECEIVER).with_version(version)
            await asyncio.to_thread(owner.note_weights, meta)
        replies += await asyncio.gather(*tasks)
        for one, reply in zip(told, replies[-4:], strict=False):
            one.check(reply)
            assert len(one.tokens) == 240
        replies.append(await asking.agenerate(request()))
        assert replies[-1].output_versions == [version] * 6
        assert await asyncio.to_thread(asking.get_version) == version
    assert all(reply.output_versions == sorted(reply.output_versions) for reply in replies)
    world.check_logprobs(replies)
    for engine in (copy, owner):
        await asyncio.to_thread(engine.destroy)


async def test_the_wrong_key_is_an_error(address, folders):
    engine = RemoteEngine(SGLangProtocol(folders[0]), [address], "wrong")
    with pytest.raises(RuntimeError, match="401: Unauthorized"):
        await engine.agenerate(request())
    await asyncio.to_thread(engine.destroy)


def test_a_server_that_ends_says_why(folders, tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'No module named sglang' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(RuntimeError, match="(?s)exit code 1.*No module named sglang"):
        launch_sglang_server(folders[0], python=script, token=TOKEN, setup_timeout_s=900)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [ADAPTERS, FLEET], ids=["adapters", "fleet"])
def test_asynchronous_grpo_through_it(tmp_path, layout):
    check_grpo_run(tmp_path, f"sglang.python={sglang_python(tmp_path)}", *layout)
