"""What a decoder says of each token of a packed micro-batch, on one rank or on a mesh.

    logprobs_T, entropy_T = token_outputs(model, mb, config, mesh)     # or (values_T,) of a critic

On a mesh, the ranks of the axes cp and tp call with the same micro-batch and all get the outputs of
all its tokens. A micro-batch is padded to a multiple of cp * tp and cut over cp (token_layout.py);
inside the model also over tp (models/parallelize.py). Its two halves, `pack_micro_batch` and
`outputs_of`, are what a pipeline needs.

Shape legend: T tokens of the micro-batch, t a rank's part of them over cp, D model dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from areal.api.config.train_engine import TrainEngineConfig
from areal.engine.train.invariant_attention import InvariantPackedAttention
from areal.engine.train.logprobs import VocabPart, next_token_logprobs
from areal.engine.train.token_layout import LaidOut, pack_rows
from areal.models.common.attention_varlen import PackedAttention
from areal.models.common.decoder import Decoder
from areal.models.parallel_dims import ParallelMesh
from areal.models.parallelize import gather_tokens


def token_outputs(
    model: Decoder, mb: dict[str, Any], config: TrainEngineConfig, mesh: ParallelMesh | None
) -> tuple[torch.Tensor, ...]:
    """log p of the next token and entropy, `[T]`, or a critic's values `[T]`.

    At a sequence's last token, log p and entropy are junk.
    """
    laid = pack_micro_batch(mb, config, mesh)
    hidden_tD = model(laid.tokens_t, laid.positions_t, laid.attend)
    return outputs_of(model, hidden_tD, laid, config, mesh)


def pack_micro_batch(
    mb: dict[str, Any],
    config: TrainEngineConfig,
    mesh: ParallelMesh | None,
    *,
    min_tokens: int = 0,
) -> LaidOut:
    """`mb` as this rank's tokens; on a mesh padded, also to `min_tokens`."""
    packed = InvariantPackedAttention if config.batch_invariant else PackedAttention
    if mesh is None:
        return pack_rows(mb, packed=packed)
    return pack_rows(
        mb,
        multiple=mesh["cp_tp"].size(),
        cp=mesh.get_group("cp"),
        min_tokens=min_tokens,
        packed=packed,
    )


def outputs_of(
    model: Decoder,
    hidden_tD: torch.Tensor,
    laid: LaidOut,
    config: TrainEngineConfig,
    mesh: ParallelMesh | None,
) -> tuple[torch.Tensor, ...]:
    """What `token_outputs` returns, from the hidden states after the last norm."""
    return laid.whole(head_outputs(model, hidden_tD, laid.labels_t, config, mesh))


def head_outputs(
    model: Decoder,
    hidden_TD: torch.Tensor,
    labels_T: torch.Tensor,
    config: TrainEngineConfig,
    mesh: ParallelMesh | None,
) -> tuple[torch.Tensor, ...]:
    if isinstance(hidden_TD, DTensor):  # cut over tp
        hidden_TD = gather_tokens(hidden_TD, partial_grad=not config.is_critic)
    if config.is_critic:
        return (model.values(hidden_TD),)
    weight, part = model.output_weight, None
    if mesh is not None and isinstance(weight, DTensor):
        weight = weight.to_local()
        part = VocabPart(len(weight) * mesh["tp"].get_local_rank(), mesh.get_group("tp"))
    return next_token_logprobs(
        hidden_TD,
        weight,
        labels_T,
        temperature=config.temperature,
        logit_softcap=model.args.logit_softcap,
        chunk_size=config.logprobs_chunk_size,
        batch_invariant=config.batch_invariant,
        part=part,
    )
