"""Shape and options of a vision tower, read from a parsed Hugging Face config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# transformers' defaults, which a config.json may omit. First the special tokens that stand for
# images or enclose them.
_TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_QWEN2_5_VL: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
_QWEN3_VL: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
_GEMMA3_TOKENS = {
    "image_token_index": 262144,
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


_QWEN3_5 = {key: value for key, value in _QWEN3_VL.items() if key != "deepstack_visual_indexes"}
_QWEN3_5_TOKENS = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionArgs:
    """A tower: transformer blocks over the patches of an image, merged `merge_size` x `merge_size`
    to one embedding of the decoder each."""

    n_layers: int
    dim: int
    n_heads: int
    hidden_dim: int
    out_dim: int  # the decoder's
    in_channels: int
    patch_size: int
    temporal_patch_size: int  # copies of an image, as if it were a short video
    merge_size: int
    rope_theta: float | None  # rotation by row and column; None: none
    image_token_id: int  # stands once for each merged patch in a sequence
    vision_start_token_id: int
    vision_end_token_id: int
    placeholder_ids: tuple[int, ...]  # that only a prompt may contain, ascending: never sampled
    window: int = 0  # side of an attention window in merged patches; 0: no windows
    full_layers: tuple[int, ...] = ()  # layers without a window
    position_side: int = 0  # side of the grid of learned positions; 0: none
    deepstack_layers: tuple[int, ...] = ()  # outputs added to the first layers of the decoder
    norm_eps: float = 1e-6
    image_side: int = 0  # patches along a side of every image; 0: images have sizes of their own
    has_axes: bool = True  # image tokens have a row and a column in the decoder's rope (M-RoPE)
    is_bidirectional: bool = False  # tokens of an image see all of it in the decoder
    # Chat templates write `vision_start_token_id` for an image, and its tokens come with it: start,
    # image tokens, end, and line breaks around. Else they write one image token.
    starts_images: bool = False

    def __post_init__(self) -> None:
        if self.rope_theta is not None and self.dim % (4 * self.n_heads):
            raise ValueError(
                f"vision_config: hidden_size ({self.dim}) must be a multiple of 4 x num_heads "
                f"({self.n_heads}), to rotate heads by row and column"
            )
        if self.dim % self.n_heads:
            raise ValueError(
                f"vision_config: hidden_size ({self.dim}) must be a multiple of the number of "
                f"heads ({self.n_heads})"
            )

    @property
    def patch_values(self) -> int:
        """Numbers in a row of `pixel_values`."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def whole_grid(self) -> tuple[int, int, int]:
        """Of the smallest image there is; where images have one size, of all."""
        side = self.image_side or self.merge_size
        return 1, side, side

    @property
    def template_token_id(self) -> int:
        """What a chat template writes for an image."""
        return self.vision_start_token_id if self.starts_images else self.image_token_id

    def num_patches(self, grid: Sequence[int]) -> int:
        return int(grid[0]) * int(grid[1]) * int(grid[2])

    def num_tokens(self, grid: Sequence[int]) -> int:
        """Image tokens of one image whose patches are a `grid` of (time, height, width)."""
        return self.num_patches(grid) // self.merge_size**2

    def check_grid(self, grid: Sequence[int]) -> None:
        """ValueError for what is not the grid of one image."""
        time, height, width = (int(size) for size in grid)
        if self.image_side and (time, height, width) != self.whole_grid:
            raise ValueError(
                f"image_grid_thw: {[time, height, width]}; images of this model have "
                f"{list(self.whole_grid)} patches"
            )
        if time != 1:
            raise ValueError(
                f"image_grid_thw: {time} frames; videos are not supported, an image has 1"
            )
        if height < 1 or width < 1 or height % self.merge_size or width % self.merge_size:
            raise ValueError(
                f"image_grid_thw: {height} x {width} patches; both must be positive multiples of "
                f"{self.merge_size} (spatial_merge_size of the model's config.json)"
            )


def qwen2_5_vl_vision(hf: Mapping[str, Any], dim: int) -> VisionArgs:
    """`hf` is the whole config.json, `dim` that of the decoder."""
    given = _vision_config(hf, _QWEN2_5_VL, activation="silu")
    full_layers = tuple(given["fullatt_block_indexes"])
    window = given["window_size"] // given["spatial_merge_size"] // given["patch_size"]
    if window < 1:
        raise ValueError(
            f"vision_config.window_size ({given['window_size']}) must hold a merged patch of "
            f"{given['spatial_merge_size'] * given['patch_size']} pixels"
        )
    return VisionArgs(**_common(hf, given, dim), window=window, full_layers=full_layers)


