"""The sampler against hand-computed distributions, measured frequencies, and other rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from areal.engine.native.sampler import (
    SamplingOptions,
    check_bias,
    keep_top,
    sample,
    uniforms,
)


def options(num_rows: int, **changes) -> SamplingOptions:
    """Plain sampling with seed = row, and per-row arrays in place of scalars."""
    values = {"temperature": 1.0, "top_k": 10**8, "top_p": 1.0, "greedy": False, "index": 0}
    values |= {"frequency_penalty": 0.0}
    values |= {"seed": np.arange(num_rows)} | changes
    kinds = {
        "temperature": np.float64,
        "top_k": np.int64,
        "top_p": np.float64,
        "greedy": bool,
        "seed": np.uint64,
        "index": np.int64,
        "frequency_penalty": np.float64,
    }
    arrays = {
        name: np.broadcast_to(np.asarray(values[name]), (num_rows,)).astype(kind)
        for name, kind in kinds.items()
    }
    by_row = ("banned", "history", "presence_penalty", "repetition", "bias", "min_p")
    rows = {name: values.get(name, {}) for name in by_row}
    return SamplingOptions(**arrays, **rows)


def draw_many(probs: list[float], num_rows: int = 20000, **changes):
    logits = torch.tensor(probs).log().expand(num_rows, -1)
    tokens, logprobs = sample(logits, options(num_rows, **changes))
    return np.array(tokens), np.array(logprobs)


def test_frequencies_follow_the_probabilities():
    probs = [0.5, 0.3, 0.15, 0.05]
    tokens, logprobs = draw_many(probs)
    assert np.bincount(tokens) / len(tokens) == pytest.approx(probs, abs=0.012)
    assert logprobs == pytest.approx(np.log(probs)[tokens], abs=1e-6)


def test_temperature_sharpens_and_is_in_the_logprob():
    tokens, logprobs = draw_many([0.6, 0.3, 0.1], temperature=0.5)
    sharpened = np.array([0.36, 0.09, 0.01]) / 0.46
    assert np.bincount(tokens, minlength=3) / len(tokens) == pytest.approx(sharpened, abs=0.012)
    assert logprobs == pytest.approx(np.log(sharpened)[tokens], abs=1e-6)


def test_top_k_keeps_the_most_likely_and_renormalises():
    tokens, logprobs = draw_many([0.1, 0.5, 0.4], num_rows=500, top_k=2)
    assert set(tokens) == {1, 2}
    assert logprobs == pytest.approx(np.log([0, 5 / 9, 4 / 9][1:])[tokens - 1], abs=1e-6)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.49, {1}), (0.51, {1, 2}), (0.91, {0, 1, 2}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    tokens, _ = draw_many([0.08, 0.5, 0.4, 0.02], num_rows=2000, top_p=top_p)
    assert set(tokens) == kept


def test_top_p_is_of_what_top_k_left():
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    # Of {0.4, 0.3} the first is 0.571: it alone reaches 0.55, though 0.4 does not.
    kept = keep_top(probs, torch.tensor([2]), torch.tensor([0.55], dtype=torch.float64))
    assert kept.tolist() == [[0.4, 0.0, 0.0, 0.0]]


def test_top_k_breaks_ties_by_token_id():
    probs = torch.full((1, 4), 0.25, dtype=torch.float64)
    kept = keep_top(probs, torch.tensor([2]), torch.tensor([1.0], dtype=torch.float64))
    assert kept.tolist() == [[0.25, 0.25, 0.0, 0.0]]


def test_greedy_takes_the_mode_with_its_uncut_logprob():
    tokens, logprobs = draw_many([0.2, 0.7, 0.1], num_rows=20, greedy=True, top_k=1)
    assert set(tokens) == {1}
    assert logprobs == pytest.approx(math.log(0.7), abs=1e-6)


def test_banned_tokens_have_no_probability():
    tokens, logprobs = draw_many([0.8, 0.1, 0.1], num_rows=200, banned={r: [0] for r in range(200)})
    assert set(tokens) == {1, 2}
    assert logprobs == pytest.approx(math.log(0.5), abs=1e-6)


def test_frequency_penalty_is_taken_once_per_occurrence_before_the_temperature():
    logits = torch.tensor([[1.0, 2.0, 3.0]] * 4)
    given = options(
        4,
        greedy=True,
        temperature=0.5,
        frequency_penalty=[0.75, -0.5, 0.75, 0.0],
        history={0: [2, 2, 1], 1: [0, 0, 0], 2: []},
    )
    tokens, logprobs = sample(logits, given)
    assert logits.tolist() == [[1.0, 2.0, 3.0]] * 4
    adjusted = torch.tensor([[1.0, 1.25, 1.5], [2.5, 2.0, 3.0], [1, 2, 3], [1, 2, 3]])
    assert tokens == [2, 2, 2, 2]
    assert logprobs == pytest.approx((adjusted.double() / 0.5).log_softmax(-1)[:, 2].tolist())


def test_frequency_penalty_changes_which_token_is_likely_and_what_a_cut_keeps():
    tokens, logprobs = draw_many(
        [0.5, 0.3, 0.2],
        num_rows=300,
        top_k=2,
        frequency_penalty=1.0,
        history={row: [0] * 3 for row in range(300)},
    )
    assert set(tokens) == {1, 2}
    assert logprobs == pytest.approx(np.log([0.6, 0.4])[tokens - 1], abs=1e-6)


def test_a_certain_token_is_drawn_whatever_u_is():
    logits = torch.full((1000, 3), -torch.inf)
    logits[:, 1] = 0.0
    tokens, logprobs = sample(logits, options(1000))
    assert set(tokens) == {1} and set(logprobs) == {0.0}


def test_rows_do_not_touch_each_other_and_chunks_change_nothing():
    torch.manual_seed(0)
    logits = torch.randn(64, 37)
    rng = np.random.default_rng(0)
    given = options(
        64,
        temperature=rng.uniform(0.3, 2, 64),
        top_k=rng.integers(1, 60, 64),
        top_p=rng.choice([0.5, 0.9, 1.0], 64),
        greedy=rng.random(64) < 0.2,
        index=rng.integers(0, 99, 64),
        banned={3: [1, 2], 40: [7]},
        frequency_penalty=rng.uniform(-2, 2, 64),
        history={row: rng.integers(0, 37, 20).tolist() for row in (3, 9, 63)},
    )
    together = sample(logits, given)
    assert sample(logits, given, max_chunk_elements=37) == together  # one row at a time
    assert sample(logits, given, max_chunk_elements=5 * 37) == together


def test_uniforms_are_a_function_of_seed_and_index():
    seeds = np.array([0, 1, 2**64 - 1, 5], np.uint64)
    first = uniforms(seeds, np.arange(4))
    assert (first == uniforms(seeds, np.arange(4))).all()
    assert first[3] == uniforms(np.array([5], np.uint64), np.array([3]))[0]


@pytest.mark.parametrize("vary", ["seed", "index"])
def test_uniforms_look_uniform_along_seeds_and_along_indices(vary):
    count = 20000
    seed = np.arange(count, dtype=np.uint64) if vary == "seed" else np.full(count, 7, np.uint64)
    index = np.arange(count) if vary == "index" else np.zeros(count, np.int64)
    u = uniforms(seed, index)
    assert u.min() >= 0 and u.max() < 1
    assert np.histogram(u, 20, (0, 1))[0] == pytest.approx(count / 20, abs=150)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03


def distribution(logits: list[float], **changes) -> np.ndarray:
    """What `sample` draws one row from, measured token by token: the log-probabilities it gives."""
    num_rows = 4000
    seeds = {"seed": np.arange(num_rows)}
    rows = {
        name: {r: changes[name][0] for r in range(num_rows)} for name in changes if name in ROWS
    }
    plain = {name: value for name, value in changes.items() if name not in ROWS}
    logits_RV = torch.tensor(logits).expand(num_rows, -1)
    tokens, logprobs = sample(logits_RV, options(num_rows, **seeds, **rows, **plain))
    found = np.full(len(logits), -np.inf)
    for token, logprob in zip(tokens, logprobs, strict=True):
        found[token] = logprob
    return found


ROWS = ("history", "presence_penalty", "repetition", "bias", "min_p")


def log_softmax(logits: list[float]) -> np.ndarray:
    return torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1).numpy()


def test_penalties_and_bias_by_hand():
    logits = [1.0, 0.5, -0.5, 0.0]
    once_each = distribution(logits, history=[[1, 1, 2]], presence_penalty=[0.25])
    assert once_each == pytest.approx(log_softmax([1.0, 0.25, -0.75, 0.0]))
    both = distribution(logits, history=[[1, 1, 2]], presence_penalty=[0.25], frequency_penalty=0.5)
    assert both == pytest.approx(log_softmax([1.0, -0.75, -1.25, 0.0]))
    repeated = distribution(logits, repetition=[(2.0, [0, 0, 2, 3])])
    assert repeated == pytest.approx(log_softmax([0.5, 0.5, -1.0, 0.0]))
    biased = distribution(logits, bias=[{0: -1.5, 3: 1.0}])
    assert biased == pytest.approx(log_softmax([-0.5, 0.5, -0.5, 1.0]))
    # A bias comes before the repetition penalty, the temperature after both.
    all_of_them = distribution(
        logits, bias=[{0: -1.5}], repetition=[(2.0, [0])], history=[[0]], presence_penalty=[1.0],
        temperature=2.0,
    )  # fmt: skip
    assert all_of_them == pytest.approx(log_softmax([-1.0, 0.25, -0.25, 0.0]))


def test_min_p_keeps_what_is_near_the_most_likely_token():
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.log(probs).tolist()
    kept = distribution(logits, min_p=[0.2])
    assert kept[:3] == pytest.approx(np.log(probs[:3] / 0.95)) and kept[3] == -np.inf
    # top-p counts what min-p has left, of which the first two are 0.842.
    assert np.isfinite(distribution(logits, top_p=0.83)).sum() == 3
    both = distribution(logits, min_p=[0.2], top_p=0.83)
    assert both[:2] == pytest.approx(np.log(probs[:2] / 0.8)) and np.isinf(both[2:]).all()
    logits_1V = torch.tensor(probs).log()[None]
    tokens, logprobs = sample(logits_1V, options(1, greedy=True, min_p={0: 0.9}))
    assert tokens == [0] and logprobs == pytest.approx([np.log(0.5)]), "greedy rows are not cut"


def test_parity_with_the_processors_of_transformers():
    from transformers.generation import logits_process as hf

    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, 12).round(3).tolist()
    seen = rng.integers(0, 12, 9).tolist()
    scores, ids = torch.tensor([logits], dtype=torch.float64), torch.tensor([seen])
    expected = hf.SequenceBiasLogitsProcessor([[[4], 2.5], [[7], -1.0]])(ids, scores)
    expected = hf.RepetitionPenaltyLogitsProcessor(1.7)(ids, expected)
    expected = hf.TemperatureLogitsWarper(1.3)(ids, expected)
    expected = hf.MinPLogitsWarper(0.05)(ids, expected)
    found = distribution(
        logits, bias=[{4: 2.5, 7: -1.0}], repetition=[(1.7, seen)], temperature=1.3, min_p=[0.05]
    )
    drawn = np.isfinite(found)
    assert drawn.sum() > 2
    wanted = torch.log_softmax(expected, -1)[0].numpy()
    assert found[drawn] == pytest.approx(wanted[drawn])
    assert not np.isfinite(found[~np.isfinite(wanted)]).any()


def test_a_bias_names_tokens_of_the_vocabulary():
    check_bias({"7": 1.0}, 8)
    with pytest.raises(ValueError, match=r"logit_bias must name tokens .* below 8, got 8"):
        check_bias({"8": 1.0}, 8)
    with pytest.raises(ValueError, match=r"logit_bias takes at most 1024 tokens, got 1025"):
        check_bias(dict.fromkeys(map(str, range(1025)), 1.0), 5000)
