"""The decoder of models/common as a CUDA step runs it: fused form, module form.

`FusedDecoder` computes `Decoder.forward` with few kernels, on the same parameters: projections that
read the same input are adjacent in memory (`fuse_linears`), and each parameter becomes a view. So
loading a weight by name writes where the kernels read, captured graphs stay valid, and a trainer
that owns the module is not affected. A block is what its args say (norms, activation, window,
rope): `_Block` holds it as data, so a family whose args express it needs no code here; what it has
before the feed-forward is its mixer (mixers.py). `forward` takes any number of rows; it decides who
computes matrix products (`Products`). `forward_few` is for 1 to 8 rows, where a step is bound by
reading the weights: each kernel reads them once, norm and activation included. Experts have kernels
of their own (feed_forward.py).

`ModuleDecoder` has the interface of `FusedDecoder` without `forward_few`, for batch-invariant
numerics: it runs the module itself, whose linear layers are `InvariantLinear`, op by op as the
trainer does, and adds only the cache.

Shapes: T rows, D model dim, X = (N + 2 K) * H, R = H / 2, V vocabulary; of `routed_TLK`: L layers
with experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from areal.engine.native.cuda.adapter_linear import AdapterRows
from areal.engine.native.cuda.block_kernels import add_rms_norm, rms_norm, softcap_
from areal.engine.native.cuda.feed_forward import DenseLayer, ExpertLayer, FeedForwardLayer
from areal.engine.native.cuda.fp8_tensors import Fp8Rows
from areal.engine.native.cuda.linear import Products, Projection
from areal.engine.native.cuda.mixers import (
    Attend,
    AttentionMixer,
    Rotation,
    Step,
    make_mixer,
    norm_of,
)
from areal.engine.native.cuda.paged_cache import PagedCache
from areal.engine.native.cuda.routing import router_arrivals
from areal.engine.native.cuda.skinny_linear import SkinnyWorkspace
from areal.engine.native.cuda.small_linear import norm_linear, small_linear
from areal.engine.native.cuda.states import Recur
from areal.models.common.args import DecoderArgs
from areal.models.common.decoder import Decoder, DecoderBlock, float32_logits, softcap
from areal.models.common.invariant import invariant_logits, make_invariant
from areal.models.common.moe import MoE
from areal.models.vision.tower import Sight

MAX_FEW_ROWS = 8
MAX_FEW_EXPERT_ROWS = 4  # more rows share experts, which `forward` reads once
# Up to here a matrix product is bound by reading the weights, where cuBLAS is slower.
MAX_SKINNY_ROWS = 64


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens and rotary positions of the rows of one forward."""

    tokens_T: torch.Tensor  # int32
    positions_T: torch.Tensor  # int32; [3, T] where an image's are among them (M-RoPE)
    write_T: torch.Tensor  # flat cache position of each row's key and value
    sight: Sight | None = None  # embeddings that replace those of `sight_rows_I`
    sight_rows_I: torch.Tensor | None = None  # int64
    recur: Recur | None = None  # of a model with recurrent layers
    adapters: AdapterRows | None = None  # of rows that have some


class _Block:
    def __init__(
        self,
        block: DecoderBlock,
        args: DecoderArgs,
        cache: PagedCache,
        feed_forward: FeedForwardLayer,
    ) -> None:
        out_norms = (block.attention_out_norm, block.ffn_out_norm)
        self.mixer = make_mixer(block.attention, args, cache)
        self.feed_forward = feed_forward
        self.attention_norm = norm_of(block.attention_norm, args)
        self.ffn_norm = norm_of(block.ffn_norm, args)
        self.attention_out_norm, self.ffn_out_norm = (n and norm_of(n, args) for n in out_norms)


def _fused_blocks(model: Decoder, cache: PagedCache) -> list[_Block]:
    args, arrivals = model.args, router_arrivals(model.embedding_weight.device)
    ranks = None if model.share is None else model.share.ranks
    blocks, num_sparse = [], 0
    for block in model.blocks:
        mlp = block.feed_forward
        if isinstance(mlp, MoE):
            layer = ExpertLayer(mlp, args.activation, num_sparse, arrivals, ranks)
            num_sparse += 1
        else:
            layer = DenseLayer(mlp, args.activation)
        blocks.append(_Block(block, args, cache, layer))
    return blocks


