"""A micro-batch's prefix tree as the tokens, head rows and outputs of one rank.

    laid = lay_out_tree(mb, tree, multiple=cp * tp, cp=cp_group)
    hidden_tD = model(laid.tokens_t, laid.positions_t, laid.attend)
    outputs_r = head(hidden_tD.index_select(0, laid.rows_r), laid.labels_r)
    outputs_T = laid.whole(outputs_r)                # as for packed sequences, on every rank

The tree is padded to a multiple of the ranks that share it (`PrefixTree.padded`) and its tokens are
sharded over cp as those of packed sequences are; attention sees the whole tree (UlyssesAttention).
Where sequences branch, one hidden state predicts several tokens, so the head gets one row per
(token, successor) pair. Sequences that share the pair share the row, and its gradient is the sum of
theirs. A rank of cp computes the rows of its own tokens, padded to the most that any rank has.

Shape legend: T tokens of the packed sequences, U of the tree, P padded, t a rank's shard of them
over cp, R rows of the head, r a rank's rows, C = cp ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from areal.api.routed_experts import ROUTED_KEY
from areal.engine.train.packing import UlyssesAttention, gather_over_ranks, own_tokens
from areal.models.common.attention import Attend
from areal.models.common.attention_tree import TreeAttention
from areal.utils.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class LaidTree:
    tokens_t: torch.Tensor
    positions_t: torch.Tensor
    attend: Attend
    routed_tLK: torch.Tensor | None  # experts to replay, of L layers with K each
    rows_r: torch.Tensor  # index of each row's hidden state among the rank's
    labels_r: torch.Tensor  # 0 at the end of a sequence, and of padding
    place_T: torch.Tensor  # index of each token's output among those of all ranks [C * r]
    cp: dist.ProcessGroup | None

    def whole(self, outputs_r: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Per-token outputs `[T]` of all sequences, on every rank."""
        if self.cp is not None:
            outputs_r = (gather_over_ranks(x_r, self.cp) for x_r in outputs_r)
        return tuple(x_R.index_select(0, self.place_T) for x_R in outputs_r)


def lay_out_tree(
    mb: dict[str, Any],
    tree: PrefixTree,
    *,
    is_critic: bool,
    multiple: int = 1,
    cp: dist.ProcessGroup | None = None,
) -> LaidTree:
    """P is a `multiple`, of cp's ranks at least. A critic has a row for each token of the tree."""
    cp = cp if cp is not None and cp.size() > 1 else None
    tokens_T = mb["input_ids"].long()
    padded = tree.padded(multiple)

    def index(places: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(places, device=tokens_T.device)

    attend = TreeAttention(padded, tokens_T.device)
    source_P = index(padded.source_U)
    # Sequences that share a token have computed it by the same experts.
    routed_T = mb.get(ROUTED_KEY)
    own_P = [tokens_T[source_P], attend.positions_T]
    own_P += [] if routed_T is None else [routed_T[source_P]]
    if cp is not None:
        own_P = [own_tokens(x_P, cp) for x_P in own_P]
    if is_critic:
        num_own = len(own_P[0])
        rows_r, labels_r, place_T = np.arange(num_own), np.full(num_own, -1), tree.place_T
    else:
        rows_r, labels_r, place_T = _head_rows(tree, len(padded), cp)
    # At a sequence's end the same label as for packed sequences.
    source_r = index(labels_r)
    labels = torch.where(source_r < 0, 0, tokens_T.index_select(0, source_r.clamp(min=0)))
    return LaidTree(
        own_P[0],
        own_P[1],
        attend if cp is None else UlyssesAttention(attend, cp),
        None if routed_T is None else own_P[2],
        index(rows_r),
        labels,
        index(place_T),
        cp,
    )


def _head_rows(
    tree: PrefixTree, num_tokens: int, cp: dist.ProcessGroup | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """This rank's rows, the input index of their labels (-1: none), and each input token's place
    among the rows of all ranks."""
    predictions = tree.predictions()
    place_R, label_R = predictions.place_R, predictions.label_source_R
    if cp is None:
        return place_R, label_R, predictions.row_T
    num_own = num_tokens // cp.size()
    owner_R = place_R // num_own
    order = np.argsort(owner_R, kind="stable")
    counts = np.bincount(owner_R, minlength=cp.size())
    most = counts.max()
    number_R = np.empty_like(order)
    number_R[order] = np.arange(len(order)) - np.repeat(counts.cumsum() - counts, counts)
    own = order[owner_R[order] == cp.rank()]
    rows_r, labels_r = np.zeros(most, dtype=np.int64), np.full(most, -1)
    rows_r[: len(own)] = place_R[own] - cp.rank() * num_own
    labels_r[: len(own)] = label_R[own]
    return rows_r, labels_r, (owner_R * most + number_R)[predictions.row_T]
