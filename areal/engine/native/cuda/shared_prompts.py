"""Which rows of a decode step read their prompt together: decided on the host, held on the device.

The samples of a prompt share its pages. If each decode row reads them alone, the L2 cache serves
most of it while siblings run concurrently, but not reading is faster still: 512 rows, 16 per prompt
of 2048 tokens, K = 2, H = 128, read 1.07 GB per layer, of which 67 MB are distinct. So if it saves
enough, rows of one prompt form bundles, and `prompt_attention` reads the prompt once per bundle.
`share_prompts` decides before a launch; `SharedPrompts` are the tensors that a captured graph
reads, `PromptSpace` holds partial results for the rows. A prompt is cut into parts, so that few
prompts fill the device.

Shapes: R rows, B bundles, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from areal.engine.native.cuda.attention_tiles import MAX_SUMS, padded
from areal.engine.native.cuda.device import Device, device_of

PROMPT_TILE = 64  # keys; shared lengths are multiples of it
_MAX_PARTS = 16  # a row folds them sequentially
_MIN_SHARERS = 4  # rows of a bundle
# Per layer and multiprocessor. On an H200 a launch costs 17 us more, and saves 1 us per 8.5 MB.
MIN_SAVED_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention shapes of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def pairs(self) -> int:
        """Per program: a power of two; fewer in float32, which has no tensor-core product, and for
        heads of more than 256."""
        return min(128 if self.dtype.itemsize == 2 else 64, MAX_SUMS // padded(self.head_dim))

    @property
    def rows_of_bundle(self) -> int:
        return self.pairs * self.num_kv_heads // self.num_heads

    def can_share(self, device: Device) -> bool:
        """Whether half a program's rows are at least _MIN_SHARERS, and its queries and a tile of
        keys and values fit into shared memory."""
        row_bytes = padded(self.head_dim) * self.dtype.itemsize
        fits = (self.pairs + 2 * PROMPT_TILE) * row_bytes <= device.program_bytes
        return fits and self.rows_of_bundle >= 2 * _MIN_SHARERS

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in a layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PromptSpace:
    """Partial results of prompts for decode rows; one serves all launches of a stream."""

    acc: torch.Tensor  # [X, H] float32, X: (row, key/value head, part, query head of the group)
    score_max: torch.Tensor  # [X] float32
    weight_sum: torch.Tensor  # [X] float32
    heads: Heads
    most_items: int  # (bundle, part) pairs that fill the device, a program per multiprocessor
    min_saved_bytes: int  # per layer, below which prompts are not read together
    num_pairs: int  # capacity in (row, part) pairs

    @classmethod
    def make(cls, max_rows: int, heads: Heads, device: torch.device) -> PromptSpace:
        num_processors = device_of(device).num_processors
        most_items = max(1, num_processors // heads.num_kv_heads)
        num_pairs = max(max_rows, heads.rows_of_bundle * most_items)
        acc = torch.empty(
            num_pairs * heads.num_heads, heads.head_dim, dtype=torch.float32, device=device
        )
        score_max, weight_sum = acc.new_empty(2, len(acc))
        min_saved_bytes = MIN_SAVED_BYTES * num_processors
        return cls(acc, score_max, weight_sum, heads, most_items, min_saved_bytes, num_pairs)


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Which rows of a step read how many tokens together; int32 on the device."""

    flat: torch.Tensor  # storage of all others, for a single copy
    shared_R: torch.Tensor  # leading tokens read by the bundle, a multiple of PROMPT_TILE
    member_R: torch.Tensor  # rows, grouped by bundle
    bundle_B2: torch.Tensor  # first of member_R, number of rows
    counts: torch.Tensor  # bundles, parts of a prompt
    space: PromptSpace

    @classmethod
    def make(cls, num_rows: int, space: PromptSpace) -> SharedPrompts:
        """For a step of `num_rows` rows, initially without sharing."""
        sizes = _flat_sizes(num_rows)
        flat = torch.zeros(sum(sizes), dtype=torch.int32, device=space.acc.device)
        shared_R, member_R, bundles, counts = flat.split(sizes)
        return cls(flat, shared_R, member_R, bundles.view(-1, 2), counts, space)


def _flat_sizes(num_rows: int) -> list[int]:
    return [num_rows, num_rows, 2 * (num_rows // _MIN_SHARERS), 2]


def share_prompts(
    last_page: np.ndarray, prompt: np.ndarray, num_rows: int, space: PromptSpace
) -> np.ndarray | None:
    """Content of `SharedPrompts.flat` for a step of `num_rows` rows; None if not worthwhile.

    Inputs per row that is not padding: the last of its leading pages that may be shared, equal for
    rows that share all of them, and the number of tokens in these.
    """
    heads, groups = space.heads, _groups(last_page, prompt)
    saved = sum((len(rows) - 1) * tokens for rows, tokens in groups)
    if saved * heads.token_bytes < space.min_saved_bytes:
        return None
    flat = np.zeros(sum(_flat_sizes(num_rows)), np.int32)
    shared_R, member_R, bundle_2B, counts = np.split(flat, np.cumsum(_flat_sizes(num_rows))[:-1])
    bundles, end = [], 0
    for rows, tokens in groups:
        shared_R[rows] = tokens
        for bundle in np.array_split(rows, -(-len(rows) // heads.rows_of_bundle)):
            bundles.append((end, len(bundle)))
            member_R[end : end + len(bundle)] = bundle
            end += len(bundle)
    bundle_2B[: 2 * len(bundles)] = np.ravel(bundles)
    parts = min(_MAX_PARTS, space.most_items // len(bundles), space.num_pairs // num_rows)
    counts[:] = len(bundles), max(1, parts)
    return flat


def _groups(last_page: np.ndarray, prompt: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """Rows that may read their prompt together, and how many tokens of it."""
    order = np.argsort(last_page, kind="stable")
    edges = np.flatnonzero(np.diff(last_page[order])) + 1
    groups = ((rows, int(prompt[rows[0]])) for rows in np.split(order, edges))
    return [
        (rows, tokens // PROMPT_TILE * PROMPT_TILE)
        for rows, tokens in groups
        if len(rows) >= _MIN_SHARERS and tokens >= PROMPT_TILE
    ]
