"""Sampling on the device against float64: which token wins, what a cut keeps, log-probabilities.

The race is proved in two steps, because the interpreter is slow: the exponential variables, written
once more in numpy, give softmax's frequencies, and the kernels find the winner of those variables.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from areal.engine.native.cuda.sampler import (
    MAX_BIASED,
    MAX_STOP_IDS,
    DeviceSampling,
    SamplingTiles,
    SamplingWorkspace,
    sample_rows,
)
from areal.engine.native.sampler import keep_top

# The interpreter computes both sides of a `where`.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

OFF = 2**31 - 1
TILES = SamplingTiles(block=256, num_warps=4, cut_block=512, cut_warps=4)  # several parts of V


def device_sampling(num_slots: int, device: torch.device, **changes) -> DeviceSampling:
    """Plain sampling with seed = slot; `changes` are scalars, or one value per slot."""
    kinds = {
        "temperature": (1.0, torch.float32),
        "top_k": (OFF, torch.int32),
        "top_p": (1.0, torch.float32),
        "greedy": (0, torch.int32),
        "seed": (torch.arange(num_slots), torch.int64),
        "num_output": (0, torch.int32),
        "min_output": (0, torch.int32),
        "frequency_penalty": (0.0, torch.float32),
        "presence_penalty": (0.0, torch.float32),
        "repetition_penalty": (1.0, torch.float32),
        "min_p": (0.0, torch.float32),
    }
    rare = {"presence_penalty", "repetition_penalty", "min_p", "bias"}
    is_adjusted = int(not rare.isdisjoint(changes))
    columns = {}
    for name, (default, dtype) in kinds.items():
        value = torch.as_tensor(changes.pop(name, default), dtype=dtype, device=device)
        columns[f"{name}_S"] = value.broadcast_to((num_slots,)).contiguous()
    stop_ids_SM = torch.full((num_slots, MAX_STOP_IDS), -1, dtype=torch.int32, device=device)
    history_SC = torch.zeros((num_slots, 600), dtype=torch.int32, device=device)
    for slot, ids in changes.pop("stop_ids", {}).items():
        stop_ids_SM[slot, : len(ids)] = torch.tensor(ids)
    for slot, tokens in changes.pop("history", {}).items():
        history_SC[slot, : len(tokens)] = torch.tensor(tokens)
    num_words = -(-changes.pop("vocab_size", 32) // 32)
    allowed_SB = torch.zeros((num_slots, num_words), dtype=torch.int32, device=device)
    constrained_S = torch.zeros(num_slots, dtype=torch.int32, device=device)
    for slot, tokens in changes.pop("allowed", {}).items():
        allowed_SB[slot] = torch.from_numpy(bits_of(tokens, num_words))
        constrained_S[slot] = 1
    biased_SN = torch.full((num_slots, MAX_BIASED), -1, dtype=torch.int32, device=device)
    bias_SN = torch.zeros((num_slots, MAX_BIASED), dtype=torch.float32, device=device)
    for slot, bias in changes.pop("bias", {}).items():
        biased_SN[slot, : len(bias)] = torch.tensor(list(bias))
        bias_SN[slot, : len(bias)] = torch.tensor(list(bias.values()))
    seen = {name: torch.zeros_like(allowed_SB) for name in ("drawn", "prompt")}
    for name, bits_SB in seen.items():
        for slot, tokens in changes.pop(name, {}).items():
            bits_SB[slot] = torch.from_numpy(bits_of(tokens, num_words))
    assert not changes
    return DeviceSampling(
        adjusted_S=torch.full((num_slots,), is_adjusted, dtype=torch.int32, device=device),
        biased_SN=biased_SN,
        bias_SN=bias_SN,
        drawn_SB=seen["drawn"],
        prompt_SB=seen["prompt"],
        **columns,
        stop_ids_SM=stop_ids_SM,
        history_SC=history_SC,
        constrained_S=constrained_S,
        allowed_SB=allowed_SB,
    )


def bits_of(tokens: list[int], num_words: int) -> np.ndarray:
    bits = np.zeros(num_words * 32, bool)
    bits[tokens] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def draw(logits_RV: torch.Tensor, options: DeviceSampling, slots=None, tiles=TILES):
    """(tokens, log-probabilities, workspace); the logits themselves stay as they are."""
    num_rows, device = len(logits_RV), logits_RV.device
    slots = range(num_rows) if slots is None else slots
    slot_R = torch.tensor(list(slots), dtype=torch.int32, device=device)
    token_R = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    logprob_R = torch.full((num_rows,), math.nan, dtype=torch.float32, device=device)
    workspace = SamplingWorkspace.allocate(*logits_RV.shape, device, tiles)
    sample_rows(logits_RV.clone(), slot_R, options, token_R, logprob_R, workspace)
    return token_R.long(), logprob_R.double(), workspace


def scaled(logits_RV: torch.Tensor, temperature) -> torch.Tensor:
    return logits_RV.double() / torch.as_tensor(temperature).double().reshape(-1, 1)


def kept_RV(logits_RV: torch.Tensor, workspace: SamplingWorkspace) -> torch.Tensor:
    threshold_R1, last_R1 = workspace.threshold_R[:, None], workspace.last_R[:, None]
    token_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    tie_RV = (logits_RV == threshold_R1) & (token_V <= last_R1)
    return (logits_RV > threshold_R1) | tie_RV


def reference_cut(logits_RV, temperature, top_k, top_p) -> torch.Tensor:
    """float64 probabilities, 0 outside of what the CPU sampler keeps."""
    probs_RV = scaled(logits_RV.cpu(), temperature).softmax(-1)
    k_R = torch.as_tensor(top_k).expand(len(probs_RV))
    # The device is given float32.
    p_R = torch.as_tensor(top_p, dtype=torch.float32).double().expand(len(probs_RV))
    return keep_top(probs_RV, k_R, p_R)


def mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def exponentials_RV(seed_R, index_R, vocab_size: int) -> np.ndarray:
    """The variables of the race, float64 [R, V]."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    seed_R, index_R = (np.asarray(x, np.int64).astype(np.uint64) for x in (seed_R, index_R))
    key_R = mix64(mix64(seed_R + golden) + index_R * golden)
    low_R1 = key_R.astype(np.uint32)[:, None]
    high_R1 = (key_R >> np.uint64(32)).astype(np.uint32)[:, None]
    x = np.arange(vocab_size, dtype=np.uint32) * np.uint32(0x9E3779B1) + low_R1
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13)) ^ high_R1) * np.uint32(0xC2B2AE35)
    x = x ^ (x >> np.uint32(16))
    return -np.log1p(-(x + 0.5) / 2**32)


