"""With `batch_invariant` the trainer's log-probabilities are the native engine's bits on a CPU too.

The same on CUDA: tests/engine/native/cuda (marker gpu).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.train.archon_world import loss_fn, make_batch, open_engine
from tiny import write_tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.engine.native.local_engine import NativeLocalEngine
from areal.trainer.ppo.batch import collect, token_outputs
from areal.workflow.transcript import Transcript

LENGTHS = (1, 2, 30, 17, 9, 16, 5)  # of outputs
# Wider than a block of the libraries' products; more rows of logits than one chunk.
WIDE = {"hidden_size": 320, "intermediate_size": 832, "vocab_size": 3001}


async def sample(folder: Path, temperature: float) -> dict[str, torch.Tensor]:
    """Two turns of several lengths at the same time, so that batches differ from step to step."""
    engine = NativeLocalEngine(str(folder), num_pages=400)
    engine.initialize()

    async def episode(seed: int, length: int) -> dict[str, torch.Tensor]:
        transcript = Transcript([3, 1 + seed, 4] * (1 + 3 * seed))
        gconfig = GenerationHyperparameters(
            max_new_tokens=length, ignore_eos=True, temperature=temperature, seed=seed
        )
        for _ in range(2):
            request = ModelRequest(input_ids=list(transcript.ids), gconfig=gconfig)
            transcript.add_reply(await engine.agenerate(request))
            transcript.add_text([7, 8])
        return transcript.trajectory(reward=1.0)

    trajectories = await asyncio.gather(*(episode(*each) for each in enumerate(LENGTHS)))
    engine.destroy()
    return collect(trajectories)


@pytest.mark.parametrize(
    ("family", "changes", "temperature"),
    [
        ("qwen3", WIDE, 1.0),
        ("qwen2", {}, 0.7),
        ("llama", {}, 1.3),
        ("gemma3_text", {}, 1.0),  # sliding windows
        ("qwen3_moe", {}, 1.0),
        ("deepseek_v2", {}, 1.0),  # latent attention
    ],
)
async def test_logprobs_are_the_engines_bits(
    family: str, changes: dict[str, Any], temperature: float, tmp_path: Path
):
    folder = write_tiny_model(tmp_path, family, **changes)
    data = await sample(folder, temperature)
    options = {"temperature": temperature, "logprobs_chunk_size": 50, "batch_invariant": True}
    engine = open_engine(str(folder), "archon:d1", **options)
    mask = data["loss_mask"].bool()
    assert torch.equal(token_outputs(engine, data)[mask], data["logprobs"][mask])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_it_trains_as_without(family: str, tmp_path: Path):
    folder = str(write_tiny_model(tmp_path, family))
    batch, weight = make_batch(), lambda mb: mb["loss_mask"].sum()
    engines = [open_engine(folder, "archon:d1", batch_invariant=on) for on in (False, True)]
    losses = [engine.train_batch(batch, loss_fn, weight)["loss"] for engine in engines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    parameters = (engine.model.parameters() for engine in engines)
    for mine, theirs in zip(*parameters, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)


def test_scores_of_a_server_are_the_trainers_bits(tmp_path: Path):
    folder = str(write_tiny_model(tmp_path, "qwen3"))
    server = NativeLocalEngine(folder, num_pages=400, batch_invariant=True)
    server.initialize()
    batch = make_batch()
    scores = server.compute_logp(batch)
    server.destroy()
    engine = open_engine(folder, "archon:d1", batch_invariant=True)
    lengths = batch["attention_mask"].sum(1).tolist()
    found = engine.forward_batch(batch)
    for row, length in enumerate(lengths):  # nothing follows the last token
        assert torch.equal(scores[row, : length - 1], found[row, : length - 1])
