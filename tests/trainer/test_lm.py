"""LMLearner over the real engine: one batch, trained on and evaluated."""

from __future__ import annotations

import math

import pytest
from tiny import write_tiny_model
from tiny_ppo import open_engine

from areal.api.config.optimizer import OptimizerConfig
from areal.api.config.train_engine import TrainEngineConfig
from areal.trainer.lm import LMLearner

ROWS = [
    {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1]},
    {"input_ids": [10, 11, 12], "loss_mask": [0, 1, 0]},
]


def test_the_learned_tokens_become_likelier(tmp_path):
    config = TrainEngineConfig(
        path=str(write_tiny_model(tmp_path)), optimizer=OptimizerConfig(lr=1e-2)
    )
    learner = LMLearner(open_engine(config))
    batch = learner.collate(ROWS)
    logp = learner.engine.forward_batch(batch)
    expected = -(logp[0, 1:4].sum() + logp[1, 0]).item() / 4
    start = learner.evaluate(batch)
    assert start["loss"] == pytest.approx(expected, rel=1e-5)
    assert start["ppl"] == pytest.approx(math.exp(start["loss"]))
    stats = [learner.train(batch) for _ in range(10)]
    assert stats[0]["loss"] == pytest.approx(start["loss"], rel=1e-5)
    assert learner.evaluate(batch)["loss"] < 0.7 * start["loss"]
    assert stats[0]["update_successful"] == 1 and stats[0]["ppl"] > stats[-1]["ppl"]
    assert learner.engine.optimizer.lr_step == 10