def chi_square_quantile(num_degrees: int, normal_quantile: float = 4.0) -> float:
    """Wilson and Hilferty's approximation; exceeded once in 30000 tests by default."""
    spread = 2 / (9 * num_degrees)
    return num_degrees * (1 - spread + normal_quantile * math.sqrt(spread)) ** 3


def assert_follows(tokens, probs_V) -> None:
    expected_V = np.asarray(probs_V) * len(tokens)
    assert expected_V.min() >= 5  # else the statistic is not chi-square
    counts_V = np.bincount(tokens, minlength=len(expected_V))
    statistic = ((counts_V - expected_V) ** 2 / expected_V).sum()
    assert statistic < chi_square_quantile(len(expected_V) - 1)


PROBS = np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.08, 0.04, 0.02, 0.008, 0.002])


@pytest.mark.parametrize("vary", ["seed", "index"])
def test_the_smallest_variable_over_probability_follows_the_probabilities(vary):
    count = 100_000
    seed = np.arange(count) if vary == "seed" else np.full(count, 5)
    index = np.arange(count) if vary == "index" else np.zeros(count)
    winners = (exponentials_RV(seed, index, len(PROBS)) / PROBS).argmin(-1)
    assert_follows(winners, PROBS)
    pairs = winners[:-1] * len(PROBS) + winners[1:]  # one draw says nothing about the next
    expected = np.outer(PROBS, PROBS).ravel()
    often = np.flatnonzero(expected > 2e-4)
    lookup = np.full(len(expected), len(often))
    lookup[often] = np.arange(len(often))
    shares = np.append(expected[often], 1 - expected[often].sum())
    assert_follows(lookup[pairs], shares)


