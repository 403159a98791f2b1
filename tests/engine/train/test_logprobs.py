"""Chunked log-probabilities against log_softmax, forward and backward, and their memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from areal.engine.train.logprobs import next_token_logprobs

T, D, V = 13, 6, 11


def problem(dtype: torch.dtype = torch.float32):
    gen = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, D, generator=gen).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=gen).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (T,), generator=gen)
    upstream = torch.randn(T, generator=gen)
    return hidden, weight, labels, upstream


@pytest.mark.parametrize("chunk_size", [1, 4, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_values_and_gradients_equal_log_softmax(chunk_size: int, temperature: float, cap):
    hidden, weight, labels, upstream = problem()
    logprobs, entropy = next_token_logprobs(
        hidden, weight, labels, temperature=temperature, chunk_size=chunk_size, logit_softcap=cap
    )
    (logprobs * upstream).sum().backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None

    logits = hidden @ weight.T
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    reference = (logits / temperature).log_softmax(dim=-1)
    expected = reference.gather(1, labels[:, None]).squeeze(1)
    (expected * upstream).sum().backward()
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, -(reference.exp() * reference).sum(dim=-1))
    torch.testing.assert_close(grads, (hidden.grad, weight.grad), rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad


@given(
    banned=st.sets(st.integers(0, V + 2), min_size=1, max_size=V - 2),
    labels=st.lists(st.integers(0, V - 1), min_size=T, max_size=T),
    temperature=st.sampled_from([1.0, 0.7]),
)
@settings(max_examples=30, deadline=None)
def test_banned_tokens_are_no_choices_and_not_learned(banned, labels, temperature):
    hidden, weight, _, upstream = problem()
    labels = torch.tensor(labels)
    logprobs, entropy = next_token_logprobs(
        hidden,
        weight,
        labels,
        temperature=temperature,
        chunk_size=4,
        banned=tuple(sorted(banned)),  # some beyond the vocabulary
    )
    (logprobs * upstream).sum().backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None

    own = sorted(token for token in banned if token < V)
    is_choice = torch.ones(V, dtype=torch.bool)
    is_choice[own] = False
    choices = is_choice.nonzero().squeeze(1)
    column = torch.full((V,), -1)
    column[choices] = torch.arange(len(choices))
    reference = ((hidden @ weight[choices].T) / temperature).log_softmax(dim=-1)
    is_learned = is_choice[labels]
    picked = reference.gather(1, column[labels].clamp(min=0)[:, None]).squeeze(1)
    expected = torch.where(is_learned, picked, 0.0)
    (expected * upstream).sum().backward()
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, -(reference.exp() * reference).sum(dim=-1))
    torch.testing.assert_close(grads, (hidden.grad, weight.grad), rtol=1e-5, atol=1e-5)
    assert (logprobs[~is_learned] == 0).all() and (grads[1][own] == 0).all()


def test_bfloat16_gradients_keep_their_dtype():
    hidden, weight, labels, upstream = problem(torch.bfloat16)
    logprobs, _ = next_token_logprobs(hidden, weight, labels, chunk_size=4)
    (logprobs * upstream).sum().backward()
    assert logprobs.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_extreme_logits_stay_finite():
    hidden = torch.full((1, 1), 100.0, requires_grad=True)
    weight = torch.tensor([[100.0], [-100.0]])
    logprobs, entropy = next_token_logprobs(hidden, weight, torch.tensor([1]))
    logprobs.sum().backward()
    assert logprobs.item() == -20000.0 and entropy.item() == 0.0
    assert torch.isfinite(hidden.grad).all()


class LargestTensor(TorchDispatchMode):
    """Records the most elements any operation's result had."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.num_elements = max(self.num_elements, out.numel())
        return out


def test_the_logits_of_the_whole_batch_never_exist():
    hidden = torch.randn(256, 4, requires_grad=True)
    weight = torch.randn(300, 4, requires_grad=True)
    with LargestTensor() as largest:
        logprobs, _ = next_token_logprobs(
            hidden, weight, torch.zeros(256, dtype=torch.long), chunk_size=16
        )
        logprobs.sum().backward()
    assert largest.num_elements <= 16 * 300
