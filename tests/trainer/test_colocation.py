"""A server and a model take turns: who has not the turn holds nothing, and loses nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from fsdp_world import loss_fn, loss_tokens, make_batch, open_engine, weights_of
from tiny import write_tiny_model
from tiny_run import grpo_config

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest, WeightUpdateMeta
from areal.cli.demo import make_model
from areal.engine.native.local_engine import NativeLocalEngine
from areal.models.hf_io import build_model, save_hf
from areal.trainer.colocation import ModelRoom, TimeSharedDevice
from areal.trainer.experiment import load_datasets
from areal.trainer.rl_trainer import PPOTrainer

GREEDY = GenerationHyperparameters(max_new_tokens=12, ignore_eos=True, greedy=True)


@pytest.fixture
def server(tmp_path):
    engine = NativeLocalEngine(write_tiny_model(tmp_path / "model"), num_pages=50)
    engine.initialize()
    yield engine
    engine.destroy()


async def test_each_does_its_work_in_its_turn(server, tmp_path):
    plain, model = (open_engine(tmp_path / "model", "archon:d1") for _ in range(2))
    device = TimeSharedDevice([model])
    device.connect(server)
    batch = make_batch()
    for version in (1, 2):
        await asyncio.to_thread(device.to_training)
        request = asyncio.create_task(generate(server))
        for engine in (plain, model):
            engine.train_batch(batch, loss_fn, loss_tokens)
        model.connect_engine(server, WeightUpdateMeta(type="direct"))
        await asyncio.to_thread(model.update_weights, version)
        await asyncio.to_thread(device.to_training)  # it is: nothing moves
        done, _ = await asyncio.wait([request], timeout=0.2)
        assert not done
        await asyncio.to_thread(device.to_generation)
        assert set((await request).output_versions) == {version}
    device.to_training()
    expected = weights_of(plain)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(model).items())


async def test_without_models_nothing_moves(server):
    device = TimeSharedDevice([])
    device.connect(server)
    device.to_training()
    assert len((await generate(server)).output_tokens) == 12


async def generate(server):
    return await server.agenerate(ModelRequest(input_ids=[5, 7], gconfig=GREEDY))


class Model:
    """Says what is on the device, and what was when it computed."""

    def __init__(self, name: str, device: set[str]) -> None:
        self.name, self.device = name, device
        device.add(name)

    def offload(self) -> None:
        self.device.remove(self.name)

    def onload(self) -> None:
        assert self.name not in self.device
        self.device.add(self.name)

    def forward_batch(self, batch: object) -> set[str]:
        return set(self.device)

    def get_version(self) -> int:
        return 7


def test_models_make_room_for_the_one_that_computes():
    device: set[str] = set()
    hosts = {
        "actor": "controller",
        "critic": "controller",
        "ref": "controller",
        "teacher": "teacher",
    }
    room = ModelRoom({"actor", "ref", "teacher"}, hosts)
    models = {role: room.resident(role, Model(role, device)) for role in hosts}
    assert device == {"critic"}  # the others wait until they are used
    assert models["actor"].get_version() == 7 and device == {"critic"}
    assert models["ref"].forward_batch({}) == {"critic", "ref"}
    assert models["actor"].forward_batch({}) == {"critic", "actor"}
    assert models["teacher"].forward_batch({}) == {"critic", "actor", "teacher"}  # another device
    assert models["critic"].forward_batch({}) == {"critic", "teacher"}
    models["actor"].forward_batch({})
    room.clear()
    assert device == {"critic"}
    for model in models.values():  # generation takes the device
        model.offload()
    assert device == set()
    for model in models.values():
        model.onload()
    assert device == {"critic"}
    assert ModelRoom((), hosts).resident("ref", models["ref"]) is models["ref"]


def write_wide_model(folder: Path, width: int) -> int:
    """The demo's model and tokenizer, but wide; the number of its weights."""
    make_model(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "head_dim": 64,
        "initializer_range": 0.02,
    }
    model = build_model(config, device="cpu", dtype=torch.bfloat16)
    model.init_weights(0)
    save_hf(model.named_hf_tensors(), config, folder)
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["shm", "ipc"])
def test_the_device_belongs_to_one_side_at_a_time(tmp_path, mode):
    """100M weights, and a cache of 4 GB: what is left of either in the other's turn is small."""
    num_weights = write_wide_model(tmp_path / "tiny_model", 2048)
    assert num_weights > 100e6
    num_pages = 16384
    page_bytes = 2 * 2 * 2048 * 2 * 16  # keys and values, layers, width, bfloat16, tokens
    overrides = (
        "rollout.scheduling_strategy={type: colocation, target: actor}",
        f"actor.weight_update_mode={mode}",
        "actor.dtype=bfloat16",
        f"native.num_pages={num_pages}",
        "total_train_steps=3",
    )
    server_bytes = 2 * num_weights + num_pages * page_bytes
    model_bytes = (2 + 4 + 8) * num_weights  # weights, masters, two moments
    config = grpo_config(tmp_path, *overrides)
    before = measure()  # what other tests of this process have left
    with PPOTrainer(config, *load_datasets(config)) as trainer:
        start = measure()
        assert start.here - before.here < model_bytes / 20
        in_training = []
        trainer.train(on_step=lambda *step: in_training.append(measure()))
        trainer.device.to_generation()
        end = measure()
    assert len(in_training) == 3
    for training in in_training:
        assert training.here - before.here > model_bytes * 0.95
        assert start.elsewhere - training.elsewhere > server_bytes * 0.9
    assert end.here - before.here < model_bytes / 20
    # Workspaces of libraries stay; the models and copies of weights do not.
    assert end.elsewhere - start.elsewhere < server_bytes / 10


@pytest.mark.gpu
def test_an_offloaded_model_leaves_its_memory_to_the_others(tmp_path):
    """Actor and reference model of 100M weights: in each step one of them at a time."""
    num_weights = write_wide_model(tmp_path / "tiny_model", 2048)
    model_bytes = (2 + 4 + 8) * num_weights
    trained, waiting = {}, {}
    for offload in (False, True):
        config = grpo_config(
            tmp_path,
            "actor.weight_update_mode=direct",
            "rollout.max_head_offpolicyness=0",
            "actor.dtype=bfloat16",
            "native.num_pages=1024",
            "total_train_steps=3",
            "ref={}",
            "actor.kl_ctl=0.1",
            f"actor.offload={offload}",
            f"ref.offload={offload}",
            f"trial_name=offload_{offload}",
        )
        before = measure().here
        with PPOTrainer(config, *load_datasets(config)) as trainer:
            trainer.train()
            trained[offload] = measure().here - before
            trainer.room.clear()
            waiting[offload] = measure().here - before
    ref_bytes = 2 * num_weights
    assert trained[False] - trained[True] > 0.9 * ref_bytes  # only the actor, which was saved last
    assert waiting[False] - waiting[True] > 0.9 * (model_bytes + ref_bytes)


class measure:  # noqa: N801 (reads as a verb)
    """Bytes of the device this process's tensors take, and what all other uses do."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        self.here = torch.cuda.memory_allocated()
        self.elsewhere = total - free - torch.cuda.memory_reserved()
