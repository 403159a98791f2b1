"""Our policy losses against TRL's own code on the same tensors: value and gradient to 1e-5.

TRL's `_compute_loss` runs as it is, on a stand-in trainer whose model returns the log-probabilities
of the test. By definition ours differ in one thing, which each test states: we divide by all tokens
to learn (N), so a token weighs the same in a long answer as in a short one, where TRL's "grpo" and
"sapo" average each answer first, its "dr_grpo" divides by B * max_completion_length, and its RLOO
takes the ratio of whole answers. TRL is imported where it runs: that takes seconds.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from areal.algorithm.kl import k3, kl_loss
from areal.algorithm.loss import LossInputs, cispo_loss, gspo_loss, ppo_clip_loss, sapo_loss
from areal.algorithm.normalization import normalize

GROUPS = 2
GROUP_SIZE = 4
BATCH = GROUPS * GROUP_SIZE
WIDTH = 7
CLIP = dict(eps_clip=0.2, eps_clip_higher=0.28)


class Data:
    """A batch of answers of random lengths, with policies far enough apart for clips to bite."""

    def __init__(self, *, lengths: list[int] | None = None, seed: int = 0) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.old = -torch.rand(BATCH, WIDTH, generator=gen) * 3
        self.ref = self.old + 0.3 * torch.randn(BATCH, WIDTH, generator=gen)
        self.logp = self.old + 0.3 * torch.randn(BATCH, WIDTH, generator=gen)
        self.advantages = torch.randn(BATCH, generator=gen)
        drawn = torch.randint(1, WIDTH + 1, (BATCH,), generator=gen)
        self.lengths = drawn if lengths is None else torch.tensor(lengths)
        self.mask = torch.arange(WIDTH) < self.lengths[:, None]
        self.num_tokens = self.mask.sum().item()

    def inputs(self, logp: torch.Tensor) -> LossInputs:
        """The same, packed end to end; the padding stays in, off the mask."""
        return LossInputs(
            logprobs_T=logp.flatten(),
            prox_logp_T=self.old.flatten(),
            advantages_T=self.advantages[:, None].expand(BATCH, WIDTH).flatten(),
            mask_T=self.mask.flatten(),
            cu_seqlens=torch.arange(0, (BATCH + 1) * WIDTH, WIDTH),
        )


def with_gradient(loss_fn, logp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logp.clone().requires_grad_()
    loss = loss_fn(leaf)
    loss.backward()
    return loss.detach(), leaf.grad


def one_process() -> SimpleNamespace:
    return SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
        gather_for_metrics=lambda x: x,
    )


def trl_loss(data: Data, rows=slice(None), *, trainer=None, **options):
    """TRL's loss of `rows` as a function of the log-probabilities."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer = trainer or GRPOTrainer
    mask = data.mask[rows].float()

    def loss_fn(logp: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros_like(mask)
        stand_in = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *args, **kw: (logp[rows], zeros, None),
            model=SimpleNamespace(training=False),
            accelerator=one_process(),
            _metrics={"eval": defaultdict(list)},
            aux_loss_enabled=False,
            **options,
        )
        old = data.old[rows]
        inputs = {
            "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(mask), 1),
            "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
            "completion_mask": mask,
            "advantages": data.advantages[rows],
            "old_per_token_logps": old,
            "old_logps": (old * mask).sum(1),
            "ref_per_token_logps": data.ref[rows],
            "num_items_in_batch": mask.sum(),
        }
        return trainer._compute_loss(stand_in, None, inputs)

    return loss_fn


def grpo(data: Data, loss_type: str, rows=slice(None), *, beta: float = 0.0, **changes):
    options = dict(
        loss_type=loss_type,
        beta=beta,
        importance_sampling_level="token",
        epsilon_low=CLIP["eps_clip"],
        epsilon_high=CLIP["eps_clip_higher"],
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        max_completion_length=WIDTH,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
    )
    return trl_loss(data, rows, **options | changes)


def weighed_by_length(data: Data, loss_type: str, **changes):
    """TRL's loss of each answer alone, averaged with the weight of its tokens."""
    parts = [grpo(data, loss_type, slice(i, i + 1), **changes) for i in range(BATCH)]

    def loss_fn(logp: torch.Tensor) -> torch.Tensor:
        losses = torch.stack([part(logp) for part in parts])
        return (losses * data.lengths).sum() / data.num_tokens

    return loss_fn


def ours(data: Data, loss, **options):
    return lambda logp: loss(data.inputs(logp), **options)[0]