def test_a_flat_vocabulary_is_drawn_evenly():
    """The winners' variables are the tiny ones, of which the hash must have enough."""
    winners = exponentials_RV(np.arange(600), np.zeros(600), 30_000).argmin(-1)
    assert_follows(winners // 1000, np.full(30, 1 / 30))
    assert_follows(winners % 30, np.full(30, 1 / 30))


@pytest.mark.parametrize(("vocab_size", "spread"), [(50, 1.0), (777, 0.0), (1999, 4.0)])
def test_the_winner_of_the_race_is_drawn_with_its_logprob(device, vocab_size, spread):
    torch.manual_seed(vocab_size)
    logits = torch.randn(10, vocab_size, device=device) * spread + 20
    temperature = torch.rand(10) * 2 + 0.2
    seed, index = torch.randint(-(2**62), 2**62, (10,)), torch.randint(0, 9999, (10,))
    options = device_sampling(10, device, temperature=temperature, seed=seed, num_output=index)
    tokens, logprobs, _ = draw(logits, options)
    expected = scaled(logits.cpu(), temperature).log_softmax(-1)
    times = exponentials_RV(seed, index, vocab_size) / expected.exp().numpy()
    assert tokens.tolist() == times.argmin(-1).tolist()
    expected = expected.gather(1, tokens.cpu()[:, None])[:, 0]
    assert (logprobs.cpu() - expected).abs().max() < 1e-5


def test_a_draw_depends_on_seed_and_index_and_not_on_the_batch(device):
    torch.manual_seed(1)
    logits = torch.randn(6, 700, device=device)
    options = device_sampling(
        9,
        device,
        temperature=torch.rand(9) + 0.5,
        seed=torch.tensor([3, 3, -4, 2**62, 0, 9, 9, 9, 9]),
        num_output=torch.tensor([0, 1, 5, 0, 0, 0, 0, 7, 0]),
        top_k=torch.tensor([OFF, 40, OFF, 40, OFF, OFF, OFF, OFF, OFF]),
    )
    slots = [0, 1, 2, 3, 4, 5]
    tokens, logprobs, _ = draw(logits, options, slots)
    order = [4, 2, 0]
    again, again_logprobs, _ = draw(logits[order], options, [slots[row] for row in order])
    assert torch.equal(again, tokens[order]) and torch.equal(again_logprobs, logprobs[order])
    alone, alone_logprob, _ = draw(logits[3:4], options, [3])
    assert alone == tokens[3] and alone_logprob == logprobs[3]
    same_seed, _, _ = draw(logits[5:6].expand(3, -1), options, [5, 6, 8])
    assert len(set(same_seed.tolist())) == 1
    later, _, _ = draw(logits[5:6], options, [7])
    assert later != same_seed[0]


def test_greedy_takes_the_first_of_the_largest_with_its_uncut_logprob(device):
    torch.manual_seed(2)
    logits = torch.randn(4, 600, device=device)
    logits[1, [40, 300, 599]] = 9.0
    logits[2] = 0.0
    logits[3, 500:502] = torch.tensor([30.0, 30.000002])  # one float32 apart
    options = device_sampling(4, device, greedy=1, top_k=1, top_p=0.1, temperature=5.0)
    tokens, logprobs, _ = draw(logits, options)
    assert tokens.tolist() == [int(logits[0].argmax()), 40, 0, 501]
    expected = scaled(logits.cpu(), 5.0).log_softmax(-1).gather(1, tokens.cpu()[:, None])[:, 0]
    assert (logprobs.cpu() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("vocab_size", [61, 1500])
def test_cut_keeps_what_the_cpu_sampler_keeps(device, vocab_size):
    torch.manual_seed(vocab_size)
    logits = torch.randn(9, vocab_size, device=device) * 3
    top_k = torch.tensor([1, 2, 5, 40, vocab_size - 1, vocab_size, OFF, 17, 30])
    top_p = torch.tensor([1.0, 1.0, 0.4, 0.9, 0.999, 0.05, 0.5, 0.95, 0.7])
    temperature = torch.tensor([1.0, 2.5, 0.7, 50.0, 1.3, 0.05, 9.0, 0.3, 1.0])
    options = device_sampling(9, device, top_k=top_k, top_p=top_p, temperature=temperature)
    tokens, logprobs, workspace = draw(logits, options)
    expected = reference_cut(logits, temperature, top_k, top_p)
    assert torch.equal(kept_RV(logits, workspace).cpu(), expected > 0)
    times = exponentials_RV(np.arange(9), np.zeros(9), vocab_size) / expected.clamp(1e-300).numpy()
    assert tokens.tolist() == times.argmin(-1).tolist()
    drawn = expected.gather(1, tokens.cpu()[:, None])[:, 0] / expected.sum(-1)
    assert (logprobs.cpu() - drawn.log()).abs().max() < 1e-5


def test_cut_between_equal_logits_keeps_the_first_tokens(device):
    """Logits of few values, as bfloat16 gives them; a top-p boundary may lie between two."""
    torch.manual_seed(3)
    logits = torch.randint(-3, 4, (7, 700), device=device).float()
    logits[5:] = 1.5  # all equal
    top_k = torch.tensor([150, 699, OFF, 300, OFF, 5, OFF])
    top_p = torch.tensor([1.0, 1.0, 0.9013, 0.6011, 0.002, 1.0, 0.5003])
    options = device_sampling(7, device, top_k=top_k, top_p=top_p)
    tokens, _, workspace = draw(logits, options)
    expected = reference_cut(logits, 1.0, top_k, top_p) > 0
    assert torch.equal(kept_RV(logits, workspace).cpu(), expected)
    assert expected.gather(1, tokens.cpu()[:, None]).all()


def test_parts_of_the_vocabulary_that_a_cut_empties_win_nothing(device):
    logits = torch.zeros(6, 700, device=device)
    tokens, logprobs, _ = draw(logits, device_sampling(6, device, top_k=1))
    assert set(tokens.tolist()) == {0} and set(logprobs.tolist()) == {0.0}


def test_cut_of_hard_shapes(device):
    """An outlier far above, values around 0 of all magnitudes, and -inf for most tokens."""
    torch.manual_seed(4)
    logits = torch.randn(5, 500, device=device)
    logits[0, 7] = 1e30
    logits[1] = logits[1].sign() * 10.0 ** (-30 * torch.rand(500, device=device))
    logits[2, 3:] = -math.inf
    logits[3] = logits[3] * 1e-20 - 100.0
    logits[4] *= 1e4
    top_k = torch.tensor([20, 250, 6, 100, 400])
    tokens, _, workspace = draw(logits, device_sampling(5, device, top_k=top_k))
    kept = kept_RV(logits, workspace).cpu()
    order = logits.cpu().argsort(dim=-1, descending=True, stable=True)
    for row, count in enumerate([20, 250, 3, 100, 400]):
        assert kept[row].nonzero()[:, 0].tolist() == sorted(order[row, :count].tolist())
    assert kept.gather(1, tokens.cpu()[:, None]).all()


def test_stop_tokens_are_banned_before_min_output(device):
    torch.manual_seed(5)
    logits = torch.randn(3, 80, device=device)
    logits[:, [11, 79]] = 8.0
    options = device_sampling(
        3,
        device,
        greedy=torch.tensor([0, 1, 1]),
        num_output=torch.tensor([4, 4, 5]),
        min_output=5,
        stop_ids={slot: [11, 79] for slot in range(3)},
    )
    tokens, logprobs, _ = draw(logits, options)
    allowed = logits.cpu().double()
    allowed[:, [11, 79]] = -math.inf
    assert tokens[1] == allowed[1].argmax() and tokens[2] == 11
    expected = allowed.log_softmax(-1).gather(1, tokens.cpu()[:, None])[:2, 0]
    assert (logprobs[:2].cpu() - expected).abs().max() < 1e-5


def test_frequency_penalty_counts_the_tokens_drawn(device):
    torch.manual_seed(6)
    logits = torch.randn(4, 90, device=device)
    history = [5, 5, 7, 89, 5, 7, 60]
    options = device_sampling(
        4,
        device,
        temperature=0.7,
        frequency_penalty=torch.tensor([0.5, -1.25, 0.0, 2.0]),
        num_output=torch.tensor([7, 5, 7, 601]),  # one more than the history holds
        history={0: history, 1: history, 2: history, 3: [8] * 600},
    )
    tokens, logprobs, _ = draw(logits, options)
    expected = logits.cpu().double()
    expected[0, [5, 7, 89, 60]] -= 0.5 * torch.tensor([3.0, 2.0, 1.0, 1.0])
    expected[1, [5, 7, 89]] += 1.25 * torch.tensor([3.0, 1.0, 1.0])  # of the first five
    expected[3, 8] -= 1200.0
    expected = (expected / 0.7).log_softmax(-1).gather(1, tokens.cpu()[:, None])[:, 0]
    assert (logprobs.cpu() - expected).abs().max() < 1e-5


def test_penalty_and_ban_come_before_the_cut(device):
    logits = torch.arange(10, 0, -1, device=device).float().expand(1, -1)
    options = device_sampling(
        1,
        device,
        top_k=2,
        num_output=3,
        min_output=9,
        frequency_penalty=2.0,
        stop_ids={0: [1]},
        history={0: [0, 0, 3]},
    )
    _, _, workspace = draw(logits, options)
    # Left: token 0 at 6, 2 at 8, 3 at 5, 4 at 6, 5 at 5, ... : 2, and the first of 0 and 4.
    adjusted = logits.clone()
    adjusted[0, [0, 1, 3]] = torch.tensor([6.0, -math.inf, 5.0], device=device)
    assert kept_RV(adjusted, workspace)[0].nonzero()[:, 0].tolist() == [0, 2]


@pytest.mark.parametrize("vocab_size", [61, 1500])
def test_a_constrained_row_draws_allowed_tokens_alone(device, vocab_size):
    """Before the cut, in the first and last words, and whatever other rows may draw."""
    torch.manual_seed(vocab_size)
    logits = torch.randn(7, vocab_size, device=device) * 3
    top_k = torch.tensor([OFF, OFF, 2, 50, OFF, 3, OFF])
    top_p = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.7, 1.0, 1.0])
    allowed = {
        1: [0, 31, 32, vocab_size - 1],
        2: [3, 30, 33, vocab_size - 2],
        3: [5, vocab_size - 1],  # fewer than top-k
        4: [*range(1, vocab_size, 3)],
        5: [vocab_size - 1],
        6: [7, 9],
    }
    options = device_sampling(
        7,
        device,
        top_k=top_k,
        top_p=top_p,
        greedy=torch.tensor([0, 0, 0, 0, 0, 0, 1]),
        vocab_size=vocab_size,
        allowed=allowed,
    )
    tokens, logprobs, _ = draw(logits, options)
    masked = logits.cpu().clone()
    for row, its_tokens in allowed.items():
        banned = torch.ones(vocab_size, dtype=torch.bool)
        banned[its_tokens] = False
        masked[row, banned] = -math.inf
    expected = reference_cut(masked, 1.0, top_k, top_p)
    times = exponentials_RV(np.arange(7), np.zeros(7), vocab_size) / expected.clamp(1e-300).numpy()
    winners = [*times.argmin(-1)[:6].tolist(), int(masked[6].argmax())]
    assert tokens.tolist() == winners
    drawn = expected.gather(1, tokens.cpu()[:, None])[:, 0] / expected.sum(-1)
    assert (logprobs.cpu() - drawn.log()).abs().max() < 1e-5


