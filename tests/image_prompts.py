"""Tiny models that see, with the rules of their image processor, and prompts with pictures.

folder = write_seeing_model(tmp_path / "m")            # patches of 4 x 4 pixels, 2 x 2 merged
text = picture(seed=1, height=16, width=24)            # base64 of a PNG: 2 x 3 = 6 image tokens
prompt = [5, 7, START, IMAGE, END, 9]                  # or six times IMAGE
"""

from __future__ import annotations

import base64
import io
import json
import string
from pathlib import Path

import numpy as np
from PIL import Image
from tiny_vision import END, IMAGE, START, VIDEO, write_tiny_vision_model

RULES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 64,
    "max_pixels": 4096,
}
SQUARE_RULES = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 24, "width": 24}}


def write_seeing_model(folder: str | Path, family: str = "qwen2_5_vl", seed: int = 0) -> Path:
    path = write_tiny_vision_model(folder, family, seed)
    rules = SQUARE_RULES if family == "gemma3" else RULES
    (path / "preprocessor_config.json").write_text(json.dumps(rules))
    return path


def picture(seed: int, height: int = 16, width: int = 24) -> str:
    rng = np.random.default_rng(seed)
    rgb = rng.integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(rgb).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


CHAT_TEMPLATE = """{%- for message in messages %}<s>
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}
{%- endif %}{% endfor %}{% endif %}</s>{% endfor %}
{%- if add_generation_prompt %}<s>{% endif %}"""


def write_tokenizer(folder: Path):
    """Letters, and the special tokens of the tiny model; its chat template shows images."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": 0, "</s>": 1, "<s>": 2, "<unk>": 3}
    special |= {"<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO}
    special |= {"<|vision_start|>": START, "<|vision_end|>": END}
    letters = {letter: 4 + i for i, letter in enumerate(string.ascii_letters[:50] + " \n.")}
    core = Tokenizer(models.WordLevel(letters | special, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=[name for name in special if name not in ("<pad>", "<unk>")],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(str(folder))
    return tokenizer
