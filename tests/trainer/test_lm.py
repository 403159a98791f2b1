"""LMLearner over the real engine: one batch, trained on and evaluated."""

from __future__ import annotations

import math

import pytest
from tiny import write_tiny_model
from tiny_ppo import open_engine

from areal.api.config.train_engine import OptimizerConfig, TrainEngineConfig
from areal.trainer.learners import LMLearner
from areal.trainer.offline import evaluate_on_rows

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
    assert start.mean == pytest.approx(expected, rel=1e-5) and start.weight == 4
    assert learner.summary(0.5) == {"loss": 0.5, "ppl": pytest.approx(math.exp(0.5))}
    stats = [learner.train(batch) for _ in range(10)]
    assert stats[0]["loss"] == pytest.approx(start.mean, rel=1e-5)
    assert learner.evaluate(batch).mean < 0.7 * start.mean
    assert stats[0]["update_successful"] == 1 and stats[0]["ppl"] > stats[-1]["ppl"]
    assert learner.engine.optimizer.lr_step == 10


def test_evaluation_in_batches_is_that_of_all_rows_at_once(tmp_path):
    """Rows count by their tokens: the mean of the batches' means would be another number."""
    learner = LMLearner(open_engine(TrainEngineConfig(path=str(write_tiny_model(tmp_path)))))
    rows = [*ROWS, {"input_ids": [7, 7, 7, 7], "loss_mask": [0, 0, 0, 1]}]
    whole = learner.evaluate(learner.collate(rows)).mean
    for batch_size in (1, 2, 3, 100):
        stats = evaluate_on_rows(learner, rows, batch_size)
        assert stats["eval/loss"] == pytest.approx(whole, rel=1e-5)
        assert stats["eval/ppl"] == pytest.approx(math.exp(whole), rel=1e-5)
    means = [learner.evaluate(learner.collate([row])).mean for row in rows]
    assert sum(means) / len(means) != pytest.approx(whole, rel=1e-3)