class FusedDecoder:
    def __init__(self, model: Decoder, cache: PagedCache) -> None:
        assert model.norm is not None, "a whole model, not a stage of a pipeline"
        assert model.tok_embeddings is not None, "a whole model, not a stage of a pipeline"
        self._model = model
        self._embed = model.tok_embeddings
        self._norm = norm_of(model.norm, model.args)
        self._cache = cache
        self._args = model.args
        self._blocks = _fused_blocks(model, cache)
        # The kernels for few rows support no feed-forward bias and no tensor parallelism.
        self._is_plain = not model.args.mlp_bias and model.share is None
        self._is_fp8 = model.has_fp8_cache
        self._skinny_space = SkinnyWorkspace.make(model.embedding_weight.device)
        # Tables by position: two launches per step and rope instead of seven.
        weight = model.embedding_weight
        positions = torch.arange(model.args.max_position_embeddings, device=weight.device)
        self._rope_tables = model.rope(positions, weight.dtype)
        self._window_rope_tables = model.window_rope and model.window_rope(positions, weight.dtype)
        # M-RoPE: which of three positions turns each pair.
        self._axes_R = torch.tensor(model.args.rope.axes, dtype=torch.int64, device=weight.device)

    def forward(self, rows: Rows, attend: Attend) -> torch.Tensor:
        """Hidden states [T, D] after the final norm."""
        residual_TD, deepstack = self._embed(rows.tokens_T), ()
        if rows.sight is not None:
            embedded_ID, deepstack = (
                rows.sight.tokens_ID.to(residual_TD.dtype),
                rows.sight.deepstack,
            )
            residual_TD = residual_TD.index_copy(0, rows.sight_rows_I, embedded_ID)
        step = Step(self._rotations(rows.positions_T), rows.write_T, attend, rows.recur)
        normed_TD = torch.empty_like(residual_TD)
        read_TD = Fp8Rows.like(residual_TD) if self._is_fp8 else normed_TD
        rms_norm(residual_TD, self._blocks[0].attention_norm, read_TD)
        next_norms = [block.attention_norm for block in self._blocks[1:]] + [self._norm]
        routed_TLK = self._new_routed(len(residual_TD))
        products = self._products(residual_TD, rows.adapters)
        for layer, (block, next_norm) in enumerate(zip(self._blocks, next_norms, strict=True)):
            out_TD = block.mixer.forward(read_TD, products, step)
            add_rms_norm(out_TD, residual_TD, block.ffn_norm, read_TD, block.attention_out_norm)
            out = block.feed_forward.forward(read_TD, routed_TLK, products)
            if layer < len(deepstack):
                assert rows.sight_rows_I is not None, "a sight belongs to rows"
                out.index_add_(0, rows.sight_rows_I, deepstack[layer].to(out.dtype))
            is_last = next_norm is self._norm
            to_TD = normed_TD if is_last else read_TD
            add_rms_norm(out, residual_TD, next_norm, to_TD, block.ffn_out_norm)
        self._record(rows, routed_TLK)
        return normed_TD

    def forward_few(self, rows: Rows, attend: Attend) -> torch.Tensor:
        """The same where `can_run_few`."""
        x_TD = self._embed(rows.tokens_T)
        step = Step(self._rotations(rows.positions_T), rows.write_T, attend, None)
        routed_TLK = self._new_routed(len(x_TD))
        for block in self._blocks:
            mixer = block.mixer
            assert isinstance(mixer, AttentionMixer), "see `can_run_few`"
            qkv, wo = mixer.qkv, mixer.wo
            assert isinstance(qkv.weight, torch.Tensor), "FP8 has no kernels for few rows"
            assert isinstance(wo.weight, torch.Tensor), "FP8 has no kernels for few rows"
            qkv_TX = x_TD.new_empty(len(x_TD), len(qkv.weight))
            norm_linear(x_TD, block.attention_norm, qkv.weight, qkv.bias, qkv_TX)
            after_TD = torch.empty_like(x_TD)
            small_linear(mixer.attended(qkv_TX, step), wo.weight, wo.bias, after_TD, x_TD)
            x_TD = block.feed_forward.forward_few(after_TD, block.ffn_norm, routed_TLK)
        normed_TD = torch.empty_like(x_TD)
        rms_norm(x_TD, self._norm, normed_TD)
        self._record(rows, routed_TLK)
        return normed_TD

    def can_run_few(self, num_rows: int) -> bool:
        """Not with norms between a product and the residual add, which fuses the two, in FP8, with
        gates after attention, with latent attention, or with a shared feed-forward."""
        args = self._args
        most = MAX_FEW_ROWS if args.moe is None else MAX_FEW_EXPERT_ROWS
        is_plain = self._is_plain and args.delta is None and args.latent is None
        is_plain &= args.moe is None or not args.moe.shared_dim
        return num_rows <= most and is_plain and not (args.out_norms or self._is_fp8)

    @property
    def projections(self) -> list[Projection]:
        """All that adapters can add to."""
        layers = (layer for block in self._blocks for layer in (block.mixer, block.feed_forward))
        return [projection for layer in layers for projection in layer.projections]

    def _products(self, x_TD: torch.Tensor, adapters: AdapterRows | None) -> Products:
        return Products(self._by(x_TD), self._skinny_space, x_TD.dtype, adapters)

    def _by(self, x_TD: torch.Tensor) -> Literal["small", "skinny", "cublas"]:
        if not self._is_plain:
            return "cublas"
        if len(x_TD) <= MAX_FEW_ROWS and not self._is_fp8:
            return "small"
        # float32 tiles would not fit into shared memory.
        is_narrow = self._is_fp8 or x_TD.element_size() == 2
        return "skinny" if len(x_TD) <= MAX_SKINNY_ROWS and is_narrow else "cublas"

    def _new_routed(self, num_rows: int) -> torch.Tensor:
        """The experts of each row, layer by layer, for the layers to write."""
        moe = self._args.moe
        shape = (0, 0) if moe is None else (len(moe.layers), moe.top_k)
        device = self._model.embedding_weight.device
        return torch.empty(num_rows, *shape, dtype=torch.int32, device=device)

    def _record(self, rows: Rows, routed_TLK: torch.Tensor) -> None:
        if self._cache.experts is not None:
            self._cache.experts.write(rows.write_T, routed_TLK)

    def _rotations(self, positions_T: torch.Tensor) -> tuple[Rotation, Rotation]:
        """Of layers without a window, and with one."""
        # A row that ran past its end may exceed the table; its result is dropped.
        inside_T = positions_T.clamp(max=len(self._rope_tables[0]) - 1)

        def look_up(tables: Rotation) -> Rotation:
            if inside_T.ndim == 2:
                inside_TR = inside_T.long()[self._axes_R].T
                return tables[0].gather(0, inside_TR), tables[1].gather(0, inside_TR)
            return F.embedding(inside_T, tables[0]), F.embedding(inside_T, tables[1])

        whole = look_up(self._rope_tables)
        if self._window_rope_tables is None:
            return whole, whole
        return whole, look_up(self._window_rope_tables)

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """float32 [T, V]."""
        weight, cap = self._model.output_weight, self._args.logit_softcap
        if len(hidden_TD) <= MAX_FEW_ROWS:
            logits_TV = hidden_TD.new_empty(len(hidden_TD), len(weight), dtype=torch.float32)
            small_linear(hidden_TD, weight, None, logits_TV, None)
        else:
            logits_TV = float32_logits(hidden_TD, weight)
        if cap is not None:
            softcap_(logits_TV, cap)
        return self._model.whole_logits(logits_TV)


class ModuleDecoder:
    def __init__(self, model: Decoder, cache: PagedCache) -> None:
        make_invariant(model)
        self._model = model
        self._cache = cache

    def forward(self, rows: Rows, attend: Attend) -> torch.Tensor:
        page_T = (rows.write_T // self._cache.page_size).long()
        offset_T = (rows.write_T % self._cache.page_size).long()

        def cache_and_attend(spec, q_TNH, k_TKH, v_TKH):
            keys, values = self._cache.layer(spec.layer)
            keys[page_T, :, offset_T] = k_TKH
            values[page_T, :, offset_T] = v_TKH
            out_TNH = torch.empty_like(q_TNH)
            attend(spec.layer, q_TNH, out_TNH)  # which knows its window and scale
            return out_TNH

        seen = (rows.sight, rows.sight_rows_I)
        return self._model(rows.tokens_T, rows.positions_T, cache_and_attend, *seen)

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        logits_TV = invariant_logits(hidden_TD, self._model.output_weight)
        return softcap(logits_TV, self._model.args.logit_softcap)
