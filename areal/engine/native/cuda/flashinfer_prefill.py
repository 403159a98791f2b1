"""FlashInfer's attention for prefill, where it is installed.

FlashInfer is no dependency: whether it can run is tried once, when the engine starts. The first
time on a machine it compiles its kernel then, which takes minutes. Measured on an H200
(benchmark/kernels.py), a prefill of 32 prompts of 2048 tokens takes 1.0 ms a layer instead of 1.2,
one of 32768 tokens 6.2 instead of 7.9. Decoding stays with our kernel: inside the step, where ours
overlaps with its neighbours, FlashInfer's made steps of 1 and of 64 rows 2 to 18 % longer.

Shapes: T rows of all chunks, C chunks, P pages of a chunk, N query heads, K key/value heads, H head
dim.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import torch

from areal.utils import logging

logger = logging.getLogger("NativeEngine")

_WORKSPACE_BYTES = 128 * 2**20  # what FlashInfer recommends


class FlashInferPrefill:
    def __init__(self, keys: torch.Tensor, num_heads: int) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        _, num_kv_heads, self._page_size, head_dim = keys.shape
        self._heads = (num_heads, num_kv_heads, head_dim, self._page_size)
        self._dtype = keys.dtype
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=keys.device)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND")
        self._planned = torch.cuda.Event()

    def plan(
        self, num_rows_C: np.ndarray, first_position_C: np.ndarray, pages_CP: np.ndarray
    ) -> None:
        """Lays out the chunks for the `attend` calls that follow."""
        # The plan before this one may still be on its way from the memory this one is written to.
        self._planned.synchronize()
        num_tokens_C = first_position_C + num_rows_C
        num_pages_C = -(-num_tokens_C // self._page_size)
        is_used_CP = np.arange(pages_CP.shape[1]) < num_pages_C[:, None]
        self._wrapper.plan(
            _bounds(num_rows_C),
            _bounds(num_pages_C),
            _pinned(pages_CP[is_used_CP]),
            _pinned((num_tokens_C - 1) % self._page_size + 1),
            *self._heads,
            causal=True,
            q_data_type=self._dtype,
        )
        self._planned.record()

    def attend(
        self, q_TNH: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out_TNH: torch.Tensor
    ) -> None:
        self._wrapper.run(q_TNH, (keys, values), out=out_TNH)


def _bounds(counts: np.ndarray) -> torch.Tensor:
    return _pinned(np.concatenate([[0], np.cumsum(counts)]))


def _pinned(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32)).pin_memory()


def flashinfer_prefill(keys: torch.Tensor, num_heads: int) -> FlashInferPrefill | None:
    """For a cache like `keys` `[num_pages, K, page_size, H]`; None where FlashInfer cannot run."""
    if not _may_run(keys):
        return None
    # Said before: a start that takes too long ends with this line as its last.
    logger.info("trying FlashInfer for prefill: its first time on a machine takes minutes")
    # No compiler, or one that fails, or a version with other functions: ours does as well.
    try:
        return _tried(keys, num_heads)
    except (ImportError, RuntimeError, OSError, TypeError) as error:
        logger.warning("FlashInfer is installed but not used: %s", error)
        return None


def _may_run(keys: torch.Tensor) -> bool:
    return (
        keys.is_cuda
        and keys.dtype in (torch.bfloat16, torch.float16)
        and keys.shape[3] in (64, 128, 256)
        and importlib.util.find_spec("flashinfer") is not None
    )


def _tried(keys: torch.Tensor, num_heads: int) -> FlashInferPrefill:
    """One token's prefill, for which the kernel is compiled."""
    prefill = FlashInferPrefill(keys, num_heads)
    prefill.plan(np.ones(1, np.int64), np.zeros(1, np.int64), np.zeros((1, 1), np.int64))
    q_TNH = torch.zeros(1, num_heads, keys.shape[3], dtype=keys.dtype, device=keys.device)
    prefill.attend(q_TNH, keys, keys, torch.empty_like(q_TNH))
    torch.cuda.synchronize(keys.device)
    return prefill
