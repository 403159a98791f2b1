"""Packed micro-batches through a decoder: token layout, context parallelism, per-token outputs.

    logprobs_T, entropy_T = token_outputs(model, mb, config, mesh)     # or (values_T,) of a critic

Context parallelism (`UlyssesAttention`): each of cp ranks holds T / cp consecutive tokens. For
attention the ranks exchange them, so that each gets all T tokens of N / cp heads, and exchange the
outputs back: two all-to-alls per layer, forward and backward each.

Layout (`pack_rows`): a micro-batch is padded to a multiple of cp * tp and sharded over cp; inside
the model also over tp (models/parallelize.py). Padding repeats the micro-batch's own sequences and
never reaches an output.

Outputs (`token_outputs`): cp and tp ranks call with the same micro-batch and all get the outputs of
all its tokens. A pipeline uses its two halves, `pack_micro_batch` and `outputs_of`.

Prefix trees, which compute shared prefixes of sequences once: tree_packing.py.

Shape legend: T tokens of the micro-batch, P padded, t a rank's shard of them over cp, N query
heads, K key-value heads, n and k a rank's shard of them in attention, H head dim, C = cp ranks,
D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from areal.api.config.train_engine import TrainEngineConfig
from areal.api.routed_experts import ROUTED_KEY
from areal.engine.invariant_attention import InvariantPackedAttention
from areal.engine.train.images import FrozenSights, MicroImages
from areal.engine.train.logprobs import VocabPart, next_token_logprobs
from areal.models.common.attention import Attend, AttentionSpec, PackedAttention
from areal.models.common.decoder import Decoder
from areal.models.common.image_attention import ImageAttention
from areal.models.common.layer_trace import trace_forward
from areal.models.common.moe import replay_experts
from areal.models.parallel_dims import ParallelMesh
from areal.models.parallelize import gather_tokens
from areal.utils.device import CPU_TILE


class UlyssesAttention:
    """`attend` for T / cp tokens, built on an `attend` for all T with a shard of the heads."""

    def __init__(self, attend: Attend, group: dist.ProcessGroup) -> None:
        self._attend = attend
        self._group = group

    def __call__(
        self, spec: AttentionSpec, q_tNH: torch.Tensor, k_tKH: torch.Tensor, v_tKH: torch.Tensor
    ) -> torch.Tensor:
        num_ranks = self._group.size()
        if k_tKH.shape[1] % num_ranks:
            # Fewer key-value heads than ranks: neighbouring ranks get the same one.
            copies = num_ranks // k_tKH.shape[1]
            k_tKH, v_tKH = (x.repeat_interleave(copies, dim=1) for x in (k_tKH, v_tKH))
        q_TnH, k_TkH, v_TkH = (self._all_tokens(x) for x in (q_tNH, k_tKH, v_tKH))
        return self._all_heads(self._attend(spec, q_TnH, k_TkH, v_TkH))

    def _all_tokens(self, x_tNH: torch.Tensor) -> torch.Tensor:
        x_CtnH = x_tNH.unflatten(1, (self._group.size(), -1)).transpose(0, 1)
        return _Exchange.apply(x_CtnH, self._group).flatten(0, 1)

    def _all_heads(self, x_TnH: torch.Tensor) -> torch.Tensor:
        x_CtnH = x_TnH.unflatten(0, (self._group.size(), -1))
        return _Exchange.apply(x_CtnH, self._group).transpose(0, 1).flatten(1, 2)


def own_tokens(x_T: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's T / cp tokens; T must be a multiple of the ranks."""
    return x_T.chunk(group.size())[group.rank()]


