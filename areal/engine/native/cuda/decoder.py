"""The decoder of models/common as a CUDA step runs it: paged cache, fused form, module form.

`PagedCache` holds keys and values as `[num_pages, K, page_size, H]` per layer. A (page, head) is
contiguous, so a kernel that reads one head of a sequence reads whole pages.

`FusedDecoder` computes `Decoder.forward` with few kernels, on the same parameters: projections that
read the same input are adjacent in memory (`fuse_linears`), and each parameter becomes a view. So
loading a weight by name writes where the kernels read, captured graphs stay valid, and a trainer
that owns the module is not affected. A block is what its args say (norms, activation, window,
rope): `_Block` holds it as data, so a family whose args express it needs no code here. `forward`
takes any number of rows; it decides who computes matrix products (`_Products`). `forward_few` is
for 1 to 8 rows, where a step is bound by reading the weights: each kernel reads them once, norm and
activation included.

`ModuleDecoder` has the interface of `FusedDecoder` without `forward_few`, for batch-invariant
numerics: it runs the module itself, whose linear layers are `InvariantLinear`, op by op as the
trainer does, and adds only the cache.

Shapes: T rows, D model dim, F feed-forward dim, X = (N + 2 K) * H, R = H / 2, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from areal.engine.native.cuda.block_kernels import (
    Norm,
    add_rms_norm,
    gate_mul,
    rms_norm,
    rope_and_cache,
    softcap_,
)
from areal.engine.native.cuda.skinny_linear import (
    SkinnyWorkspace,
    skinny_gate_up,
    skinny_linear,
)
from areal.engine.native.cuda.small_linear import norm_linear, small_gate_up, small_linear
from areal.models.common.args import DecoderArgs
from areal.models.common.decoder import Decoder, DecoderBlock, float32_logits, softcap
from areal.models.common.invariant import invariant_logits, make_invariant
from areal.models.common.moe import FeedForward


class PagedCache:
    def __init__(self, model: Decoder, *, num_pages: int, page_size: int) -> None:
        args = model.args
        shape = (args.n_layers, 2, num_pages, args.n_kv_heads, page_size, args.head_dim)
        # Zeros: a masked position is multiplied by 0, and 0 * NaN is NaN.
        self._cache = model.embedding_weight.new_zeros(shape)
        self.page_size = page_size

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._cache[layer]
        return keys, values

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy pages `sources` to pages `targets`, in all layers."""
        self._cache.index_copy_(2, targets, self._cache.index_select(2, sources))


MAX_FEW_ROWS = 8
# Up to here a matrix product is bound by reading the weights, where cuBLAS is slower.
MAX_SKINNY_ROWS = 64

