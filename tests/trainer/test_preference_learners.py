"""Reward modelling and DPO on real engines, against the definitions over transformers' models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny import write_tiny_model
from tiny_ppo import PLAIN_SGD, open_engine, weights_of
from transformers import AutoModel, AutoModelForCausalLM

from areal.api.config.offline import DPOActorConfig
from areal.api.config.train_engine import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.engine.train.archon import ArchonEngine
from areal.trainer.learners import DPOLearner, RWLearner
from areal.trainer.offline import evaluate_on_rows
from areal.utils import stats_tracker

ROWS = [
    {"chosen_ids": [5, 6, 7, 8, 9], "rejected_ids": [5, 6, 9], "prompt_len": 2},
    {"chosen_ids": [10, 11], "rejected_ids": [10, 12, 13, 14, 15, 16], "prompt_len": 1},
    {"chosen_ids": [20, 21, 22, 23], "rejected_ids": [20, 21, 22, 24], "prompt_len": 3},
]
CUTS = [MicroBatchSpec(), MicroBatchSpec(max_tokens_per_mb=9), MicroBatchSpec(max_tokens_per_mb=1)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(policy, reference), two different models."""
    root = tmp_path_factory.mktemp("models")
    return [write_tiny_model(root / str(seed), "qwen3", seed=seed) for seed in (0, 1)]


@pytest.fixture(autouse=True)
def fresh_stats():
    stats_tracker.export()


def reward_learner(folder, **options) -> RWLearner:
    optimizer = OptimizerConfig(**options.pop("optimizer", PLAIN_SGD))
    options = {"path": str(folder), "is_critic": True, "optimizer": optimizer, **options}
    return RWLearner(open_engine(TrainEngineConfig(**options)))


def dpo_learner(folders, loss_type: str = "sigmoid", **options) -> DPOLearner:
    policy, reference = map(str, folders)
    optimizer = OptimizerConfig(**options.pop("optimizer", PLAIN_SGD))
    config = DPOActorConfig(
        path=policy, optimizer=optimizer, beta=0.3, loss_type=loss_type, **options
    )
    ref = ArchonEngine(TrainEngineConfig(path=reference))
    ref.initialize()
    return DPOLearner(config, open_engine(config), ref)


@pytest.mark.parametrize("spec", CUTS)
def test_a_reward_model_step(folders, spec):
    learner = reward_learner(folders[0], mb_spec=spec)
    head = learner.engine.model.score.weight.detach().clone().requires_grad_()
    trunk = AutoModel.from_pretrained(folders[0], dtype=torch.float32)

    def score(ids: list[int]) -> torch.Tensor:
        hidden = trunk(input_ids=torch.tensor([ids])).last_hidden_state
        return (hidden[0, -1] @ head.T)[0]

    margins = torch.stack([score(r["chosen_ids"]) - score(r["rejected_ids"]) for r in ROWS])
    loss = -F.logsigmoid(margins).mean()
    loss.backward()

    batch = learner.collate(ROWS)
    assert learner.evaluate(batch) == (pytest.approx(loss.item(), rel=1e-4), 3)
    stats_tracker.export()
    stats = learner.train(batch)
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-4)
    recorded = stats_tracker.export()
    assert recorded["reward_margin"] == pytest.approx(margins.mean().item(), rel=1e-3, abs=1e-5)
    assert recorded["reward_accuracy"] == pytest.approx((margins > 0).float().mean().item())
    moved = dict(learner.engine.hf_weights())["score.weight"]
    torch.testing.assert_close(moved, (head - 0.5 * head.grad).detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
@pytest.mark.parametrize("spec", CUTS)
def test_a_dpo_step(folders, loss_type: str, spec):
    learner = dpo_learner(folders, loss_type, mb_spec=spec)
    policy, reference = (AutoModelForCausalLM.from_pretrained(f).float() for f in folders)

    def gain(ids: list[int], prompt_len: int) -> torch.Tensor:
        """log pi - log pi_ref of the answer's tokens, summed or averaged."""
        logp = []
        for model in (policy, reference):
            logits = model(input_ids=torch.tensor([ids])).logits[0]
            steps = range(prompt_len - 1, len(ids) - 1)
            logp.append(sum(logits[t].log_softmax(-1)[ids[t + 1]] for t in steps))
        total = logp[0] - logp[1].detach()
        return total / (len(ids) - prompt_len) if loss_type == "ipo" else total

    deltas = torch.stack(
        [
            gain(row["chosen_ids"], row["prompt_len"])
            - gain(row["rejected_ids"], row["prompt_len"])
            for row in ROWS
        ]
    )
    losses = -F.logsigmoid(0.3 * deltas) if loss_type == "sigmoid" else (deltas - 1 / 0.6) ** 2
    losses.mean().backward()

    stats = learner.train(learner.collate(ROWS))
    assert stats["loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    assert stats_tracker.export()["reward_accuracy"] == pytest.approx(
        (deltas > 0).float().mean().item()
    )
    expected = policy.model.norm.weight
    torch.testing.assert_close(
        dict(learner.engine.hf_weights())["model.norm.weight"],
        (expected - 0.5 * expected.grad).detach(),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_policy_that_is_its_reference_has_the_loss_of_a_coin(folders):
    same = [folders[0], folders[0]]
    loss = dpo_learner(same).evaluate(dpo_learner(same).collate(ROWS)).mean
    assert loss == pytest.approx(0.6931472, abs=1e-6)


def test_both_learn_which_answer_was_chosen(folders):
    adam = {"lr": 1e-2}
    for learner in (
        reward_learner(folders[0], optimizer=adam),
        dpo_learner(folders, optimizer=adam),
    ):
        batch = learner.collate(ROWS)
        for _ in range(15):
            learner.train(batch)
        stats_tracker.export()
        learner.evaluate(batch)
        stats = stats_tracker.export()
        assert stats["reward_accuracy"] == 1 and stats["reward_margin"] > 1


@pytest.mark.parametrize("batch_size", [1, 2])
def test_evaluation_in_batches_is_that_of_all_pairs_at_once(folders, batch_size):
    for learner in (reward_learner(folders[0]), dpo_learner(folders)):
        whole = evaluate_on_rows(learner, ROWS, len(ROWS)) | stats_tracker.export()
        parts = evaluate_on_rows(learner, ROWS, batch_size) | stats_tracker.export()
        assert parts.keys() == whole.keys() and "eval/reward_margin" in parts
        assert parts == pytest.approx(whole, rel=1e-4)


def test_the_reference_model_does_not_move(folders):
    learner = dpo_learner(folders)
    before = {name: weight.clone() for name, weight in learner.ref.hf_weights()}
    learner.train(learner.collate(ROWS))
    assert all(torch.equal(weight, before[name]) for name, weight in learner.ref.hf_weights())
    assert weights_of(learner).keys() == before.keys()
