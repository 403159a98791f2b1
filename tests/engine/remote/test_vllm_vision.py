"""Images to a real, stock vLLM server. Needs `areal env create vllm` with a torchvision that loads
there; run by `make test-vllm`."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from engine.remote.test_vllm_remote import PYTHON, REASON, SETUP_TIMEOUT_S, TOKEN
from server_checks import ServerWorld, read_weights
from tiny_run import query

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.cli.train import load_config
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.remote.engine import RemoteEngine
from areal.engine.remote.vllm import VLLMProtocol, launch_vllm_server
from areal.models.hf_io import build_model, save_hf
from areal.models.vision.processor import load_processor
from areal.run.paths import RunPaths
from areal.trainer.experiment import run_experiment
from areal.utils.tokenizer import load_hf_tokenizer

ROOT = Path(__file__).parents[3]


@cache
def why_not() -> str:
    """vLLM's processors of images import torchvision, whose builds for CUDA do not load beside the
    CPU build of torch."""
    if not PYTHON:
        return REASON
    tried = subprocess.run(
        [PYTHON, "-c", "import torchvision.transforms.v2"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    said = tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"]
    return f"torchvision in {PYTHON}: {said[-1]}" if tried.returncode else ""


@pytest.fixture(autouse=True)
def able(monkeypatch):
    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.syspath_prepend(ROOT)  # examples


def write_model(folder: Path, seed: int = 0) -> Path:
    """The model of examples/vlm with heads of a size that vLLM has CPU kernels for."""
    from examples.vlm import make_model

    make_model.write_model(folder)
    tokenizer = load_hf_tokenizer(str(folder))
    config = make_model.model_config(tokenizer.get_vocab())
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config["text_config"] |= {"hidden_size": 128, "rope_parameters": rope}
    config["vision_config"] |= {"hidden_size": 128, "out_hidden_size": 128}
    model = build_model(config, device="cpu", dtype=torch.float32)
    model.init_weights(seed)
    save_hf(model.named_hf_tensors(), config, folder)
    return folder


def question(folder: Path, colours: list[str]) -> ModelRequest:
    from examples.vlm.shapes import QUESTION, draw

    rng = random.Random(0)
    images = [draw(colour, rng) for colour in colours]
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": QUESTION}]
    chat = [{"role": "user", "content": content}]
    tokenizer = load_hf_tokenizer(str(folder))
    processor = load_processor(folder, tokenizer)
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return ModelRequest(
        input_ids=processor.expand(ids, [processor.grid_of(image) for image in images]),
        gconfig=GenerationHyperparameters(max_new_tokens=4, greedy=True, ignore_eos=True),
        image_data=[base64.b64encode(image).decode() for image in images],
        vision_msg_vllm=chat,
    )


@pytest.mark.slow
async def test_replies_to_images_are_those_of_the_native_engine(tmp_path):
    folders = [write_model(tmp_path / f"weights{seed}", seed) for seed in (0, 1)]
    child, address = await asyncio.to_thread(
        launch_vllm_server,
        folders[0],
        python=PYTHON,
        token=TOKEN,
        scratch=tmp_path / "scratch",
        dtype="float32",
        max_model_len=256,
        cpu_cache_gb=1,
        enforce_eager=True,
        setup_timeout_s=SETUP_TIMEOUT_S,
    )
    remote = RemoteEngine(VLLMProtocol(folders[0]), [address], TOKEN, request_timeout_s=900)
    try:
        remote.initialize()
        await check_replies(remote, folders[0])
        world = ServerWorld(remote, folders, "vllm-vision", tolerance=1e-3)
        assert await asyncio.to_thread(world.publish) == 1  # the tower included
        await check_replies(remote, folders[1])
    finally:
        await asyncio.to_thread(remote.destroy)
        child.terminate()


async def check_replies(remote: RemoteEngine, folder: Path) -> None:
    judge = NativeLocalEngine(folder)
    judge.initialize()
    firsts = []
    for colours in (["red"], ["blue"], ["blue", "red", "green"]):
        reply = await remote.agenerate(question(folder, colours))
        wanted = await judge.agenerate(question(folder, colours))
        # Where both draw the same tokens: two may be equally likely but for rounding.
        same = [a == b for a, b in zip(reply.output_tokens, wanted.output_tokens, strict=True)]
        length = same.index(False) + 1 if False in same else len(same)
        found = reply.output_logprobs[:length]
        assert found == pytest.approx(wanted.output_logprobs[:length], abs=1e-3)
        firsts.append(found[0])
    judge.destroy()
    assert abs(firsts[0] - firsts[1]) > 1e-3  # they see the image


@pytest.mark.slow
def test_grpo_with_images_through_it(tmp_path):
    """On policy: at every step the trainer gives each token, with its image, the log-probability
    that vLLM drew it with, also after updates that move the tower."""
    folder = write_model(tmp_path / "model")
    config = load_config(
        [
            str(ROOT / "examples" / "vlm" / "shapes_grpo.yaml"),
            *(f"cluster.fileroot={tmp_path}", f"actor.path={folder}", "total_train_steps=3"),
            *("train_dataset.batch_size=4", "gconfig.n_samples=4", "valid_dataset=null"),
            *("evaluator.eval_before_train=false", "rollout.max_head_offpolicyness=0"),
            "reward_fn=sample_rewards.length_of_answer",  # differs between samples of any model
            *("actor.optimizer.lr=1e-2", "actor.weight_update_mode=shm"),
            *("rollout.backend=vllm:d1", f"vllm.python={PYTHON}", "vllm.enforce_eager=true"),
            *("vllm.cpu_cache_gb=1", f"rollout.setup_timeout={SETUP_TIMEOUT_S}"),
        ]
    )
    run_experiment(config)
    root = RunPaths.of(config).root
    steps = [json.loads(stats) for (stats,) in query(root, "SELECT stats FROM steps ORDER BY step")]
    assert len(steps) == 3
    for stats in steps:
        ends = [stats[f"actor/importance_weight/{end}"] for end in ("min", "max")]
        assert ends == pytest.approx([1, 1], abs=2e-3)
    before, after = (dict(read_weights(one)) for one in (folder, root / "model"))
    tower = [name for name in before if "visual.patch_embed" in name]
    assert tower and all((before[name] - after[name]).abs().max() > 1e-3 for name in tower)