def assert_equal(data: Data, our_fn, trl_fn, *, scale: float = 1.0) -> None:
    loss, gradient = with_gradient(our_fn, data.logp)
    trl, trl_gradient = with_gradient(trl_fn, data.logp)
    torch.testing.assert_close(loss, scale * trl, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, scale * trl_gradient, rtol=1e-5, atol=1e-5)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_dapo(seed: int):
    data = Data(seed=seed)
    assert_equal(data, ours(data, ppo_clip_loss, **CLIP), grpo(data, "dapo"))


def test_grpo_is_equal_for_answers_of_one_length():
    data = Data(lengths=[5] * BATCH)
    assert_equal(data, ours(data, ppo_clip_loss, **CLIP), grpo(data, "grpo"))


def test_grpo_differs_by_the_weight_of_long_answers():
    data = Data()
    assert_equal(data, ours(data, ppo_clip_loss, **CLIP), weighed_by_length(data, "grpo"))


def test_dr_grpo_differs_by_a_constant():
    data = Data()
    scale = BATCH * WIDTH / data.num_tokens
    assert_equal(data, ours(data, ppo_clip_loss, **CLIP), grpo(data, "dr_grpo"), scale=scale)


def test_gspo():
    data = Data()
    assert_equal(
        data,
        ours(data, gspo_loss, **CLIP),
        grpo(data, "bnpo", importance_sampling_level="sequence"),
    )
    same_length = Data(lengths=[4] * BATCH)
    assert_equal(
        same_length,
        ours(same_length, gspo_loss, **CLIP),
        grpo(same_length, "grpo", importance_sampling_level="sequence"),
    )


def test_sapo():
    data, same_length = Data(), Data(lengths=[6] * BATCH)
    options = dict(tau_pos=1.0, tau_neg=1.05)
    assert_equal(data, ours(data, sapo_loss, **options), weighed_by_length(data, "sapo"))
    assert_equal(same_length, ours(same_length, sapo_loss, **options), grpo(same_length, "sapo"))


def test_cispo():
    """TRL's epsilon_high is the bound of the ratio itself, ours how far it lies above 1."""
    data = Data()
    our_fn = ours(data, cispo_loss, eps_clip=1.0, eps_clip_higher=0.2)
    assert_equal(data, our_fn, grpo(data, "cispo", epsilon_high=1.2))


def test_kl_as_a_term_of_the_loss():
    data = Data()

    def our_fn(logp: torch.Tensor) -> torch.Tensor:
        inputs = data.inputs(logp)
        kl, _ = kl_loss(inputs.logprobs_T, data.ref.flatten(), inputs.mask_T, estimator=k3)
        return ppo_clip_loss(inputs, **CLIP)[0] + 0.3 * kl

    assert_equal(data, our_fn, grpo(data, "dapo", beta=0.3))


def test_rloo_of_one_token_answers():
    """Where an answer is one token the ratio of the answer is that of the token."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    data = Data(lengths=[1] * BATCH)
    trl_fn = trl_loss(data, trainer=RLOOTrainer, epsilon_low=0.2, epsilon_high=0.28)
    assert_equal(data, ours(data, ppo_clip_loss, **CLIP), trl_fn)


def test_rloo_differs_by_a_constant_on_policy():
    """At ratio 1 both gradients are the advantage at each token, over N or over B."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    data = Data()
    data.logp = data.old
    trl_fn = trl_loss(data, trainer=RLOOTrainer, epsilon_low=0.2, epsilon_high=0.28)
    _, gradient = with_gradient(ours(data, ppo_clip_loss, **CLIP), data.logp)
    _, trl_gradient = with_gradient(trl_fn, data.logp)
    torch.testing.assert_close(gradient, trl_gradient * BATCH / data.num_tokens)


def test_advantages_of_groups():
    """TRL computes them in the method that also generates, so its formulas are written out here
    over its own `nanstd`; its eps is 1e-4.
    """
    from trl.trainer.utils import nanstd

    rewards = torch.rand(BATCH, generator=torch.Generator().manual_seed(1))
    grouped = rewards.view(GROUPS, GROUP_SIZE)
    centred = grouped - grouped.mean(1, keepdim=True)
    others = (grouped.sum(1, keepdim=True) - grouped) / (GROUP_SIZE - 1)
    for (mean, std, leave1out), expected in {
        ("group", "group", False): centred / (nanstd(grouped, dim=1, keepdim=True) + 1e-4),
        ("group", None, False): centred,  # Dr.GRPO
        ("group", "batch", False): centred / (nanstd(rewards) + 1e-4),  # LitePPO
        ("group", None, True): grouped - others,  # RLOO
    }.items():
        out = normalize(
            rewards,
            group_sizes=[GROUP_SIZE] * GROUPS,
            mean_level=mean,
            std_level=std,
            mean_leave1out=leave1out,
            eps=1e-4,
        )
        torch.testing.assert_close(out.view(GROUPS, GROUP_SIZE), expected, rtol=1e-5, atol=1e-5)
