"""Which runner computes a model: kernels and graphs where they can, plain torch elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal.engine.native.torch_runner import TorchRunner
from areal.models.common.decoder import DecoderBlock

if TYPE_CHECKING:
    from areal.engine.native.runner import Runner
    from areal.engine.native.scheduler import SlotTable
    from areal.models.common.decoder import Decoder

_CPU_PREFILL_TOKENS = 4096
_CUDA_PREFILL_TOKENS = 16384


def make_runner(
    model: Decoder,
    table: SlotTable,
    *,
    max_prefill_tokens: int | None,
    batch_invariant: bool,
    **cache: Any,
) -> Runner:
    """Kernels and graphs on CUDA, plain torch elsewhere and for models the kernels do not support.

    Plain torch on the CPU is batch-invariant anyway.
    """
    on_cuda = model.embedding_weight.device.type == "cuda"
    # Experts have no batch-invariant kernels.
    is_refused = batch_invariant and model.args.moe is not None
    if not on_cuda or is_refused or not kernels_take(model):
        if on_cuda and batch_invariant:
            raise ValueError(
                f"batch_invariant: its kernels do not compute this {model.args.model_type} "
                f"(head_dim {model.args.head_dim}); turn it off"
            )
        tokens = max_prefill_tokens or _CPU_PREFILL_TOKENS
        return TorchRunner(model, table, max_prefill_tokens=tokens, **cache)
    from areal.engine.native.cuda.runner import CudaRunner  # needs Triton

    tokens = max_prefill_tokens or _CUDA_PREFILL_TOKENS
    return CudaRunner(
        model, table, max_prefill_tokens=tokens, batch_invariant=batch_invariant, **cache
    )


def kernels_take(model: Decoder) -> bool:
    """Whether the kernels support it: plain norms, full attention, SwiGLU (dense, or of experts). A
    tensor-core product needs a head dim of at least 16, a tile a power of two."""
    args = model.args
    is_plain = (
        type(model).block_class is DecoderBlock
        and args.activation == "silu"
        and args.embedding_scale == 1.0
        and args.score_scale is None
        and not args.windows
        and args.logit_softcap is None
    )
    return is_plain and args.head_dim >= 16 and args.head_dim & (args.head_dim - 1) == 0