def qwen3_vl_vision(hf: Mapping[str, Any], dim: int) -> VisionArgs:
    given = _vision_config(hf, _QWEN3_VL, activation="gelu_pytorch_tanh")
    layers = tuple(given["deepstack_visual_indexes"])
    side = _position_side(given)
    return VisionArgs(**_common(hf, given, dim), position_side=side, deepstack_layers=layers)


def qwen3_5_vision(hf: Mapping[str, Any], dim: int) -> VisionArgs:
    """Qwen3-VL's without deepstack; the tokens have other numbers."""
    given = _vision_config(hf, _QWEN3_5, activation="gelu_pytorch_tanh")
    tokens = {key: value for key, value in hf.items() if key in _TOKENS and value is not None}
    common = _common({**hf, **_QWEN3_5_TOKENS, **tokens}, given, dim)
    return VisionArgs(**common, position_side=_position_side(given))


def _position_side(given: Mapping[str, Any]) -> int:
    side = int(given["num_position_embeddings"] ** 0.5)
    if side**2 != given["num_position_embeddings"]:
        raise ValueError(
            "vision_config.num_position_embeddings must be a square number, got "
            f"{given['num_position_embeddings']}"
        )
    return side


def gemma3_vision(hf: Mapping[str, Any], dim: int) -> VisionArgs:
    """SigLIP with its patches averaged to `mm_tokens_per_image` tokens."""
    given = _vision_config(hf, _SIGLIP, activation="gelu_pytorch_tanh")
    tokens = {**_GEMMA3_TOKENS, **{k: hf[k] for k in _GEMMA3_TOKENS if hf.get(k) is not None}}
    side, count = given["image_size"] // given["patch_size"], hf.get("mm_tokens_per_image") or 256
    merge_size = side // max(int(count**0.5), 1)
    if not merge_size or side % merge_size or (side // merge_size) ** 2 != count:
        raise ValueError(
            f"mm_tokens_per_image ({count}) must be a square number whose root divides "
            f"image_size / patch_size ({side}), to average whole squares of patches"
        )
    image, start, end = (tokens[key] for key in _GEMMA3_TOKENS)
    return VisionArgs(
        n_layers=given["num_hidden_layers"],
        dim=given["hidden_size"],
        n_heads=given["num_attention_heads"],
        hidden_dim=given["intermediate_size"],
        out_dim=dim,
        in_channels=given["num_channels"],
        patch_size=given["patch_size"],
        temporal_patch_size=1,
        merge_size=merge_size,
        rope_theta=None,
        image_token_id=image,
        vision_start_token_id=start,
        vision_end_token_id=end,
        placeholder_ids=tuple(sorted({image, start, end})),
        norm_eps=given["layer_norm_eps"],
        image_side=side,
        has_axes=False,
        is_bidirectional=True,
        starts_images=True,
    )


def _vision_config(
    hf: Mapping[str, Any], defaults: Mapping[str, Any], *, activation: str
) -> dict[str, Any]:
    own = {key: value for key, value in hf.get("vision_config", {}).items() if value is not None}
    if "in_chans" in own:
        own.setdefault("in_channels", own["in_chans"])
    given = {**defaults, **own}
    for key, usual in defaults.items():
        if isinstance(usual, int) and (type(given[key]) is not int or given[key] < 1):
            raise ValueError(
                f"vision_config.{key} must be a positive whole number, got {given[key]!r}"
            )
    if given["hidden_act"] != activation:
        raise ValueError(
            f"vision_config.hidden_act must be {activation!r}, got {given['hidden_act']!r}"
        )
    return given


def _common(hf: Mapping[str, Any], given: Mapping[str, Any], dim: int) -> dict[str, Any]:
    if given["out_hidden_size"] != dim:
        raise ValueError(
            f"vision_config.out_hidden_size must be the decoder's hidden_size ({dim}), got "
            f"{given['out_hidden_size']}"
        )
    tokens = {**_TOKENS, **{key: hf[key] for key in _TOKENS if hf.get(key) is not None}}
    rope = given.get("rope_parameters") or {}
    return {
        "n_layers": given["depth"],
        "dim": given["hidden_size"],
        "n_heads": given["num_heads"],
        "hidden_dim": given["intermediate_size"],
        "out_dim": given["out_hidden_size"],
        "in_channels": given["in_channels"],
        "patch_size": given["patch_size"],
        "temporal_patch_size": given["temporal_patch_size"],
        "merge_size": given["spatial_merge_size"],
        "rope_theta": rope.get("rope_theta", 10000.0),
        "image_token_id": tokens["image_token_id"],
        "vision_start_token_id": tokens["vision_start_token_id"],
        "vision_end_token_id": tokens["vision_end_token_id"],
        "placeholder_ids": placeholder_ids(tokens),
    }


def placeholder_ids(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids of a config.json's image tokens, ascending; those it does not name are left out."""
    return tuple(sorted({hf[key] for key in _TOKENS if hf.get(key) is not None}))
