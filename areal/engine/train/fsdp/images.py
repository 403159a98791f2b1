"""Images for a model of transformers: the tensors of its image processor, and positions.

    packed rows with `multi_modal_input` -> read_images -> HfImages, or None without images

What a row holds (`pixel_values`, `image_grid_thw`, `image_sizes`, ...) are arguments of the model's
own forward, joined over the rows of a micro-batch. Models with M-RoPE say themselves which
positions a row has (`get_rope_index`).

A model may treat images in a way that packed attention does not compute, such as attention in both
directions: the first images of a run are therefore computed by the model's own forward too, and
must come out the same (`check_images`).

Shape legend: T tokens of the micro-batch, S of one row.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from areal.engine.train.fsdp.model import PACKED_ATTENTION, PackedModel, pack_alone
from areal.engine.train.micro_batches import MicroBatch
from areal.utils.data import MULTI_MODAL_KEY

_GRID = "image_grid_thw"


@dataclass(frozen=True, slots=True)
class HfImages:
    inputs: dict[str, torch.Tensor]  # arguments of the model's forward
    positions_3T: torch.Tensor | None = None  # None: those of text
    rows: tuple[tuple[torch.Tensor, dict[str, torch.Tensor]], ...] = ()  # tokens, and its images
    is_blank: bool = False  # computed and not used, as other ranks compute theirs


def read_images(data: dict[str, Any], hf: PreTrainedModel, device: torch.device) -> HfImages | None:
    """ValueError for images that do not fit, or image tokens without."""
    tokens = data["input_ids"].long().cpu().split(data["cu_seqlens"].diff().tolist())
    rows = data.get(MULTI_MODAL_KEY) or [{}] * len(tokens)
    for tokens_S, row in zip(tokens, rows, strict=True):
        _check_row(tokens_S, row, hf)
    if not any(rows):
        return None
    joined = _join(rows)
    positions = None
    if hasattr(hf.base_model, "get_rope_index"):
        positions = [
            _positions(tokens_S, row, hf) for tokens_S, row in zip(tokens, rows, strict=True)
        ]
        positions = torch.cat(positions, dim=1).to(device)
    seen = tuple((tokens_S, row) for tokens_S, row in zip(tokens, rows, strict=True) if row)
    return HfImages(joined, positions, seen)


def _join(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    seen = [row for row in rows if row]
    keys = seen[0].keys()
    for row in seen:
        if row.keys() != keys or "pixel_values" not in row:
            raise ValueError(
                f"{MULTI_MODAL_KEY}: rows have {sorted(keys)} and {sorted(row)}, expected the same "
                "tensors of the image processor in all, pixel_values among them"
            )
        odd = [k for k, x in row.items() if x.is_floating_point() and not x.isfinite().all()]
        if odd:
            raise ValueError(f"{MULTI_MODAL_KEY}: {odd[0]} has values that are not finite")
    return {key: torch.cat([row[key] for row in seen]) for key in keys}


def _check_row(tokens_S: torch.Tensor, row: dict[str, torch.Tensor], hf: PreTrainedModel) -> None:
    """Where grids tell how many image tokens there are."""
    merge = getattr(getattr(hf.config, "vision_config", None), "spatial_merge_size", None)
    found = int(_is_image(tokens_S, hf).sum())
    if not row:
        expected = 0
    elif _GRID in row and merge is not None:
        expected = int(row[_GRID].prod(1).sum()) // merge**2
    else:
        return
    if found != expected:
        raise ValueError(
            f"a sequence has {found} image tokens, and its images have {expected}: give input_ids "
            "one for each, and an image for each placeholder"
        )


def _is_image(tokens_S: torch.Tensor, hf: PreTrainedModel) -> torch.Tensor:
    return tokens_S == cast(Any, hf.config).image_token_id


def _positions(
    tokens_S: torch.Tensor, row: dict[str, torch.Tensor], hf: PreTrainedModel
) -> torch.Tensor:
    """[3, S]"""
    if not row:
        return torch.arange(len(tokens_S)).expand(3, -1)
    positions_3BS, _ = cast(Any, hf.base_model).get_rope_index(
        input_ids=tokens_S[None],
        mm_token_type_ids=_is_image(tokens_S, hf).int()[None],
        image_grid_thw=row[_GRID],
    )
    return positions_3BS[:, 0]


def share_example(
    mbs: list[MicroBatch], group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A row with images, tokens and tensors: the same on all ranks, of which at least one has."""
    seen = [row for mb in mbs if mb.images is not None for row in mb.images.rows]
    example = min(seen, key=lambda row: row[1]["pixel_values"].numel()) if seen else None
    if group is None:
        assert example is not None, "one rank has images"
        return example
    examples: list[Any] = [None] * group.size()
    dist.all_gather_object(examples, example, group=group)
    return next(row for row in examples if row is not None)


def fill_blank(mbs: list[MicroBatch], example: dict[str, torch.Tensor]) -> list[MicroBatch]:
    """Micro-batches without images compute the example's, and do not use them."""
    blank = HfImages(example, is_blank=True)
    return [mb if mb.images is not None else replace(mb, images=blank) for mb in mbs]


@torch.no_grad()
def check_images(
    model: PackedModel,
    example: tuple[torch.Tensor, dict[str, torch.Tensor]],
    device: torch.device,
) -> None:
    """Packed attention computes what the model itself does with an image, or ValueError."""
    tokens_S, row = example
    hf, name = model.hf, type(model.hf).__name__
    data = {
        "input_ids": tokens_S,
        "cu_seqlens": torch.tensor([0, len(tokens_S)]),
        MULTI_MODAL_KEY: [row],
    }
    images = read_images(data, hf, device)
    packed = model(*pack_alone(tokens_S.to(device)), images=images)[0]
    is_image_1S = _is_image(tokens_S, hf).int()[None].to(device)
    taken = inspect.signature(hf.forward).parameters
    kinds = {key: is_image_1S for key in ("mm_token_type_ids", "token_type_ids") if key in taken}
    with _own_attention(hf):
        own = model.own_logits(tokens_S.to(device), HfImages({**row, **kinds}))
    tolerance = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.2
    if not torch.allclose(packed.log_softmax(-1), own.log_softmax(-1), atol=tolerance, rtol=0.1):
        difference = (packed - own).abs().max().item()
        raise ValueError(
            f"{name} computes images other than by causal attention over packed tokens "
            f"(difference {difference:.2g} of logits): use another model"
        )


@contextmanager
def _own_attention(hf: PreTrainedModel) -> Iterator[None]:
    hf.set_attn_implementation({"": "eager", "text_config": "eager"})
    try:
        yield
    finally:
        hf.set_attn_implementation({"": PACKED_ATTENTION, "text_config": PACKED_ATTENTION})
