"""A run whose rewards never differ says so, and why it matters."""

from __future__ import annotations

import logging

import pytest
import torch

from areal.api.io_struct import EPISODE_KEY
from areal.trainer.episodes import RewardSpread


def groups(*rewards: list[float]) -> list[dict[str, torch.Tensor]]:
    return [{"rewards": torch.tensor(group)} for group in rewards]


def test_share_of_the_groups_with_different_rewards():
    spread = RewardSpread()
    assert spread.share(groups([0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.5, 1.0])) == 0.5
    assert spread.share(groups([0.0, 0.0], [1.0, 1.0])) == 0
    # One sample a prompt: there is a batch to compare with.
    assert spread.share(groups([0.0], [1.0])) == 1
    assert spread.share(groups([1.0], [1.0])) == 0


def test_rewards_are_those_of_the_workflow():
    """Normalised ones differ by rounding at most where the workflow's are equal."""
    group = {"rewards": torch.tensor([0.0, 1e-8]), "original_rewards": torch.tensor([1.0, 1.0])}
    assert RewardSpread().share([group]) == 0


def test_rows_of_one_episode_are_one_sample():
    """An agent's requests may have rewards of their own; the estimator compares episodes."""
    group = {"rewards": torch.tensor([0.0, 1.0, 1.0, 0.0]), EPISODE_KEY: torch.tensor([0, 0, 1, 1])}
    assert RewardSpread().share([group]) == 0
    group[EPISODE_KEY] = torch.tensor([0, 1, 1, 0])
    assert RewardSpread().share([group]) == 1


@pytest.mark.parametrize(
    ("rewards", "found"), [(([0.0] * 4, [0.0] * 4), "all 0"), (([0.0] * 4, [1.0] * 4), "equal")]
)
def test_says_so_after_a_while_and_then_seldom(caplog, rewards, found):
    spread = RewardSpread(patience=3)
    with caplog.at_level(logging.WARNING, logger="areal"):
        warned = []
        for step in range(1, 13):
            spread.share(groups(*rewards))
            if len(caplog.records) > len(warned):
                warned.append(step)
    assert warned == [3, 6, 12]
    assert "learns nothing" in caplog.text and found in caplog.text


def test_a_difference_begins_the_count_anew(caplog):
    spread = RewardSpread(patience=3)
    with caplog.at_level(logging.WARNING, logger="areal"):
        for _ in range(5):
            spread.share(groups([0.0, 0.0]))
            spread.share(groups([0.0, 0.0]))
            spread.share(groups([0.0, 1.0]))
    assert not caplog.records
