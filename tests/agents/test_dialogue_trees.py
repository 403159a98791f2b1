"""The dialogues of an episode form a tree: trained with shared turns computed once, or row by row,
they give the same losses and gradients."""

from __future__ import annotations

import pytest
import torch
from engine.train.archon_world import PLAIN_SGD, num_loss_tokens, open_engine, weights_of
from random_client import RandomClient, open_talkative_world

from areal.algorithm.advantage import shift_left
from areal.algorithm.loss import LossInputs, ppo_clip_loss
from areal.api.config.train_engine import MicroBatchSpec
from areal.rollout.trajectory import as_tensors
from areal.utils.data import concat_padded_tensors

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
NUM_EPISODES = 6


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(the folder of the model, a batch of branched episodes), as the trainer gets them."""
    folder = tmp_path_factory.mktemp("model")
    with (
        open_talkative_world(folder) as world,
        world.open(RandomClient(), export_style="concat") as workflow,
    ):
        episodes = [
            as_tensors(world.episode(workflow, {"seed": seed})) for seed in range(NUM_EPISODES)
        ]
    return str(folder), concat_padded_tensors(episodes)


def learnable(batch):
    """Aligned to predictions; every row has advantages of its own."""
    shape = batch["input_ids"].shape
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "loss_mask": shift_left(batch["loss_mask"]).bool(),
        "old": shift_left(batch["logprobs"]),
        "advantages": torch.randn(shape[0], 1, generator=torch.Generator().manual_seed(0)).expand(
            shape
        ),
    }


def loss_fn(logprobs_T, entropy_T, mb):
    inputs = LossInputs(logprobs_T, mb["old"], mb["advantages"], mb["loss_mask"])
    return ppo_clip_loss(inputs, eps_clip=0.2)[0]


def step(folder, batch, **options):
    """Log-probabilities, loss and gradients of one step, and the share of tokens it computed."""
    engine = open_engine(folder, "archon:d1", **options)
    before = weights_of(engine)
    logprobs = engine.forward_batch(batch)
    stats = engine.train_batch(batch, loss_fn, num_loss_tokens)
    moved = {
        name: (before[name] - after) / PLAIN_SGD.lr for name, after in weights_of(engine).items()
    }
    found = {"logprobs": logprobs, "loss": stats["loss"], "gradients": moved}
    return found, stats.get("tree_token_ratio", 1.0)


@pytest.mark.parametrize("spec", [MicroBatchSpec(), MicroBatchSpec(max_tokens_per_mb=700)])
def test_a_tree_of_dialogues_trains_as_its_rows_do(exported, spec):
    folder, rows = exported
    assert len(rows["input_ids"]) > 2 * NUM_EPISODES, "no episode has branches"
    batch = learnable(rows)
    packed, _ = step(folder, batch)
    tree, ratio = step(folder, batch, enable_tree_training=True, mb_spec=spec)
    torch.testing.assert_close(tree, packed, **TOLERANCE)
    assert ratio < 0.95 and max(g.abs().max() for g in tree["gradients"].values()) > 1e-3
    # The trainer's model gives the sampled tokens what the engine did when it sampled them.
    mask = batch["loss_mask"]
    torch.testing.assert_close(tree["logprobs"][mask], batch["old"][mask], rtol=1e-3, atol=1e-3)