@pytest.mark.parametrize("vocab_size", [61, 1500])
def test_bias_and_penalties_are_those_of_the_cpu_sampler(device, vocab_size):
    """The newest token is not among the bits yet; row 4 has all options, row 5 the defaults."""
    torch.manual_seed(vocab_size)
    logits = torch.randn(7, vocab_size, device=device) * 3
    end = vocab_size - 1
    history = {row: [5, 31, 5, end] for row in range(7)}
    prompt = {row: [2, 5, 32, end] for row in range(7)}
    columns = {
        "presence_penalty": [1.5, 0.0, 0.0, 0.0, 0.7, 0.0, -2.0],
        "repetition_penalty": [1.0, 1.8, 1.0, 1.0, 0.6, 1.0, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.2, 0.1, 0.0, 0.3],
        "frequency_penalty": [0.0, 0.0, 0.0, 0.0, 0.4, 0.0, 0.0],
        "top_p": [1.0, 1.0, 1.0, 1.0, 0.8, 1.0, 1.0],
        "greedy": [0, 0, 0, 0, 0, 0, 1],
    }
    top_k = [OFF, OFF, OFF, OFF, 9, OFF, OFF]
    bias = {2: {0: 4.0, 7: -100.0, end: 2.5}, 4: {31: 3.0, 33: 1.0}}
    options = device_sampling(
        7,
        device,
        **{name: torch.tensor(values) for name, values in columns.items()},
        top_k=torch.tensor(top_k),
        temperature=1.3,
        num_output=4,
        history=history,
        drawn={row: tokens[:-1] for row, tokens in history.items()},
        prompt=prompt,
        bias=bias,
        vocab_size=vocab_size,
    )
    tokens, logprobs, _ = draw(logits, options)
    adjusted = logits.cpu().double()
    for row in range(7):
        for token, value in bias.get(row, {}).items():
            adjusted[row, token] += value
        for token in {*history[row], *prompt[row]}:
            penalty = columns["repetition_penalty"][row]
            adjusted[row, token] *= 1 / penalty if adjusted[row, token] > 0 else penalty
        for token, count in Counter(history[row]).items():
            adjusted[row, token] -= columns["presence_penalty"][row]
            adjusted[row, token] -= columns["frequency_penalty"][row] * count
    probs = (adjusted / 1.3).softmax(-1)
    for row in (3, 4):
        probs[row, probs[row] < columns["min_p"][row] * probs[row].max()] = 0.0
    expected = keep_top(probs, torch.tensor(top_k), torch.tensor(columns["top_p"]).double()).numpy()
    expected /= expected.sum(-1, keepdims=True)
    times = exponentials_RV(np.arange(7), np.full(7, 4), vocab_size) / np.maximum(expected, 1e-300)
    assert tokens.tolist()[:6] == times.argmin(-1).tolist()[:6]
    assert tokens[6] == expected[6].argmax(), "greedy"
    drawn = np.log(np.take_along_axis(expected, tokens.cpu().numpy()[:, None], 1)[:, 0])
    assert np.abs(logprobs.cpu().numpy() - drawn).max() < 1e-5
    again, _, _ = draw(logits, options)  # the bit of the newest token is there now
    assert torch.equal(again, tokens)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_not_finite_shows_in_the_logprob(device, bad):
    torch.manual_seed(7)
    logits = torch.randn(5, 300, device=device)
    logits[1:, 270] = bad
    if bad == -math.inf:  # one alone is a token of probability 0
        logits[1:] = bad
    top_k, top_p = torch.tensor([OFF, OFF, OFF, 3, OFF]), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.5])
    greedy = torch.tensor([0, 0, 1, 0, 0])
    options = device_sampling(5, device, top_k=top_k, top_p=top_p, greedy=greedy)
    tokens, logprobs, _ = draw(logits, options)
    assert logprobs.isfinite().tolist() == [True, False, False, False, False]
    assert tokens.min() >= 0 and tokens.max() < 300


