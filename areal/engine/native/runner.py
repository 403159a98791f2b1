"""The runner interface: prefill prompts, draw tokens, several steps at a time, or after drafts.

The engine (engine.py) schedules; a runner computes. Two exist: `TorchRunner` (torch_runner.py) for
any device, one step at a time, and `CudaRunner` (cuda/runner.py), whose steps are CUDA graphs that
run ahead of the host. The engine's code is the same for both, given a runner's limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from areal.engine.native.kv_cache import StateSpan
from areal.models.vision.tower import Images, Sight

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one prompt (or output, after a preemption) to compute and cache."""

    tokens: list[int] | tuple[int, ...]
    start: int  # position of the first of them
    pages: list[int]  # of positions 0 .. start + len(tokens) - 1, at least
    adapter: int = 0  # its number (adapters.py)
    states: StateSpan = StateSpan()  # of a model with recurrent layers
    # With images: rotary positions [n] or [3, n], which are else those from `start` on; embeddings
    # of image tokens, each from which of `tokens` on.
    positions: np.ndarray | None = None
    sights: Sequence[tuple[Sight, int]] = ()
    # The last position that each token sees, where it is not its own: all of an image is in the
    # cache or among `tokens`.
    last_visible: np.ndarray | None = None


def joined_sights(chunks: Sequence[Chunk]) -> tuple[Sight, np.ndarray] | None:
    """All of their sights as one, and the row of each embedding when the chunks' rows follow each
    other; None without any."""
    sights, rows, num_before = [], [], 0
    for chunk in chunks:
        for sight, first in chunk.sights:
            sights.append(sight)
            rows.append(np.arange(len(sight)) + num_before + first)
        num_before += len(chunk.tokens)
    return (Sight.concat(sights), np.concatenate(rows)) if sights else None


class Drawn(Protocol):
    """Tokens drawn by a launch, possibly still being computed."""

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probabilities, per row and step. Waits for the device."""
        ...


@dataclass(frozen=True, slots=True)
class Computed:
    """Drawn tokens of each row, already computed."""

    tokens: list[list[int]]
    logprobs: list[list[float]]

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        return self.tokens, self.logprobs


class Runner(Protocol):
    """Slots are rows of the scheduler's SlotTable, which is up to date when a method is called."""

    steps_per_launch: int  # most tokens per row of one `decode`
    launches_ahead: int  # launches in flight while the host reads an earlier one
    max_prefill_tokens: int  # most tokens of one `prefill`
    # Identities of the weights whose products can have adapters by row; None: all.
    adapted_weights: frozenset[int] | None

    def draft_length(self, num_rows: int) -> int:
        """Most drafted tokens of each slot that `verify` takes; 0: none."""
        ...

    def draft_cost(self, slots: np.ndarray, length: int) -> float:
        """Of a `verify` of so many drafted tokens each, in steps of `decode`: an estimate from
        shapes alone, so that the ranks of one engine agree."""
        ...

    def look(self, images: Images) -> Sight:
        """What the model's vision tower makes of images, in the order of launches."""
        ...

    def prefill(self, chunks: list[Chunk]) -> torch.Tensor:
        """Cache the chunks' keys and values; hidden states [C, D] of their last tokens."""
        ...

    def draw(self, slots: np.ndarray, hidden: list[torch.Tensor]) -> Drawn:
        """One token for each slot, from the hidden state [D] of its last cached token."""
        ...

    def decode(self, slots: np.ndarray, num_steps: int) -> Drawn:
        """`num_steps` tokens for each slot, one after the other, each cached before the next."""
        ...

    def verify(self, slots: np.ndarray, drafts: list[list[int]]) -> Drawn:
        """One token for each slot, and one more after each drafted token that was drawn."""
        ...

    def copy_pages(self, sources: list[int], targets: list[int]) -> None: ...

    def copy_states(self, sources: list[int], targets: list[int]) -> None:
        """Of a model with recurrent layers."""
        ...

    def routed_experts(self, pages: list[int], num_tokens: int) -> np.ndarray:
        """The experts of the first tokens in `pages` (expert_cache.py), of a model that has some.
        Waits for the device."""
        ...

    def load(self, model_weights: list[tuple[str, torch.Tensor]]) -> None:
        """Copy checked weights into the model, after everything launched before."""
        ...
