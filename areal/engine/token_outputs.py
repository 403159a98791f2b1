"""What a decoder says of each token of a packed micro-batch, on one rank or on a mesh.

    logprobs_T, entropy_T = token_outputs(model, mb, config, mesh)     # or (values_T,) of a critic

On a mesh, the ranks of the axes cp and tp call with the same micro-batch and all get the outputs of
all its tokens. A micro-batch is padded to a multiple of cp * tp by its own sequences again, so that
each rank has as many tokens, and cut over cp; inside the model also over tp
(models/parallelize.py). Its two halves, `lay_out` and `outputs_of`, are what a pipeline needs.

Shape legend: T tokens of the micro-batch, P padded, t a rank's part of them over cp, D model dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from areal.api.config.train_engine import TrainEngineConfig
from areal.engine.invariant_attention import InvariantPackedAttention
from areal.engine.logprobs import VocabPart, next_token_logprobs
from areal.engine.ulysses import UlyssesAttention, gather_over_ranks, own_tokens
from areal.models.common.attention import Attend
from areal.models.common.attention_varlen import PackedAttention
from areal.models.common.decoder import Decoder
from areal.models.parallel_dims import ParallelMesh
from areal.models.parallelize import gather_tokens


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A micro-batch as this rank computes it."""

    tokens_t: torch.Tensor
    positions_t: torch.Tensor
    labels_t: torch.Tensor  # the next tokens
    attend: Attend
    num_tokens: int  # T


def token_outputs(
    model: Decoder, mb: dict[str, Any], config: TrainEngineConfig, mesh: ParallelMesh | None
) -> tuple[torch.Tensor, ...]:
    """log p of the next token and entropy, `[T]`, or a critic's values `[T]`.

    At a sequence's last token, log p and entropy are junk.
    """
    laid = lay_out(mb, config, mesh)
    hidden_tD = model(laid.tokens_t, laid.positions_t, laid.attend)
    return outputs_of(model, hidden_tD, laid, config, mesh)


def lay_out(
    mb: dict[str, Any],
    config: TrainEngineConfig,
    mesh: ParallelMesh | None,
    *,
    min_tokens: int = 0,
) -> LaidOut:
    """`mb` as this rank's tokens; on a mesh padded, also to `min_tokens`."""
    packed = InvariantPackedAttention if config.batch_invariant else PackedAttention
    tokens_T, cu_seqlens = mb["input_ids"].long(), mb["cu_seqlens"]
    num_tokens = len(tokens_T)
    if mesh is None:
        attend = packed(cu_seqlens, mb["max_seqlen"])
        labels_T = _next_tokens(tokens_T, cu_seqlens)
        return LaidOut(tokens_T, attend.positions_T, labels_T, attend, num_tokens)
    tokens_P, cu_seqlens = _pad(tokens_T, cu_seqlens, min_tokens, mesh["cp_tp"].size())
    attend = packed(cu_seqlens, mb["max_seqlen"])
    labels_P = _next_tokens(tokens_P, cu_seqlens)
    cp = mesh.get_group("cp")
    if cp.size() == 1:
        return LaidOut(tokens_P, attend.positions_T, labels_P, attend, num_tokens)
    tokens_t, positions_t, labels_t = (
        own_tokens(x_P, cp) for x_P in (tokens_P, attend.positions_T, labels_P)
    )
    return LaidOut(tokens_t, positions_t, labels_t, UlyssesAttention(attend, cp), num_tokens)


def outputs_of(
    model: Decoder,
    hidden_tD: torch.Tensor,
    laid: LaidOut,
    config: TrainEngineConfig,
    mesh: ParallelMesh | None,
) -> tuple[torch.Tensor, ...]:
    """What `token_outputs` returns, from the hidden states after the last norm."""
    outputs = head_outputs(model, hidden_tD, laid.labels_t, config, mesh)
    if mesh is not None and mesh["cp"].size() > 1:
        outputs = tuple(gather_over_ranks(x_t, mesh.get_group("cp")) for x_t in outputs)
    return tuple(x_P[: laid.num_tokens] for x_P in outputs)


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
    tokens_T: torch.Tensor, cu_seqlens: torch.Tensor, min_tokens: int, multiple: int
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens = -(-max(min_tokens, len(tokens_T)) // multiple) * multiple
    if num_tokens == len(tokens_T):
        return tokens_T, cu_seqlens
    # With equal sequences, much padding does not change which experts are in demand, nor does it
    # make one sequence so long that attention takes more time than for the others.
    num_copies = -(-num_tokens // len(tokens_T))
    offsets = torch.arange(num_copies, device=cu_seqlens.device) * len(tokens_T)
    starts = (offsets[:, None] + cu_seqlens[:-1]).flatten()
    bounds = torch.cat([starts[starts < num_tokens], offsets.new_tensor([num_tokens])])
    return tokens_T.repeat(num_copies)[:num_tokens], bounds
