"""The trainer's softmax kernels against float64; beside the other kernels for their fixtures."""

from __future__ import annotations

import pytest
import torch

from areal.engine.train.logprob_kernels import logit_gradient, row_statistics
from areal.engine.train.logprobs import next_token_logprobs

# The interpreter computes both sides of a `where`.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("cap", [None, 15.0])
@pytest.mark.parametrize("width", [7, 4096, 9001])
def test_statistics_and_gradient(width: int, cap, temperature: float, device, dtype):
    gen = torch.Generator().manual_seed(width)
    raw = (10 * torch.randn(3, width, generator=gen)).to(device)
    raw[1] -= 1000.0  # a row far from 0, and one that is all but certain
    raw[2, 5] = 90.0
    labels = torch.tensor([0, width - 1, 5], device=device)
    grad = torch.randn(3, generator=gen).to(device)

    wide = raw.double().requires_grad_()
    logits = wide if cap is None else cap * (wide / cap).tanh()
    logp = (logits / temperature).log_softmax(1)
    label_logp = logp.gather(1, labels[:, None]).squeeze(1)
    (expected_grad,) = torch.autograd.grad(label_logp, wide, grad.double())

    log_total, label, mean = row_statistics(raw, labels, temperature, cap)
    torch.testing.assert_close((label - log_total).double(), label_logp, rtol=1e-5, atol=1e-3)
    entropy = -(logp.exp() * logp).sum(1)
    torch.testing.assert_close((log_total - mean).double(), entropy, rtol=1e-4, atol=1e-3)
    got = logit_gradient(raw, labels, log_total, grad, temperature, cap, dtype)
    assert got.dtype == dtype
    close = {torch.float32: 1e-3, torch.bfloat16: 1e-2}[dtype]
    assert (got.double() - expected_grad).norm() < close * expected_grad.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("temperature,cap", [(1.0, None), (0.7, 30.0)])
def test_chunked_logprobs_on_the_device(temperature: float, cap):
    """The whole way through the head in bfloat16: products, kernels, and the summed gradient."""
    gen = torch.Generator("cuda").manual_seed(0)
    shape = {"device": "cuda", "dtype": torch.bfloat16, "generator": gen}
    hidden = torch.randn(700, 256, **shape).requires_grad_()
    weight = (torch.randn(5003, 256, **shape) * 0.1).requires_grad_()
    labels = torch.randint(0, 5003, (700,), device="cuda", generator=gen)
    upstream = torch.randn(700, device="cuda", generator=gen)
    options = {"temperature": temperature, "logit_softcap": cap}
    logp, entropy = next_token_logprobs(hidden, weight, labels, chunk_size=256, **options)
    grads = torch.autograd.grad(logp, (hidden, weight), upstream)

    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = wide[0] @ wide[1].T
    logits = logits if cap is None else cap * (logits / cap).tanh()
    reference = (logits / temperature).log_softmax(1)
    expected = reference.gather(1, labels[:, None]).squeeze(1)
    torch.testing.assert_close(logp.double(), expected, rtol=1e-4, atol=1e-3)
    expected_entropy = -(reference.exp() * reference).sum(1)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-4, atol=1e-3)
    wide_grads = torch.autograd.grad(expected, wide, upstream.double())
    for got, want in zip(grads, wide_grads, strict=True):
        assert (got.double() - want).norm() < 1e-2 * want.norm()
