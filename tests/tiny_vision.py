"""Tiny random models with a vision tower, and sequences with images for them.

    config = tiny_vision_config("qwen2_5_vl", depth=3)       # overrides of vision_config
    model = tiny_vision_model("qwen2_5_vl")
    folder = write_tiny_vision_model(tmp_path / "m", "qwen2_5_vl")
    row = image_row(config, [(4, 6), (2, 2)], seed=1)        # tokens, and two images of patches

Special tokens are the last of the vocabulary (64): image 60, video 61, start 62, end 63.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny import tiny_config

IMAGE, VIDEO, START, END = 60, 61, 62, 63

_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "initializer_range": 0.2,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "like": "qwen2",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "mrope_section": [1, 1, 2],
        "vision": {
            "depth": 3,
            "hidden_act": "silu",
            "window_size": 16,  # two by two merged patches
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        "like": "qwen3",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "mrope_section": [2, 1, 1],
        "vision": {
            "depth": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2],
        },
    },
}
_FAMILIES |= {
    family: {
        "like": f"{family}_text",
        "architectures": [architecture],
        "mrope_section": [1, 1, 1],
        "vision": {
            "depth": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "num_position_embeddings": 25,
        },
    }
    for family, architecture in (
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    )
}
# Images of six by six patches, averaged two by two: more tokens than the decoder's window.
_GEMMA3_VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_channels": 3,
    "patch_size": 4,
    "image_size": 24,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "vision_use_head": False,
}


def tiny_vision_config(family: str = "qwen2_5_vl", **vision: Any) -> dict[str, Any]:
    """A config.json as a dict; `vision` are keys of its vision_config."""
    if family == "gemma3":
        return _gemma3_config(vision)
    own = _FAMILIES[family]
    text = tiny_config(own["like"])
    theta = text.pop("rope_theta")
    for key in ("architectures", "tie_word_embeddings", "dtype"):
        del text[key]
    rope = {"rope_type": "default", "rope_theta": theta, "mrope_section": own["mrope_section"]}
    if "partial_rotary_factor" in text:
        del text["partial_rotary_factor"]
        rope["partial_rotary_factor"] = 0.75  # three pairs: one for each position
    return {
        "model_type": family,
        "architectures": own["architectures"],
        "dtype": "float32",
        "tie_word_embeddings": False,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "text_config": {
            **text,
            "model_type": f"{family}_text",
            "num_hidden_layers": 3,
            "rope_parameters": rope,
        },
        "vision_config": {"model_type": f"{family}_vision", **_VISION, **own["vision"], **vision},
    }


def _gemma3_config(vision: dict[str, Any]) -> dict[str, Any]:
    text = {k: v for k, v in tiny_config("gemma3_text").items() if v is not None}
    return {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "dtype": "float32",
        "tie_word_embeddings": True,
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
        "mm_tokens_per_image": 9,
        "text_config": {**text, "model_type": "gemma3_text"},
        "vision_config": {**_GEMMA3_VISION, **vision},
    }


def tiny_vision_model(family: str = "qwen2_5_vl", seed: int = 0, **vision: Any):
    """Our module on the CPU in float32, biases and norms moved off 0 and 1."""
    import torch

    from areal.models.hf_io import build_model

    config = tiny_vision_config(family, **vision)
    model = build_model(config, device="cpu", dtype=torch.float32)
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def write_tiny_vision_model(
    folder: str | Path, family: str = "qwen2_5_vl", seed: int = 0, **vision: Any
) -> Path:
    """Write config.json and safetensors (no tokenizer) into `folder`, made when absent."""
    from areal.models.hf_io import save_hf

    model = tiny_vision_model(family, seed, **vision)
    save_hf(model.named_hf_tensors(), tiny_vision_config(family, **vision), folder)
    return Path(folder)


@dataclass(frozen=True)
class ImageRow:
    tokens: Any  # [S] int64
    pixels: Any  # [P, values]
    grids: Any  # [N, 3] int64

    def multi_modal_input(self) -> dict[str, Any]:
        if not len(self.grids):
            return {}
        return {"pixel_values": self.pixels, "image_grid_thw": self.grids}

    def pictures(self, patch_size: int, merge_size: int = 2) -> Any:
        """[N, C, height, width], of images of one size whose patches have no copies in time."""
        _, height, width = self.grids[0].tolist()
        shape = (height // merge_size, width // merge_size, merge_size, merge_size)
        patches = self.pixels.view(len(self.grids), *shape, -1, patch_size, patch_size)
        return patches.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(
            len(self.grids), -1, height * patch_size, width * patch_size
        )


def image_row(
    config: dict[str, Any], sizes: list[tuple[int, int]], *, seed: int, text: int = 5
) -> ImageRow:
    """Images of `sizes` (height, width in patches), with `text` random tokens around each. A family
    whose images have one size has as many of that."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    vision = config["vision_config"]
    merged = vision.get("spatial_merge_size", 2) ** 2
    values = 3 * vision.get("temporal_patch_size", 1) * vision["patch_size"] ** 2
    if "image_size" in vision:
        sizes = [(vision["image_size"] // vision["patch_size"],) * 2] * len(sizes)

    def words(count: int) -> list[int]:
        return torch.randint(2, IMAGE, (count,), generator=generator).tolist()

    tokens = words(text)
    for height, width in sizes:
        tokens += [START, *[IMAGE] * (height * width // merged), END, *words(text)]
    num_patches = sum(height * width for height, width in sizes)
    return ImageRow(
        torch.tensor(tokens),
        torch.randn(num_patches, values, generator=generator),
        torch.tensor([[1, *size] for size in sizes], dtype=torch.int64).view(-1, 3),
    )
