"""DPO, IPO and the reward model against TRL's own code on the same tensors, to 1e-5.

TRL's batches hold all chosen answers first and then all rejected ones; ours interleave the pairs.
TRL is imported where it runs: that takes seconds.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from areal.algorithm.advantage import shift_left
from areal.algorithm.preference import dpo_loss, ipo_loss, reward_model_loss

PAIRS = 5
WIDTH = 8
CU = torch.arange(0, (2 * PAIRS + 1) * WIDTH, WIDTH)


def interleave(chosen_then_rejected: torch.Tensor) -> torch.Tensor:
    chosen, rejected = chosen_then_rejected.chunk(2)
    return torch.stack([chosen, rejected], dim=1).flatten(0, 1)


def stand_in(**options) -> SimpleNamespace:
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    return SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=accelerator,
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
        aux_loss_enabled=False,
        **options,
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("loss_type", "our_loss"), [("sigmoid", dpo_loss), ("ipo", ipo_loss)])
def test_preference_losses(loss_type: str, our_loss, seed: int):
    gen = torch.Generator().manual_seed(seed)
    rows = 2 * PAIRS
    completion_mask = torch.zeros(rows, WIDTH, dtype=torch.long)
    for row in range(rows):
        start, end = 1 + torch.randperm(WIDTH, generator=gen)[:2].sort().values
        completion_mask[row, start:end] = 1
    shifted = shift_left(completion_mask)[:, :-1].float()
    # What TRL's model gives: the log-probability of the next token, 0 where it is no label.
    logp = -3 * torch.rand(rows, WIDTH - 1, generator=gen) * shifted
    ref = -3 * torch.rand(rows, WIDTH - 1, generator=gen) * shifted

    def trl(leaf: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros_like(leaf)
        outputs = SimpleNamespace(
            log_probs=leaf * shifted, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )
        ref_chosen, ref_rejected = ref.sum(1).chunk(2)
        inputs = {
            "input_ids": torch.zeros(rows, WIDTH, dtype=torch.long),
            "attention_mask": torch.ones(rows, WIDTH),
            "completion_mask": completion_mask,
            "ref_chosen_logps": ref_chosen,
            "ref_rejected_logps": ref_rejected,
        }
        trainer = stand_in(
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            loss_types=[loss_type],
            loss_weights=[1.0],
            beta=0.3,
            use_weighting=False,
        )
        from trl.trainer.dpo_trainer import DPOTrainer

        return DPOTrainer._compute_loss(trainer, lambda **kwargs: outputs, inputs, False)

    def ours(leaf: torch.Tensor) -> torch.Tensor:
        def packed(x: torch.Tensor) -> torch.Tensor:
            return interleave(torch.nn.functional.pad(x, (0, 1))).flatten()

        return our_loss(packed(leaf), packed(ref), packed(shifted), CU, beta=0.3)[0]

    found = []
    for loss_fn in (ours, trl):
        leaf = logp.clone().requires_grad_()
        loss = loss_fn(leaf)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_reward_model():
    from trl.trainer.reward_trainer import RewardTrainer

    scores = torch.randn(2 * PAIRS, 1, generator=torch.Generator().manual_seed(0))
    trainer = stand_in(args=SimpleNamespace(center_rewards_coefficient=None))
    outputs = SimpleNamespace(logits=scores)
    trl = RewardTrainer.compute_loss(trainer, lambda **kwargs: outputs, {})
    values = torch.full((2 * PAIRS, WIDTH), 99.0)
    values[:, -1] = interleave(scores).squeeze(1)
    loss, _ = reward_model_loss(values.flatten(), CU)
    torch.testing.assert_close(loss, trl, rtol=1e-5, atol=1e-5)
