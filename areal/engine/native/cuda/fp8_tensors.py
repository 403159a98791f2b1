"""FP8 operands of the kernels: values and scales (models/common/fp8.py).

Shapes: M rows of x, D and N features in and out, G groups of 128 columns, B blocks of rows; K
key/value heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from areal.models.common import fp8_kernels


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Quantized rows of activations."""

    q_MD: torch.Tensor
    scale_MG: torch.Tensor  # rows are adjacent

    @classmethod
    def empty(cls, num_rows: int, dim: int, device: torch.device) -> Fp8Rows:
        return cls(*fp8_kernels.new_rows(num_rows, dim, device))

    @classmethod
    def like(cls, x_MD: torch.Tensor) -> Fp8Rows:
        """Room for the rows of `x`."""
        num_rows, dim = x_MD.shape
        return cls.empty(num_rows, dim, x_MD.device)

    def with_padding(self) -> Fp8Rows:
        """These rows and the undefined ones after them, a multiple of 16 together."""
        q_MD, scale_MG, room = self.q_MD, self.scale_MG, self.scale_MG.stride(1)
        return Fp8Rows(
            q_MD.as_strided((room, q_MD.shape[1]), q_MD.stride()),
            scale_MG.as_strided((room, scale_MG.shape[1]), scale_MG.stride()),
        )

    def __len__(self) -> int:
        return len(self.q_MD)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """Quantized weights of linear layers, side by side."""

    q_ND: torch.Tensor
    scale_BG: torch.Tensor

    def __len__(self) -> int:
        return len(self.q_ND)

    @property
    def block_rows(self) -> int:
        return len(self.q_ND) // len(self.scale_BG)


@dataclass(frozen=True, slots=True)
class CacheScales:
    """Of an FP8 cache, [num_pages, K, page_size] float32 each."""

    keys: torch.Tensor
    values: torch.Tensor