def test_a_certain_token_is_drawn_whatever_the_hash_is(device):
    logits = torch.full((9, 300), -math.inf, device=device)
    logits[:, 280] = -5.0
    tokens, logprobs, _ = draw(logits, device_sampling(9, device))
    assert set(tokens.tolist()) == {280} and set(logprobs.tolist()) == {0.0}


LARGE = 151_936


@pytest.mark.gpu
def test_a_large_vocabulary_is_drawn_as_float64_draws_it(device):
    torch.manual_seed(8)
    logits = (
        torch.randn(48, LARGE, device=device) * torch.linspace(0, 8, 48, device=device)[:, None]
    )
    index = torch.arange(48) * 100
    options = device_sampling(48, device, temperature=0.9, num_output=index)
    tokens, logprobs, _ = draw(logits, options, tiles=SamplingTiles())
    expected = scaled(logits.cpu(), 0.9).log_softmax(-1)
    times = exponentials_RV(np.arange(48), index, LARGE) / expected.exp().numpy()
    assert tokens.tolist() == times.argmin(-1).tolist()
    expected = expected.gather(1, tokens.cpu()[:, None])[:, 0]
    assert (logprobs.cpu() - expected).abs().max() < 1e-5


@pytest.mark.gpu
def test_a_large_vocabulary_is_cut_as_float64_cuts_it(device):
    torch.manual_seed(9)
    logits = torch.randn(16, LARGE, device=device) * 3
    logits[8:] = logits[8:].bfloat16().float()  # many ties
    top_k = torch.tensor([1, 50, 5000, OFF, OFF, OFF, 3000, 100_000]).repeat(2)
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.95, 0.999, 0.9, 0.8]).repeat(2)
    options = device_sampling(16, device, top_k=top_k, top_p=top_p)
    tokens, logprobs, workspace = draw(logits, options, tiles=SamplingTiles())
    expected, kept = reference_cut(logits, 1.0, top_k, top_p), kept_RV(logits, workspace).cpu()
    by_count = [0, 1, 2, 8, 9, 10]
    assert torch.equal(kept[by_count], expected[by_count] > 0)
    # A float32 sum of so many terms is good to 1e-5: tokens of that share may change sides.
    probs = logits.cpu().double().softmax(-1)
    assert (probs * (kept != (expected > 0))).sum(-1).max() < 1e-5
    drawn = probs.gather(1, tokens.cpu()[:, None])[:, 0] / (probs * kept).sum(-1)
    assert kept.gather(1, tokens.cpu()[:, None]).all()
    assert (logprobs.cpu() - drawn.log()).abs().max() < 1e-5


