"""Which runner computes a model, kernels and graphs or plain torch, and how large its cache is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from areal.engine.native.kv_cache import MIN_STATES, STATES_OF_PREFIX, STATES_OF_SEQUENCE
from areal.engine.native.state_cache import state_bytes
from areal.engine.native.torch_runner import TorchRunner
from areal.models.common.decoder import DecoderBlock
from areal.models.common.delta_rule import has_tiles

if TYPE_CHECKING:
    from areal.engine.native.adapters import AdapterBank
    from areal.engine.native.runner import Runner
    from areal.engine.native.scheduler import SlotTable
    from areal.models.common.decoder import Decoder

_CPU_PREFILL_TOKENS = 4096
_CUDA_PREFILL_TOKENS = 16384
_CPU_CACHE_BYTES = 1 << 30
# Half of the free memory, to leave room for a colocated trainer.
_SHARE_OF_FREE_DEVICE_MEMORY = 0.5
_FP8_CAPABILITY = (8, 9)


def make_runner(
    model: Decoder,
    table: SlotTable,
    adapters: AdapterBank,
    *,
    max_prefill_tokens: int | None,
    batch_invariant: bool,
    num_states: int | None,
    **cache: Any,
) -> Runner:
    """Kernels and graphs on CUDA, plain torch elsewhere and for models the kernels do not support.

    Plain torch on the CPU is batch-invariant anyway.
    """
    _check_prefill(model, max_prefill_tokens)
    weight_device = model.embedding_weight.device
    on_cuda = weight_device.type == "cuda"
    # Without batch-invariant kernels: experts, latent attention, recurrent layers, FP8, images that
    # see themselves.
    args, vision = model.args, model.args.vision
    sees_ahead = vision is not None and vision.is_bidirectional
    is_special = any(part is not None for part in (args.moe, args.latent, args.delta))
    is_special |= model.has_fp8_cache
    is_refused = batch_invariant and (is_special or sees_ahead)
    if not on_cuda or is_refused or not kernels_take(model):
        if on_cuda and batch_invariant:
            raise ValueError(
                "batch_invariant: its kernels do not compute this "
                f"{model.args.model_type}{' in FP8' * model.has_fp8_cache}; turn it off"
            )
        tokens = max_prefill_tokens or _CPU_PREFILL_TOKENS
        return TorchRunner(
            model, table, adapters, max_prefill_tokens=tokens, num_states=num_states, **cache
        )
    if model.has_fp8_cache and torch.cuda.get_device_capability(weight_device) < _FP8_CAPABILITY:
        raise ValueError(
            "dtype fp8: this GPU has no FP8 products, which come with compute capability 8.9 (Ada) "
            "and 9.0 (Hopper); use bfloat16"
        )
    from areal.engine.native.cuda.runner import CudaRunner  # needs Triton

    tokens = max_prefill_tokens or _CUDA_PREFILL_TOKENS
    return CudaRunner(
        model,
        table,
        adapters,
        max_prefill_tokens=tokens,
        batch_invariant=batch_invariant,
        num_states=num_states,
        **cache,
    )


def _check_prefill(model: Decoder, max_prefill_tokens: int | None) -> None:
    """Tokens that see all of their image are computed together."""
    vision = model.args.vision
    if vision is None or not vision.is_bidirectional or max_prefill_tokens is None:
        return
    whole = vision.num_tokens(vision.whole_grid)
    if max_prefill_tokens < whole:
        raise ValueError(
            f"max_prefill_tokens must be at least {whole}, the tokens of an image, which this "
            f"{model.args.model_type} computes at once; got {max_prefill_tokens}"
        )


def kernels_take(model: Decoder) -> bool:
    """Whether the kernels support it: what args describe, but for blocks of a family's own other
    than hybrid ones, and for recurrent layers in FP8, over ranks or of heads that are no tiles."""
    args = model.args
    if args.delta is None:
        return type(model).block_class is DecoderBlock
    is_whole = not model.has_fp8_cache and model.share is None and bool(args.attention_layers)
    return is_whole and has_tiles(args.delta)


def default_num_pages(model: Decoder, *, page_size: int, max_running: int) -> int:
    """Enough for `max_running` full contexts, bounded by memory; at least for one."""
    args, weight = model.args, model.embedding_weight
    layer_bytes = 2 * args.n_kv_heads * args.head_dim * weight.itemsize
    if model.has_fp8_cache and weight.is_cuda:
        layer_bytes = 2 * args.n_kv_heads * (args.head_dim + 4)  # with its scale
    elif args.latent is not None and weight.is_cuda:
        layer_bytes = args.latent.cached_dim * weight.itemsize
    token_bytes = max(1, len(args.attention_layers) * layer_bytes)
    context_pages = -(-args.max_position_embeddings // page_size) + 1
    affordable = _cache_bytes(model) // (token_bytes * page_size)
    return 1 + min(max_running * context_pages, max(affordable, context_pages))


def checked_num_states(model: Decoder, given: int | None, *, max_running: int) -> int | None:
    """`given`, or as many as `max_running` sequences and their prompts use, bounded by memory;
    None without recurrent layers."""
    if model.args.delta is None:
        return None
    if given is not None:
        if given < MIN_STATES:
            raise ValueError(f"num_states must be at least {MIN_STATES}, got {given}")
        return given
    affordable = _cache_bytes(model) // state_bytes(model.args, model.embedding_weight.itemsize)
    wanted = 1 + max_running * (STATES_OF_SEQUENCE + STATES_OF_PREFIX)
    return max(MIN_STATES, min(wanted, affordable))


def _cache_bytes(model: Decoder) -> int:
    """Default size of the key-value cache, and of that of states: the minimum over ranks."""
    num_bytes = _all_cache_bytes(model)
    return num_bytes if model.args.delta is None else num_bytes // 2


def _all_cache_bytes(model: Decoder) -> int:
    device = model.embedding_weight.device
    if device.type != "cuda":
        return _CPU_CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    num_bytes = int(free * _SHARE_OF_FREE_DEVICE_MEMORY)
    return num_bytes if model.share is None else model.share.ranks.least(num_bytes, device)
