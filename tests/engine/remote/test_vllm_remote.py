"""A real, stock vLLM server behind RemoteEngine. Needs `areal env create vllm`; run by
`make test-vllm`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import torch
from server_checks import (
    RECEIVER,
    ServerWorld,
    check_adapters,
    check_generation,
    check_grpo_run,
    check_pause,
    check_refusals,
    check_replacement,
    check_streams,
    check_update_in_the_middle,
    check_updates_while_generating,
    draw_adapters,
    read_weights,
    request,
)

from areal.api.engine_api import EngineLostError
from areal.api.io_struct import WeightUpdateMeta
from areal.cli.demo import make_model
from areal.engine.remote.engine import RemoteEngine
from areal.engine.remote.server_control import ControlClient
from areal.engine.remote.server_process import ServerProcess
from areal.engine.remote.vllm import VLLMProtocol, launch_vllm_server
from areal.models.hf_io import build_model, read_hf_config, save_hf
from areal.utils.server_envs import find_interpreter
from areal.weight_sync.transports import PublicationRoot

TOKEN = "token-of-the-vllm-tests"  # not that of servers other tests start meanwhile
SETUP_TIMEOUT_S = 900.0  # seconds alone on a machine, minutes on one that is shared

try:
    PYTHON = find_interpreter("vllm")
except ValueError as error:
    PYTHON, REASON = "", str(error)
else:
    REASON = ""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason=REASON)]


def write_model(folder, seed):
    """The demo's model with heads of a size that vLLM has CPU kernels for."""
    make_model(folder)
    config = {**read_hf_config(folder), "head_dim": 32}
    model = build_model(config, device="cpu", dtype=torch.float32)
    model.init_weights(seed)
    save_hf(model.named_hf_tensors(), config, folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [write_model(root / f"weights{seed}", seed) for seed in (1, 7)]


@pytest.fixture(scope="module")
def children():
    """The processes of the server, the living one last."""
    return []


@pytest.fixture(scope="module")
def process(folders, children, tmp_path_factory):
    launch = partial(
        launch_vllm_server,
        folders[0],
        python=PYTHON,
        token=TOKEN,
        scratch=tmp_path_factory.mktemp("scratch"),
        dtype="float32",
        max_model_len=256,
        cpu_cache_gb=1,
        enforce_eager=True,
        lora_rank=4,
        log_path=tmp_path_factory.mktemp("logs") / "vllm.log",
        setup_timeout_s=SETUP_TIMEOUT_S,
    )

    def launch_and_note():
        child, address = launch()
        children.append(child)
        return child, address

    process = ServerProcess(launch_and_note)
    yield process
    process.close()


@pytest.fixture
async def world(process, folders):
    engine = RemoteEngine(
        VLLMProtocol(folders[0]),
        [process.address],
        TOKEN,
        max_context=256,
        processes=[process],
        request_timeout_s=300,
    )
    engine.initialize()
    yield ServerWorld(engine, folders, "vllm-test", tolerance=1e-3)
    await asyncio.to_thread(engine.destroy)


async def test_no_route_opens_without_the_token(process):
    """Least of all those that vLLM opens in its development mode. First: the next test ends it."""
    routes = [
        *("/pause", "/resume", "/collective_rpc", "/update_weight_version", "/sleep", "/wake_up"),
        *("/reset_prefix_cache", "/v1/completions", "/v1/load_lora_adapter", "/tokenize"),
        *("/invocations", "/health", "/metrics", "/weight_info", "/server_info", "/version"),
        *("/docs", "/openapi.json", "/health/", "//pause", "/PAUSE"),
    ]
    async with aiohttp.ClientSession() as session:
        for route in routes:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
                for method in ("GET", "POST"):
                    url = f"http://{process.address}{route}"
                    async with session.request(
                        method, url, headers=headers, json={}, allow_redirects=False
                    ) as answer:
                        assert answer.status == 401, (method, route, answer.status)


async def test_adapters_alone_travel_under_versioned_names(process, folders, tmp_path):
    protocol = VLLMProtocol(folders[0], lora_name="policy")
    options = {"max_context": 256, "request_timeout_s": 300}
    engine = RemoteEngine(protocol, [process.address], TOKEN, **options)
    engine.initialize()
    adapters, merged = draw_adapters(folders[0], tmp_path)
    world = ServerWorld(engine, merged, "vllm-lora", tolerance=1e-3, adapters=adapters)
    control = ControlClient(process.address, TOKEN, timeout_s=60, kind=protocol.kind)
    await check_adapters(world, control)
    await asyncio.to_thread(engine.destroy)
    control.post("/update_weight_version", new_version="0")  # of the model itself


def test_which_servers_of_others_a_run_may_use(process, folders, tmp_path):
    protocol = VLLMProtocol(folders[0])
    good = ControlClient(process.address, TOKEN, timeout_s=900, kind=protocol.kind)
    assert protocol.identify(good)  # the folder with a head of its own
    child, address = launch_vllm_server(
        folders[0],
        python=PYTHON,
        token=TOKEN,
        scratch=tmp_path / "scratch",
        dtype="float32",
        max_model_len=256,
        cpu_cache_gb=1,
        enforce_eager=True,
        extra_args=["--logprobs-mode", "raw_logprobs"],
        setup_timeout_s=SETUP_TIMEOUT_S,
    )
    try:
        control = ControlClient(address, TOKEN, timeout_s=900, kind=protocol.kind)
        with pytest.raises(RuntimeError, match="start it with --logprobs-mode processed_logprobs"):
            protocol.identify(control)
    finally:
        child.terminate()


async def test_one_server_through_its_life(world, children, tmp_path):
    """One start of the server, and everything in the order of a run."""
    await check_generation(world)
    await check_refusals(world)
    await check_streams(world)
    await check_cached_tokens(world)
    await check_stop_texts_and_penalties(world)
    await check_pause(world)
    await check_adapter(world, tmp_path)
    await check_update_in_the_middle(world)
    await check_update_in_the_middle(world, "disk")
    await check_updates_while_generating(world)
    await check_weights_by_group(world)
    assert world.engine.stats()["generated_tokens"] > 1000
    with PublicationRoot("disk", run_name="vllm", disk_root=tmp_path / "published") as root:
        await check_replacement(world, root, lambda: os.kill(children[-1].pid, signal.SIGKILL))
    assert len(children) == 2 and not processes_of_group(children[0].pid)
    await check_another_hand(world)
    await check_death_after_a_broadcast(world, children)


def processes_of_group(leader: int) -> list[str]:
    """What still runs of the processes that `leader` started: they would keep their memory."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            name, _, rest = stat.read_text().rpartition(")")
            if rest.split()[2] == str(leader) and rest.split()[0] != "Z":
                found.append(name)
    return found


async def check_cached_tokens(world):
    """Where the first has been, the second finds most of its prompt, also as a stream."""
    prompt = list(range(5, 15)) * 18  # more than one block of its cache
    for is_stream, cached in ((False, 0), (False, 16), (True, 16)):
        asked = request(prompt)
        asked.on_tokens = (lambda *_: None) if is_stream else None
        assert (await world.engine.agenerate(asked)).cached_tokens >= cached


async def check_stop_texts_and_penalties(world):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world.folders[0])
    ends = list("1234")
    reply = await world.engine.agenerate(request(stop=ends, max_new_tokens=200))
    text = tokenizer.decode(reply.output_tokens)
    assert reply.stop_reason == "stop" and text[-1] in ends
    assert not set(text[:-1]) & set(ends)
    with pytest.raises(ValueError, match="gconfig.stop: .* at most 4 texts, got 5"):
        await world.engine.agenerate(request(stop=list("12345")))
    plain, varied = await asyncio.gather(
        world.engine.agenerate(request(greedy=True, max_new_tokens=60)),
        world.engine.agenerate(request(greedy=True, max_new_tokens=60, frequency_penalty=2.0)),
    )
    assert len(set(varied.output_tokens)) > len(set(plain.output_tokens))
    # Of the distribution after the cut, which leaves one token here.
    cut = await world.engine.agenerate(request(top_k=1))
    assert cut.output_logprobs == pytest.approx([0.0] * 6, abs=1e-6)
    world.check_logprobs([plain])


async def check_adapter(world, tmp_path):
    """An adapter serves under its name, beside the model, and can go again."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(world.folders[0])
    lora = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    plain = await world.engine.agenerate(request(greedy=True))
    await asyncio.to_thread(world.engine.load_adapter, "mine", tmp_path / "adapter")
    adapted = await world.engine.agenerate(request(greedy=True, lora_name="mine"))
    assert adapted.output_logprobs != plain.output_logprobs
    again = await world.engine.agenerate(request(greedy=True))
    assert again.output_logprobs == pytest.approx(plain.output_logprobs, abs=1e-5)
    await asyncio.to_thread(world.engine.unload_adapter, "mine")
    with pytest.raises(ValueError, match="mine"):
        await world.engine.agenerate(request(lora_name="mine"))


async def check_weights_by_group(world):
    """A broadcast to the workers, again and again, also after one that broke off."""
    for _ in range(2):
        version = await asyncio.to_thread(world.publish, "xccl")
        await check_serves(world, version)
    await check_update_in_the_middle(world, "xccl")
    version = next(world.versions)
    weights = read_weights(world.folders[version % 2])
    meta = WeightUpdateMeta(type="xccl", version=version, gen_allocation=RECEIVER)
    with pytest.raises(OSError, match="the trainer lost a weight"):
        await asyncio.to_thread(world.engine.update_weights, meta, cut_short(weights))
    with pytest.raises(RuntimeError, match=f"no weights serve: version {version} did not load"):
        await world.engine.agenerate(request())
    await check_serves(world, await asyncio.to_thread(world.publish, "xccl"))


def cut_short(weights):
    yield from itertools.islice(weights, 3)
    raise OSError("the trainer lost a weight")


async def check_serves(world, version):
    """Greedy tokens are those of transformers with the weights of `version`, which is noted."""
    from transformers import AutoModelForCausalLM

    assert await asyncio.to_thread(world.engine.get_version) == version
    reply = await world.engine.agenerate(request(greedy=True, max_new_tokens=12))
    judge = AutoModelForCausalLM.from_pretrained(
        world.folders[version % 2], dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor([reply.input_tokens + reply.output_tokens])
    with torch.no_grad():
        logprobs = judge(ids).logits[0, reply.input_len - 1 : -1].log_softmax(-1)
    best, tokens = logprobs.max(-1)
    assert reply.output_tokens == tokens.tolist() and set(reply.output_versions) == {version}
    assert reply.output_logprobs == pytest.approx(best.tolist(), abs=1e-4)


async def check_another_hand(world):
    """A server whose note of its version is not ours is not believed."""
    control, version = world.engine._pool.controls[0], world.engine.get_version()
    await asyncio.to_thread(control.post, "/update_weight_version", new_version="99")
    with pytest.raises(RuntimeError, match=f"serves version 99, expected {version}"):
        world.engine.get_version()


async def check_death_after_a_broadcast(world, children):
    """Nothing holds the weights for another server."""
    version = await asyncio.to_thread(world.publish, "xccl")
    await check_serves(world, version)
    os.killpg(children[-1].pid, signal.SIGKILL)
    lost = f"SIGKILL.* cannot be replaced: the weights of version {version} came through a process"
    with pytest.raises(EngineLostError, match=f"(?s){lost}"):
        await world.engine.agenerate(request())
    assert len(children) == 2


def test_a_server_that_ends_says_why(folders, tmp_path):
    with pytest.raises(RuntimeError, match="(?s)exit code 2.*--no-such-option"):
        launch_vllm_server(
            folders[0],
            python=PYTHON,
            token=TOKEN,
            scratch=tmp_path / "scratch",
            extra_args=["--no-such-option"],
            setup_timeout_s=SETUP_TIMEOUT_S,
        )


def test_an_environment_without_vllm_says_so(folders, tmp_path):
    with pytest.raises(RuntimeError, match="No module named 'vllm'"):
        launch_vllm_server(folders[0], python=sys.executable, token=TOKEN, scratch=tmp_path / "s")


async def test_a_server_of_two_processes_takes_a_broadcast(folders, tmp_path):
    child, address = launch_vllm_server(
        folders[0],
        python=PYTHON,
        token=TOKEN,
        scratch=tmp_path / "scratch",
        dtype="float32",
        max_model_len=256,
        cpu_cache_gb=1,
        enforce_eager=True,
        tensor_parallel=2,
        setup_timeout_s=SETUP_TIMEOUT_S,
    )
    engine = RemoteEngine(VLLMProtocol(folders[0]), [address], TOKEN)
    try:
        engine.initialize()
        world = ServerWorld(engine, folders, "vllm-two", tolerance=1e-3)
        for _ in range(2):
            await check_serves(world, await asyncio.to_thread(world.publish, "xccl"))
    finally:
        await asyncio.to_thread(engine.destroy)
        child.terminate()


@pytest.mark.parametrize("mode", ["shm", "xccl"])
def test_asynchronous_grpo_through_it(tmp_path, mode):
    write_model(tmp_path / "tiny_model", seed=1)
    check_grpo_run(
        tmp_path,
        f"actor.weight_update_mode={mode}",
        "rollout.backend=vllm:d1",
        f"vllm.python={PYTHON}",
        "vllm.enforce_eager=true",
        "vllm.cpu_cache_gb=1",
        f"rollout.setup_timeout={SETUP_TIMEOUT_S}",
        "gconfig.max_new_tokens=40",
    )