@pytest.mark.gpu
def test_a_large_vocabulary_is_constrained_as_float64_constrains_it(device):
    torch.manual_seed(11)
    logits = torch.randn(24, LARGE, device=device) * 3
    counts = [1, 2, 300, 40_000, LARGE - 1, LARGE]
    allowed = {row: torch.randperm(LARGE)[: counts[row % 6]].tolist() for row in range(24)}
    top_k = torch.tensor([OFF, OFF, 50, OFF]).repeat_interleave(6)
    options = device_sampling(24, device, top_k=top_k, vocab_size=LARGE, allowed=allowed)
    tokens, logprobs, _ = draw(logits, options, tiles=SamplingTiles())
    masked = torch.full((24, LARGE), -math.inf)
    for row, its_tokens in allowed.items():
        masked[row, its_tokens] = logits[row].cpu()[its_tokens]
    expected = reference_cut(masked, 1.0, top_k, 1.0)
    expected /= expected.sum(-1, keepdim=True)
    times = exponentials_RV(np.arange(24), np.zeros(24), LARGE) / expected.clamp(1e-300).numpy()
    assert tokens.tolist() == times.argmin(-1).tolist()
    drawn = expected.gather(1, tokens.cpu()[:, None])[:, 0]
    assert (logprobs.cpu() - drawn.log()).abs().max() < 1e-5


