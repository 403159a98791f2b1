"""What a decoder says of each token of a packed micro-batch, on one rank or on a mesh.

    logprobs_T, entropy_T = token_outputs(model, mb, config, mesh)     # or (values_T,) of a critic

On a mesh, the ranks of the axes cp and tp call with the same micro-batch and all get the outputs of
all its tokens. Tokens are padded to a multiple of cp * tp by a sequence of their own, so that each
rank has as many, and cut over cp; inside the model also over tp (models/parallelize.py).

Shape legend: T tokens of the micro-batch, P padded, t a rank's part of them over cp, D model dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from areal.api.config.train_engine import TrainEngineConfig
from areal.engine.invariant_attention import InvariantPackedAttention
from areal.engine.logprobs import VocabPart, next_token_logprobs
from areal.engine.ulysses import UlyssesAttention, gather_over_ranks, own_tokens
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
    packed = InvariantPackedAttention if config.batch_invariant else PackedAttention
    tokens_T, cu_seqlens = mb["input_ids"].long(), mb["cu_seqlens"]
    if mesh is None:
        attend = packed(cu_seqlens, mb["max_seqlen"])
        hidden_TD = model(tokens_T, attend.positions_T, attend)
        return head_outputs(model, hidden_TD, _next_tokens(tokens_T, cu_seqlens), config, None)
    cp, num_tokens = mesh.get_group("cp"), len(tokens_T)
    tokens_P, cu_seqlens = _pad(tokens_T, cu_seqlens, mesh["cp_tp"].size())
    attend = packed(cu_seqlens, max(mb["max_seqlen"], len(tokens_P) - num_tokens))
    labels_P, positions_P = _next_tokens(tokens_P, cu_seqlens), attend.positions_T
    if cp.size() == 1:
        hidden_PD = model(tokens_P, positions_P, attend)
        outputs = head_outputs(model, hidden_PD, labels_P, config, mesh)
    else:
        tokens_t, positions_t, labels_t = (
            own_tokens(x_P, cp) for x_P in (tokens_P, positions_P, labels_P)
        )
        hidden_tD = model(tokens_t, positions_t, UlyssesAttention(attend, cp))
        outputs_t = head_outputs(model, hidden_tD, labels_t, config, mesh)
        outputs = tuple(gather_over_ranks(x_t, cp) for x_t in outputs_t)
    return tuple(x_P[:num_tokens] for x_P in outputs)


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
    if isinstance(weight, DTensor):
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


def _next_tokens(tokens_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    labels_T = tokens_T.roll(-1)
    # Junk that does not depend on which sequence happens to come next.
    labels_T[cu_seqlens[1:].long() - 1] = 0
    return labels_T


def _pad(
    tokens_T: torch.Tensor, cu_seqlens: torch.Tensor, multiple: int
) -> tuple[torch.Tensor, torch.Tensor]:
    missing = -len(tokens_T) % multiple
    if not missing:
        return tokens_T, cu_seqlens
    return F.pad(tokens_T, (0, missing)), torch.cat([cu_seqlens, cu_seqlens[-1:] + missing])