# attend(layer, q_TNH, out_TNH) writes `out`; keys and values are already in the cache.
Attend = Callable[[int, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens and positions of the rows of one forward."""

    tokens_T: torch.Tensor  # int32
    positions_T: torch.Tensor  # int32
    write_T: torch.Tensor  # flat cache position of each row's key and value


# cos and sin [T, R]
_Rotation = tuple[torch.Tensor, torch.Tensor]
# Who computes matrix products: small_linear.py, skinny_linear.py, cuBLAS.
_Products = Literal["small", "skinny", "cublas"]


class _Block:
    def __init__(self, block: DecoderBlock, args: DecoderArgs) -> None:
        attention, mlp = block.attention, block.feed_forward
        assert isinstance(mlp, FeedForward), "kernels_take keeps experts from here"
        self.qkv, self.qkv_bias = fuse_linears([attention.wq, attention.wk, attention.wv])
        self.gate_up, self.gate_up_bias = fuse_linears([mlp.w1, mlp.w3])
        self.wo, self.w2 = attention.wo, mlp.w2
        self.attention_norm = _norm(block.attention_norm, args)
        self.attention_out_norm = block.attention_out_norm and _norm(block.attention_out_norm, args)
        self.ffn_norm = _norm(block.ffn_norm, args)
        self.ffn_out_norm = block.ffn_out_norm and _norm(block.ffn_out_norm, args)
        self.q_norm = attention.q_norm and _norm(attention.q_norm, args)
        self.k_norm = attention.k_norm and _norm(attention.k_norm, args)
        self.has_window = attention.window is not None


def _norm(module: nn.RMSNorm, args: DecoderArgs) -> Norm:
    return Norm(module.weight, args.norm_eps, offset=1.0 if args.zero_centered_norms else 0.0)


class FusedDecoder:
    def __init__(self, model: Decoder, cache: PagedCache) -> None:
        assert model.norm is not None, "a whole model, not a stage of a pipeline"
        assert model.tok_embeddings is not None, "a whole model, not a stage of a pipeline"
        self._model = model
        self._embed = model.tok_embeddings
        self._norm = _norm(model.norm, model.args)
        self._cache = cache
        self._args = model.args
        self._blocks = [_Block(block, model.args) for block in model.blocks]
        # The kernels for few rows support no feed-forward bias and no tensor parallelism.
        self._is_plain = not model.args.mlp_bias and model.share is None
        self._skinny_space = SkinnyWorkspace.make(model.embedding_weight.device)
        # Tables by position: two launches per step and rope instead of seven.
        weight = model.embedding_weight
        positions = torch.arange(model.args.max_position_embeddings, device=weight.device)
        self._rope_tables = model.rope(positions, weight.dtype)
        self._window_rope_tables = model.window_rope and model.window_rope(positions, weight.dtype)

    def forward(self, rows: Rows, attend: Attend) -> torch.Tensor:
        """Hidden states [T, D] after the final norm."""
        residual_TD = self._embed(rows.tokens_T)
        rotations = self._rotations(rows.positions_T)
        normed_TD = torch.empty_like(residual_TD)
        rms_norm(residual_TD, self._blocks[0].attention_norm, normed_TD)
        next_norms = [block.attention_norm for block in self._blocks[1:]] + [self._norm]
        by = self._products(residual_TD)
        for layer, (block, next_norm) in enumerate(zip(self._blocks, next_norms, strict=True)):
            qkv_TX = self._project(normed_TD, block.qkv, block.qkv_bias, by)
            attended = self._attention(layer, block, qkv_TX, rotations, rows.write_T, attend)
            out_TD = self._project_back(attended, block.wo, by)
            add_rms_norm(out_TD, residual_TD, block.ffn_norm, normed_TD, block.attention_out_norm)
            activated = self._activate(normed_TD, block, by)
            out_TD = self._project_back(activated, block.w2, by)
            add_rms_norm(out_TD, residual_TD, next_norm, normed_TD, block.ffn_out_norm)
        return normed_TD

    def forward_few(self, rows: Rows, attend: Attend) -> torch.Tensor:
        """The same for at most MAX_FEW_ROWS rows; requires `can_run_few`."""
        x_TD = self._embed(rows.tokens_T)
        rotations = self._rotations(rows.positions_T)
        for layer, block in enumerate(self._blocks):
            qkv_TX = x_TD.new_empty(len(x_TD), len(block.qkv))
            norm_linear(x_TD, block.attention_norm, block.qkv, block.qkv_bias, qkv_TX)
            attended = self._attention(layer, block, qkv_TX, rotations, rows.write_T, attend)
            after_TD = torch.empty_like(x_TD)
            small_linear(attended, block.wo.weight, block.wo.bias, after_TD, x_TD)
            activated = x_TD.new_empty(len(x_TD), len(block.gate_up) // 2)
            activation = self._args.activation
            small_gate_up(after_TD, block.ffn_norm, block.gate_up, activation, activated)
            x_TD = torch.empty_like(x_TD)
            small_linear(activated, block.w2.weight, block.w2.bias, x_TD, after_TD)
        normed_TD = torch.empty_like(x_TD)
        rms_norm(x_TD, self._norm, normed_TD)
        return normed_TD

    def can_run_few(self) -> bool:
        """Not with norms between a product and the residual add, which fuses the two."""
        return self._is_plain and not self._args.out_norms

    def _products(self, x_TD: torch.Tensor) -> _Products:
        if not self._is_plain:
            return "cublas"
        if len(x_TD) <= MAX_FEW_ROWS:
            return "small"
        # float32 tiles would not fit into shared memory.
        is_skinny = len(x_TD) <= MAX_SKINNY_ROWS and x_TD.element_size() == 2
        return "skinny" if is_skinny else "cublas"

    def _project(
        self, x_TD: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, by: _Products
    ) -> torch.Tensor:
        if by == "cublas":
            return F.linear(x_TD, weight, bias)
        out = x_TD.new_empty(len(x_TD), len(weight))
        if by == "skinny":
            skinny_linear(x_TD, weight, bias, out, self._skinny_space)
        else:
            small_linear(x_TD, weight, bias, out)
        return out

    def _project_back(self, x: torch.Tensor, linear: nn.Linear, by: _Products) -> torch.Tensor:
        """To the model dim; with several ranks the module itself sums over them."""
        return linear(x) if by == "cublas" else self._project(x, linear.weight, linear.bias, by)

    def _activate(self, x_TD: torch.Tensor, block: _Block, by: _Products) -> torch.Tensor:
        activated = x_TD.new_empty(len(x_TD), len(block.gate_up) // 2)
        activation = self._args.activation
        if by == "small":
            small_gate_up(x_TD, None, block.gate_up, activation, activated)
        elif by == "skinny":
            skinny_gate_up(x_TD, block.gate_up, activation, activated, self._skinny_space)
        else:
            gate_mul(F.linear(x_TD, block.gate_up, block.gate_up_bias), activation, activated)
        return activated

    def _rotations(self, positions_T: torch.Tensor) -> tuple[_Rotation, _Rotation]:
        """Of layers without a window, and with one."""
        # A row that ran past its end may exceed the table; its result is dropped.
        inside_T = positions_T.clamp(max=len(self._rope_tables[0]) - 1)

        def look_up(tables: _Rotation) -> _Rotation:
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

    def _attention(
        self,
        layer: int,
        block: _Block,
        qkv_TX: torch.Tensor,
        rotations: tuple[_Rotation, _Rotation],
        write_T: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """[T, N * H], before the output projection."""
        q_TNH = qkv_TX.new_empty(len(qkv_TX), self._args.n_heads, self._args.head_dim)
        keys, values = self._cache.layer(layer)
        cos_sin = rotations[block.has_window]
        rope_and_cache(qkv_TX, *cos_sin, write_T, keys, values, q_TNH, block.q_norm, block.k_norm)
        out_TNH = torch.empty_like(q_TNH)
        attend(layer, q_TNH, out_TNH)
        return out_TNH.flatten(1)


def fuse_linears(linears: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fused weights [sum of outputs, D] and biases; the modules' own become views of them.

    Linears that are already fused (a second engine on one model) keep their storage.
    """
    biases = [x.bias for x in linears if x.bias is not None]
    return _fuse([x.weight for x in linears]), _fuse(biases) if biases else None


def _fuse(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    first = parameters[0].data
    rows = sum(len(parameter) for parameter in parameters)
    if _lie_side_by_side(parameters):
        return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
    fused = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = fused[start : start + len(parameter)]
        start += len(parameter)
    return fused


def _lie_side_by_side(parameters: Sequence[torch.Tensor]) -> bool:
    end = parameters[0].data_ptr()
    storage = parameters[0].untyped_storage().data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != end or parameter.untyped_storage().data_ptr() != storage:
            return False
        end += parameter.numel() * parameter.element_size()
    return True


class ModuleDecoder:
    def __init__(self, model: Decoder, cache: PagedCache) -> None:
        make_invariant(model)
        self._model = model
        self._cache = cache

    def forward(self, rows: Rows, attend: Attend) -> torch.Tensor:
        page_T = (rows.write_T // self._cache.page_size).long()
        offset_T = (rows.write_T % self._cache.page_size).long()

        def cache_and_attend(layer, q_TNH, k_TKH, v_TKH, *, window=None, scale=None):
            del window, scale  # `attend` knows those of its layers
            keys, values = self._cache.layer(layer)
            keys[page_T, :, offset_T] = k_TKH
            values[page_T, :, offset_T] = v_TKH
            out_TNH = torch.empty_like(q_TNH)
            attend(layer, q_TNH, out_TNH)
            return out_TNH

        return self._model(rows.tokens_T, rows.positions_T, cache_and_attend)

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        logits_TV = invariant_logits(hidden_TD, self._model.output_weight)
        return softcap(logits_TV, self._model.args.logit_softcap)
