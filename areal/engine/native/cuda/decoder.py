"""The decoder of models/common as a CUDA step runs it: paged cache, fused form, module form.

`PagedCache` holds keys and values as `[num_pages, K, page_size, H]` per layer. A (page, head) is
contiguous, so a kernel that reads one head of a sequence reads whole pages.

`FusedDecoder` computes `Decoder.forward` with few kernels, on the same parameters: projections that
read the same input are adjacent in memory (`fuse_linears`), and each parameter becomes a view. So
loading a weight by name writes where the kernels read, captured graphs stay valid, and a trainer
that owns the module is not affected. `forward` is for many rows (matrix products by cuBLAS);
`forward_few` is for 1 to 8 rows, where a step is bound by reading the weights: each kernel reads
them once, norm and activation included.

`ModuleDecoder` has the interface of `FusedDecoder` without `forward_few`, for batch-invariant
numerics: it runs the module itself, whose linear layers are `InvariantLinear`, op by op as the
trainer does, and adds only the cache.

Shapes: T rows, D model dim, F feed-forward dim, X = (N + 2 K) * H, R = H / 2, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from areal.engine.native.cuda.block_kernels import add_rms_norm, rms_norm, rope_and_cache, silu_mul
from areal.engine.native.cuda.skinny_linear import (
    SkinnyWorkspace,
    skinny_gate_up_silu,
    skinny_linear,
)
from areal.engine.native.cuda.small_linear import (
    norm_gate_up_silu,
    norm_linear,
    small_linear,
)
from areal.models.common.decoder import Decoder, DecoderBlock, float32_logits
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


class _Block:
    def __init__(self, block: DecoderBlock) -> None:
        attention, mlp = block.attention, block.feed_forward
        assert isinstance(mlp, FeedForward), "kernels_take keeps experts from here"
        self.qkv, self.qkv_bias = fuse_linears([attention.wq, attention.wk, attention.wv])
        self.gate_up, self.gate_up_bias = fuse_linears([mlp.w1, mlp.w3])
        self.wo, self.w2 = attention.wo, mlp.w2
        self.attention_norm, self.ffn_norm = block.attention_norm, block.ffn_norm
        self.q_norm = None if attention.q_norm is None else attention.q_norm.weight
        self.k_norm = None if attention.k_norm is None else attention.k_norm.weight


class FusedDecoder:
    def __init__(self, model: Decoder, cache: PagedCache) -> None:
        assert model.norm is not None, "a whole model, not a stage of a pipeline"
        self._model = model
        self._norm = model.norm
        self._cache = cache
        self._args = model.args
        self._blocks = [_Block(block) for block in model.blocks]
        self._eps = model.args.norm_eps
        # The kernels for few rows support no feed-forward bias and no tensor parallelism.
        self._is_plain = not model.args.mlp_bias and model.share is None
        self._skinny_space = SkinnyWorkspace.make(model.embedding_weight.device)
        # Tables by position: two launches per step instead of seven.
        weight = model.embedding_weight
        positions = torch.arange(model.args.max_position_embeddings, device=weight.device)
        self._cos_table, self._sin_table = model.rope(positions, weight.dtype)

    def forward(self, rows: Rows, attend: Attend) -> torch.Tensor:
        """Hidden states [T, D] after the final norm."""
        model = self._model
        residual_TD = F.embedding(rows.tokens_T, model.embedding_weight)
        cos_TR, sin_TR = self._rope(rows.positions_T)
        normed_TD = torch.empty_like(residual_TD)
        rms_norm(residual_TD, self._blocks[0].attention_norm.weight, self._eps, normed_TD)
        next_norms = [block.attention_norm for block in self._blocks[1:]] + [self._norm]
        # float32 tiles would not fit into shared memory.
        halves = residual_TD.element_size() == 2
        skinny = len(residual_TD) <= MAX_SKINNY_ROWS and self._is_plain and halves
        for layer, (block, next_norm) in enumerate(zip(self._blocks, next_norms, strict=True)):
            qkv_TX = self._project(normed_TD, block.qkv, block.qkv_bias, skinny)
            attended = self._attention(layer, block, qkv_TX, cos_TR, sin_TR, rows.write_T, attend)
            out_TD = self._project_back(attended, block.wo, skinny)
            add_rms_norm(out_TD, residual_TD, block.ffn_norm.weight, self._eps, normed_TD)
            activated = self._activate(normed_TD, block, skinny)
            out_TD = self._project_back(activated, block.w2, skinny)
            add_rms_norm(out_TD, residual_TD, next_norm.weight, self._eps, normed_TD)
        return normed_TD

    def forward_few(self, rows: Rows, attend: Attend) -> torch.Tensor:
        """The same for at most MAX_FEW_ROWS rows; requires `can_run_few`."""
        model = self._model
        x_TD = F.embedding(rows.tokens_T, model.embedding_weight)
        cos_TR, sin_TR = self._rope(rows.positions_T)
        for layer, block in enumerate(self._blocks):
            qkv_TX = x_TD.new_empty(len(x_TD), len(block.qkv))
            norm_linear(
                x_TD, block.attention_norm.weight, self._eps, block.qkv, block.qkv_bias, qkv_TX
            )
            attended = self._attention(layer, block, qkv_TX, cos_TR, sin_TR, rows.write_T, attend)
            after_TD = torch.empty_like(x_TD)
            small_linear(attended, block.wo.weight, block.wo.bias, after_TD, x_TD)
            activated = x_TD.new_empty(len(x_TD), len(block.gate_up) // 2)
            norm_gate_up_silu(after_TD, block.ffn_norm.weight, self._eps, block.gate_up, activated)
            x_TD = torch.empty_like(x_TD)
            small_linear(activated, block.w2.weight, block.w2.bias, x_TD, after_TD)
        normed_TD = torch.empty_like(x_TD)
        rms_norm(x_TD, self._norm.weight, self._eps, normed_TD)
        return normed_TD

    def _project(
        self, x_TD: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, skinny: bool
    ) -> torch.Tensor:
        if not skinny:
            return F.linear(x_TD, weight, bias)
        out = x_TD.new_empty(len(x_TD), len(weight))
        skinny_linear(x_TD, weight, bias, out, self._skinny_space)
        return out

    def _project_back(self, x: torch.Tensor, linear: nn.Linear, skinny: bool) -> torch.Tensor:
        """To the model dim; with several ranks the module itself sums over them."""
        return self._project(x, linear.weight, linear.bias, True) if skinny else linear(x)

    def _activate(self, x_TD: torch.Tensor, block: _Block, skinny: bool) -> torch.Tensor:
        activated = x_TD.new_empty(len(x_TD), len(block.gate_up) // 2)
        if skinny:
            skinny_gate_up_silu(x_TD, block.gate_up, activated, self._skinny_space)
        else:
            silu_mul(F.linear(x_TD, block.gate_up, block.gate_up_bias), activated)
        return activated

    def _rope(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # A row that ran past its end may exceed the table; its result is dropped.
        inside_T = positions_T.clamp(max=len(self._cos_table) - 1)
        return F.embedding(inside_T, self._cos_table), F.embedding(inside_T, self._sin_table)

    def can_run_few(self) -> bool:
        return self._is_plain

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """float32 [T, V]."""
        weight = self._model.output_weight
        if len(hidden_TD) <= MAX_FEW_ROWS:
            logits_TV = hidden_TD.new_empty(len(hidden_TD), len(weight), dtype=torch.float32)
            small_linear(hidden_TD, weight, None, logits_TV, None)
            return self._model.whole_logits(logits_TV)
        return self._model.whole_logits(float32_logits(hidden_TD, weight))

    def _attention(
        self,
        layer: int,
        block: _Block,
        qkv_TX: torch.Tensor,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
        write_T: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """[T, N * H], before the output projection."""
        q_TNH = qkv_TX.new_empty(len(qkv_TX), self._args.n_heads, self._args.head_dim)
        keys, values = self._cache.layer(layer)
        rope_and_cache(
            qkv_TX, cos_TR, sin_TR, write_T, keys, values, q_TNH, block.q_norm, block.k_norm,
            self._eps,
        )  # fmt: skip
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
            assert window is None and scale is None, "kernels_take keeps such models from here"
            keys, values = self._cache.layer(layer)
            keys[page_T, :, offset_T] = k_TKH
            values[page_T, :, offset_T] = v_TKH
            out_TNH = torch.empty_like(q_TNH)
            attend(layer, q_TNH, out_TNH)
            return out_TNH

        return self._model(rows.tokens_T, rows.positions_T, cache_and_attend)

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return invariant_logits(hidden_TD, self._model.output_weight)
