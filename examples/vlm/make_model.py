"""Writes a tiny random model shaped like Qwen2.5-VL, with a tokenizer of a few words.

python examples/vlm/make_model.py runs/vlm/tiny_model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from areal.models.hf_io import build_model, save_hf
from areal.utils.fs import atomic_folder
from examples.vlm.shapes import COLOURS, QUESTION, SIDE

# Images under the names that Qwen's tokenizers have: vLLM looks for them.
SPECIAL = (
    *("<pad>", "<eos>", "<unk>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
PATCH = 8
CHAT_TEMPLATE = """
{%- for message in messages %}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}
{%- endfor %}"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a tiny random vision model.")
    parser.add_argument("folder", type=Path)
    write_model(parser.parse_args().folder)


def write_model(folder: Path, seed: int = 0) -> None:
    with atomic_folder(folder, private=False) as scratch:
        ids = write_tokenizer(scratch)
        (scratch / "preprocessor_config.json").write_text(json.dumps(image_config(), indent=2))
        config = model_config(ids)
        model = build_model(config, device="cpu", dtype=torch.float32)
        model.init_weights(seed)
        save_hf(model.named_hf_tensors(), config, scratch)


def write_tokenizer(folder: Path) -> dict[str, int]:
    """One token per word; returns them."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *QUESTION.split(), *COLOURS]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(str(folder))
    return {word: index for index, word in enumerate(words)}


def image_config() -> dict[str, Any]:
    """Images as they are drawn: four by four patches, merged to four tokens."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": (2 * PATCH) ** 2,
        "max_pixels": SIDE**2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def model_config(ids: dict[str, int]) -> dict[str, Any]:
    width = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.08}
    text = {
        "model_type": "qwen2_5_vl_text",
        **width,
        "vocab_size": len(ids),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        },
        "eos_token_id": ids["<eos>"],
        "pad_token_id": ids["<pad>"],
    }
    vision = {
        "model_type": "qwen2_5_vl",
        **width,
        "depth": 2,
        "num_heads": 4,
        "hidden_act": "silu",
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": SIDE,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 64,
    }
    return {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "dtype": "float32",
        "tie_word_embeddings": True,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": text,
        "vision_config": vision,
    }


if __name__ == "__main__":
    main()
