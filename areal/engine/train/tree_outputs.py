"""What a decoder says of each token of a micro-batch whose common prefixes are computed once.

    logprobs_T, entropy_T = tree_outputs(model, mb, tree, config, mesh)    # or (values_T,)

In and out are packed sequences, as in token_outputs.py: a loss function notices nothing. Between,
the model sees the tree. Where sequences part, one hidden state predicts several tokens, so the LM
head takes a row for each pair of a token and its successor; sequences that share the pair share the
row, and its gradient is the sum of theirs.

Shape legend: T tokens of the micro-batch, U of its tree, R rows of the head, D model dim.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from areal.api.config.train_engine import TrainEngineConfig
from areal.engine.train.token_outputs import head_outputs
from areal.models.common.attention_tree import TreeAttention
from areal.models.common.decoder import Decoder
from areal.models.parallel_dims import ParallelMesh
from areal.utils.prefix_tree import PrefixTree


def tree_outputs(
    model: Decoder,
    mb: dict[str, Any],
    tree: PrefixTree,
    config: TrainEngineConfig,
    mesh: ParallelMesh | None,
) -> tuple[torch.Tensor, ...]:
    """As `token_outputs`. A mesh has no axis but data parallelism."""
    tokens_T = mb["input_ids"].long()
    device = tokens_T.device

    def index(places: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(places, device=device)

    attend = TreeAttention(tree, device)
    tokens_U = tokens_T.index_select(0, index(tree.source_U))
    hidden_UD = model(tokens_U, attend.positions_T, attend)
    if config.is_critic:
        (values_U,) = head_outputs(model, hidden_UD, tokens_U, config, mesh)
        return (values_U.index_select(0, index(tree.place_T)),)
    predictions = tree.predictions()
    hidden_RD = hidden_UD.index_select(0, index(predictions.place_R))
    source_R = index(predictions.label_source_R)
    # At a sequence's end the same junk as of packed sequences.
    labels_R = torch.where(source_R < 0, 0, tokens_T.index_select(0, source_R.clamp(min=0)))
    row_T = index(predictions.row_T)
    outputs_R = head_outputs(model, hidden_RD, labels_R, config, mesh)
    return tuple(x_R.index_select(0, row_T) for x_R in outputs_R)