@pytest.mark.gpu
def test_frequencies_follow_the_probabilities(device):
    places = torch.arange(len(PROBS)) * 199  # in several parts of the vocabulary
    logits = torch.full((50_000, 2000), -60.0, device=device)
    logits[:, places.to(device)] = torch.tensor(PROBS, dtype=torch.float32, device=device).log()
    tokens, _, _ = draw(logits, device_sampling(50_000, device))
    assert (tokens % 199 == 0).all()
    assert_follows((tokens // 199).cpu().numpy(), PROBS)


@pytest.mark.gpu
def test_a_captured_draw_goes_on_with_the_next_index(device):
    torch.manual_seed(10)
    logits = torch.randn(3, LARGE, device=device)
    options = device_sampling(4, device, top_p=torch.tensor([1.0, 0.9, 1.0, 1.0]))
    slot_R = torch.tensor([2, 1, 3], dtype=torch.int32, device=device)
    token_R, logprob_R = torch.zeros_like(slot_R), torch.zeros(3, device=device)
    workspace = SamplingWorkspace.allocate(3, LARGE, device)
    sample_rows(logits, slot_R, options, token_R, logprob_R, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_rows(logits, slot_R, options, token_R, logprob_R, workspace)
        options.num_output_S.add_(1)
    for index in range(3):
        graph.replay()
        given = device_sampling(4, device, top_p=options.top_p_S, num_output=index)
        tokens, logprobs, _ = draw(logits, given, [2, 1, 3], tiles=SamplingTiles())
        assert torch.equal(token_R.long(), tokens) and torch.equal(logprob_R.double(), logprobs)