def gather_over_ranks(x_t: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[T] on every rank. Backward keeps only the own slice, so all ranks must use it alike."""
    return _Gather.apply(x_t, group)


class _Exchange(torch.autograd.Function):
    """All-to-all: slice i of dimension 0 goes to rank i; slice i of the result is from rank i."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return _Exchange.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_t: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        x_T = x_t.new_empty(group.size() * len(x_t), *x_t.shape[1:])
        dist.all_gather_into_tensor(x_T, x_t.contiguous(), group=group)
        return x_T

    @staticmethod
    def backward(ctx, grad_T: torch.Tensor):
        return own_tokens(grad_T, ctx.group), None


@dataclass(frozen=True, slots=True)
class LaidOut:
    tokens_t: torch.Tensor
    positions_t: torch.Tensor  # [3, t] of models with M-RoPE that see images
    labels_t: torch.Tensor  # the next tokens; 0 at the end of a sequence
    attend: Attend
    num_tokens: int  # T
    cp: dist.ProcessGroup | None  # None: t is P
    routed_tLK: torch.Tensor | None  # experts to replay, of L layers with K each
    images: MicroImages | None = None  # for the tokens t

    def whole(self, outputs_t: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Per-token outputs `[T]` of all tokens, on every rank."""
        outputs_P = outputs_t
        if self.cp is not None:
            outputs_P = (gather_over_ranks(x_t, self.cp) for x_t in outputs_t)
        return tuple(x_P[: self.num_tokens] for x_P in outputs_P)


def pack_rows(
    mb: dict[str, Any],
    *,
    multiple: int = 1,
    cp: dist.ProcessGroup | None = None,
    min_tokens: int = 0,
    packed: Callable[[torch.Tensor, int], PackedAttention] = PackedAttention,
    images: MicroImages | None = None,
) -> LaidOut:
    """P is a `multiple` (of cp's ranks at least), and `min_tokens` or more."""
    tokens_T = mb["input_ids"].long()
    tokens_P, cu_seqlens = _pad(tokens_T, mb["cu_seqlens"], min_tokens, multiple)
    routed_P = None if ROUTED_KEY not in mb else _repeat(mb[ROUTED_KEY], len(tokens_P))
    causal = packed(cu_seqlens, mb["max_seqlen"])
    positions_P, attend = causal.positions_T, causal  # positions [P, 3] where there are three
    if images is not None and images.blocks:
        attend = ImageAttention(causal, images.blocks)
    if images is not None and images.positions_3T is not None:
        positions_P = _repeat(images.positions_3T.T, len(tokens_P))
    own_P = [tokens_P, positions_P, _next_tokens(tokens_P, cu_seqlens)]
    if cp is not None and cp.size() > 1:
        own_P = [own_tokens(x_P, cp) for x_P in own_P]
        routed_P = None if routed_P is None else own_tokens(routed_P, cp)
        start = cp.rank() * len(own_P[0])
        images = None if images is None else images.within(start, start + len(own_P[0]))
    else:
        cp = None
    tokens_t, positions_t, labels_t = own_P
    return LaidOut(
        tokens_t,
        positions_t.movedim(0, -1),
        labels_t,
        attend if cp is None else UlyssesAttention(attend, cp),
        len(tokens_T),
        cp,
        routed_P,
        images,
    )


def _next_tokens(tokens_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    labels_T = tokens_T.roll(-1)
    # A fixed value, so that it does not depend on which sequence comes next.
    labels_T[cu_seqlens[1:].long() - 1] = 0
    return labels_T


def _pad(
    tokens_T: torch.Tensor, cu_seqlens: torch.Tensor, min_tokens: int, multiple: int
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens = -(-max(min_tokens, len(tokens_T)) // multiple) * multiple
    if num_tokens == len(tokens_T):
        return tokens_T, cu_seqlens
    # Copies of the real sequences keep the expert load unchanged, and no padded sequence is longer
    # than the real ones, which would dominate the cost of attention.
    num_copies = -(-num_tokens // len(tokens_T))
    offsets = torch.arange(num_copies, device=cu_seqlens.device) * len(tokens_T)
    starts = (offsets[:, None] + cu_seqlens[:-1]).flatten()
    bounds = torch.cat([starts[starts < num_tokens], offsets.new_tensor([num_tokens])])
    return _repeat(tokens_T, num_tokens), bounds


def _repeat(x_T: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The first `num_tokens` rows of x, x, x, ..."""
    index = torch.arange(num_tokens, device=x_T.device) % len(x_T)
    return x_T if num_tokens == len(x_T) else x_T.index_select(0, index)


def token_outputs(
    model: Decoder,
    mb: dict[str, Any],
    config: TrainEngineConfig,
    mesh: ParallelMesh | None,
    images: MicroImages | None = None,
    sights: FrozenSights | None = None,
) -> tuple[torch.Tensor, ...]:
    """log p of the next token and entropy, `[T]`, or a critic's values `[T]`.

    At a sequence's last token, log p and entropy are undefined. `sights` of a tower that is not
    trained, and not sharded.
    """
    laid = pack_micro_batch(mb, config, mesh, images=images)
    replay_experts(model, laid.routed_tLK)
    seen = () if laid.images is None else laid.images.inputs(sights)
    hidden_tD = model(laid.tokens_t, laid.positions_t, laid.attend, *seen)
    return outputs_of(model, hidden_tD, laid, config, mesh)


def trace_on_ranks(
    model: Decoder,
    tokens: Sequence[int],
    config: TrainEngineConfig,
    mesh: ParallelMesh,
    device: torch.device,
) -> dict[str, Any]:
    """What each layer computes for `tokens` (layer_trace.py), but for the logits, which ranks of tp
    have in parts. All ranks call, and get the same."""
    tokens_T = torch.tensor(list(tokens), device=device)
    bounds = torch.tensor([0, len(tokens_T)], device=device)
    mb = {"input_ids": tokens_T, "cu_seqlens": bounds, "max_seqlen": len(tokens_T)}
    laid, tp = pack_micro_batch(mb, config, mesh), mesh.get_group("tp")

    def join(rows: torch.Tensor) -> torch.Tensor:
        if len(rows) < len(laid.tokens_t):
            rows = gather_over_ranks(rows, tp)
        return laid.whole([rows])[0]

    return trace_forward(model, laid.tokens_t, laid.positions_t, laid.attend, join)[0]


def pack_micro_batch(
    mb: dict[str, Any],
    config: TrainEngineConfig,
    mesh: ParallelMesh | None,
    *,
    min_tokens: int = 0,
    images: MicroImages | None = None,
) -> LaidOut:
    """This rank's tokens of `mb`; on a mesh padded, to at least `min_tokens`."""
    packed = InvariantPackedAttention if config.batch_invariant else PackedAttention
    if mesh is None:
        multiple = CPU_TILE if config.batch_invariant else 1
        return pack_rows(mb, multiple=multiple, packed=packed, images=images)
    return pack_rows(
        mb,
        multiple=mesh["cp_tp"].size(),
        cp=mesh.get_group("cp"),
        min_tokens=min_tokens,
        packed=packed,
        images=images,
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
        banned=() if model.args.vision is None else model.args.vision.placeholder_ids,
    )
