"""Adapters in the native engine: against the trainer that made them, and each against itself."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from fastapi.testclient import TestClient
from fsdp_world import loss_fn, loss_tokens, make_batch, open_engine
from safetensors.torch import load_file, save_file
from tiny import tiny_model, write_tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest, SaveLoadMeta, WeightUpdateMeta
from areal.engine.native.adapters import read_adapter
from areal.engine.native.engine import NativeEngine
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.native.loop import EngineLoop
from areal.engine.native.sequence import GenRequest
from areal.engine.native.server import create_app
from areal.engine.remote.native import NativeRemoteEngine, launch_native_server
from areal.weight_sync.transports import PublicationRoot

pytestmark = pytest.mark.usefixtures("forked_children")

TOKEN = "token-of-this-run"
LORA = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8.0}
PROMPT = [5, 7, 9, 11, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    """Folders of four adapters, as peft would save them, of different ranks and layers."""
    root, found = tmp_path_factory.mktemp("adapters"), {}
    for number, targets in enumerate(([], ["q_proj"], ["down_proj", "o_proj"], ["v_proj"])):
        trainer = trained(folder, lora_rank=1 + 3 * number, target_modules=targets)
        trainer.save(SaveLoadMeta(path=str(root / str(number)), weight_format="hf"))
        found[f"adapter-{number}"] = root / str(number)
    return found


def trained(folder, **changes):
    trainer = open_engine(folder, "archon:d1", **{**LORA, **changes})
    for number in range(3):
        trainer.train_batch(make_batch(number), loss_fn, loss_tokens)
    return trainer


def request(rid: str, prompt=PROMPT, **options) -> GenRequest:
    options = {"max_new_tokens": 12, "ignore_eos": True, "seed": 3, **options}
    return GenRequest(rid, list(prompt), GenerationHyperparameters(**options))


def run(engine: NativeEngine, *requests: GenRequest) -> dict:
    for one in requests:
        engine.add(one)
    done = {}
    while engine.has_work:
        done |= {one.rid: one for one in engine.step()}
    return done


def outputs(finished) -> tuple:
    return finished.output_tokens, finished.output_logprobs


@pytest.mark.parametrize(
    ("family", "targets"),
    [("qwen3", []), ("llama", ["q_proj"]), ("qwen3_moe", []), ("qwen3_moe", ["up_proj", "k_proj"])],
)
async def test_an_engine_with_the_trainers_adapter_has_its_log_probabilities(
    family, targets, tmp_path
):
    """Of experts, adapters are merged into the engine's weights."""
    folder = write_tiny_model(tmp_path, family)
    trainer, engine = trained(folder, target_modules=targets), NativeLocalEngine(folder)
    engine.initialize()
    batch = make_batch(9)
    plain = engine.compute_logp(batch)
    trainer.connect_engine(engine, WeightUpdateMeta(type="direct", use_lora=True, lora_alpha=8.0))
    await asyncio.to_thread(trainer.update_weights, 1)
    mask = batch["attention_mask"].roll(-1, 1) & batch["attention_mask"]
    mask[:, -1] = False
    expected = trainer.forward_batch(batch)[mask]
    torch.testing.assert_close(engine.compute_logp(batch)[mask], expected, rtol=0, atol=2e-5)
    assert (plain[mask] - expected).abs().max() > 1e-2
    gconfig = GenerationHyperparameters(max_new_tokens=8, ignore_eos=True, seed=1)
    reply = await engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=gconfig))
    assert reply.output_versions == [1] * 8
    whole = torch.tensor([PROMPT + reply.output_tokens])
    row = {"input_ids": whole, "attention_mask": torch.ones_like(whole, dtype=torch.bool)}
    found = trainer.forward_batch(row)[0, len(PROMPT) - 1 : -1]
    torch.testing.assert_close(torch.tensor(reply.output_logprobs), found, rtol=0, atol=2e-5)
    engine.destroy()


def test_many_adapters_in_one_batch_give_the_bits_of_each_alone(folder, adapters):
    together = NativeEngine.from_pretrained(folder, page_size=4)
    for name, path in adapters.items():
        together.add_adapter(name, path)
    prompts = [PROMPT, PROMPT[:3], [*PROMPT, 1, 2, 3, 4]]
    requests = [
        request(f"{name}/{number}", prompt, lora_name=name)
        for name in ("", *adapters)
        for number, prompt in enumerate(prompts)
    ]
    found = run(together, *requests)
    again = run(together, *[request(f"{one.rid}+", one.input_ids, lora_name=one.gconfig.lora_name)
                            for one in requests])  # fmt: skip
    distinct = set()
    for one in requests:
        alone = NativeEngine.from_pretrained(folder, page_size=4)
        name = one.gconfig.lora_name
        if name:
            alone.add_adapter(name, adapters[name])
        expected = outputs(run(alone, one)[one.rid])
        assert outputs(found[one.rid]) == expected
        assert outputs(again[f"{one.rid}+"]) == expected  # from the cache of its own adapter
        assert again[f"{one.rid}+"].cached_tokens > 0
        distinct.add(tuple(expected[1]))
    assert len(distinct) == len(requests)


def test_an_update_stops_no_request_and_a_named_version_stays(folder, adapters):
    engine = NativeEngine.from_pretrained(folder)
    tensors = [load_file(path / "adapter_model.safetensors") for path in adapters.values()]

    def update(version: int) -> None:
        lora = {"alpha": 8.0, "name": "policy", "recompute_kv": True}
        engine.load_adapter(tensors[version].items(), version, **lora)

    update(1)
    engine.add(request("pinned", lora_name="policy-v1", max_new_tokens=20))
    engine.add(request("live", max_new_tokens=20))
    for _ in range(6):
        engine.step()
    update(2)
    update(3)
    done = {}
    while engine.has_work:
        done |= {one.rid: one for one in engine.step()}
    assert done["pinned"].output_versions == [1] * 20
    assert done["live"].output_versions[0] == 1 and done["live"].output_versions[-1] == 3
    alone = NativeEngine.from_pretrained(folder)
    alone.add_adapter("one", adapters["adapter-1"])
    expected = run(alone, request("one", lora_name="one", max_new_tokens=20))["one"]
    assert outputs(done["pinned"]) == outputs(expected)
    assert engine.adapters.names == ["policy-v1", "policy-v2", "policy-v3"]
    update(3)  # again, as a resumed run does; no request uses the first one any more
    assert engine.adapters.names == ["policy-v2", "policy-v3"]


def test_whole_weights_replace_a_live_adapter(folder, adapters):
    engine = NativeEngine.from_pretrained(folder)
    plain = outputs(run(engine, request("a"))["a"])
    tensors = load_file(adapters["adapter-0"] / "adapter_model.safetensors")
    engine.load_adapter(tensors.items(), 1, alpha=8.0, name="policy", recompute_kv=True)
    assert outputs(run(engine, request("b"))["b"]) != plain
    weights = [(name, tensor.clone()) for name, tensor in engine.model.named_hf_tensors()]
    engine.load_weights(weights, 2, recompute_kv=True)
    assert outputs(run(engine, request("c"))["c"]) == plain


def test_what_cannot_be_served_is_refused(folder, adapters, tmp_path):
    engine = NativeEngine.from_pretrained(folder)
    path = adapters["adapter-1"]
    engine.add_adapter("mine", path)
    with pytest.raises(ValueError, match="'mine' is loaded already"):
        engine.add_adapter("mine", path)
    with pytest.raises(ValueError, match="lora_name: no adapter is called 'other'; loaded: mine"):
        engine.add(request("a", lora_name="other"))
    with pytest.raises(FileNotFoundError, match="expected the folder of a PEFT adapter"):
        engine.add_adapter("none", tmp_path)
    config = json.loads((path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="use_dora is True, expected False"):
        engine.add_adapter("dora", tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        engine.add_adapter("damaged", tmp_path)
    tensors = load_file(path / "adapter_model.safetensors")
    name = min(tensors)
    for content, fault in (
        ({name: tensors[name]}, "one of its matrices"),
        (tensors | {name: tensors[name][:, :3].clone()}, "trained for another model"),
        ({f"x.{key}": tensor for key, tensor in tensors.items()}, "has no layer"),
        (tensors | {"base_model.model.score.weight": tensors[name].clone()}, "no matrix A or B"),
    ):
        save_file(content, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=fault):
            engine.add_adapter("odd", tmp_path)
    engine.add(request("a", lora_name="mine"))
    with pytest.raises(ValueError, match="1 requests still use 'mine'"):
        engine.remove_adapter("mine")
    run(engine)
    engine.remove_adapter("mine")
    assert engine.adapters.names == []


def test_routes_name_adapters(folder, adapters):
    loop = EngineLoop(NativeEngine.from_pretrained(folder))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with TestClient(create_app(loop, TOKEN, model=str(folder)), headers=headers) as client:
        path = str(adapters["adapter-1"])
        load = {"lora_name": "mine", "lora_path": path}
        assert client.post("/v1/load_lora_adapter", json=load).status_code == 200
        assert client.post("/v1/load_lora_adapter", json=load).status_code == 400
        absent = {"lora_name": "other", "lora_path": "/nowhere"}
        assert client.post("/v1/load_lora_adapter", json=absent).status_code == 400
        listed = client.get("/v1/models").json()["data"]
        assert [card["id"] for card in listed] == [str(folder), "mine"]
        sampling = {"max_tokens": 8, "seed": 3, "ignore_eos": True}
        found = {}
        for model in ("mine", "any other name"):
            body = {"model": model, "token_ids": PROMPT, "sampling_params": sampling}
            reply = client.post("/inference/v1/generate", json=body)
            assert reply.status_code == 200, reply.text
            found[model] = reply.json()["choices"][0]["token_ids"]
        engine = NativeEngine.from_pretrained(folder)
        engine.add_adapter("mine", adapters["adapter-1"])
        options = {"max_new_tokens": 8, "seed": 3}
        expected = run(engine, request("a", lora_name="mine", **options), request("b", **options))
        assert list(found.values()) == [expected["a"].output_tokens, expected["b"].output_tokens]
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).is_success
        assert len(client.get("/v1/models").json()["data"]) == 1
    loop.close()


@pytest.mark.parametrize("kind", ["shm", "delta"])
async def test_adapters_alone_travel_to_a_server(kind, folder, tmp_path):
    trainer = trained(folder)
    child, address = launch_native_server(folder, token=TOKEN, num_pages=200, setup_timeout_s=900)
    engine = NativeRemoteEngine([address], TOKEN, request_timeout_s=300, setup_timeout_s=300)
    try:
        engine.initialize()
        with PublicationRoot(kind, run_name="lora", disk_root=tmp_path / "weights") as root:
            meta = root.meta(use_lora=True, lora_alpha=8.0, clear_checkpoint_after_load=False)
            trainer.connect_engine(engine, meta)
            for version in (1, 2):
                trainer.train_batch(make_batch(version), loss_fn, loss_tokens)
                await asyncio.to_thread(trainer.update_weights, version)
            assert root.path is not None
            sent = [file.stat().st_size for file in root.path.glob("**/*.safetensors")]
            whole = sum(tensor.nbytes for _, tensor in trainer.hf_weights())
            assert sent and max(sent) < whole / 2
        batch = make_batch(9, lengths=(12, 12))
        scores = await asyncio.to_thread(engine.compute_logp, batch)
        expected = trainer.forward_batch(batch)
        torch.testing.assert_close(scores[:, :-1], expected[:, :-1], rtol=0, atol=2e-5)
        options = {"max_new_tokens": 3, "ignore_eos": True}
        for name, version in (("", 2), ("policy-v1", 1)):
            gconfig = GenerationHyperparameters(**options, lora_name=name)
            reply = await engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=gconfig))
            assert reply.output_versions == [version] * 3
    finally:
        await asyncio.to_thread(engine.destroy)
        child.terminate()


@pytest.mark.parametrize(
    "shapes", [((0, 32), (32, 0)), ((32,), (32, 4)), ((), ()), ((4, 32), (32, 5))]
)
def test_matrices_that_are_no_pair_are_refused(shapes):
    layer = "model.layers.0.self_attn.q_proj"
    a, b = (torch.ones(shape) for shape in shapes)
    tensors = [(f"{layer}.lora_A.weight", a), (f"{layer}.lora_B.weight", b)]
    with pytest.raises(ValueError, match="do not fit its weight"):
        read_adapter(tiny_model("qwen3"), tensors, alpha=8.0)
