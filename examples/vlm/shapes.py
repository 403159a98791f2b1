"""Pictures of one coloured shape, drawn here, and the question which colour it has.

`shapes_sft.yaml` and `shapes_grpo.yaml` name the loaders by import path; `make_model.py` writes
the model they start from. Shape, size, place and background vary, so that a colour has to be seen.
"""

from __future__ import annotations

import io
import random
from typing import Any

from PIL import Image, ImageDraw

from areal.dataset.chat_rows import Rows, wants_held_out
from areal.dataset.image_rows import ImageSFTRows

SIDE = 32  # pixels
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "yellow": (230, 210, 40),
    "purple": (150, 60, 200),
    "orange": (240, 140, 30),
}
QUESTION = "which colour ?"
_SHAPES = ("circle", "square", "triangle", "cross")
_SCALE = 4  # drawn larger and scaled down, for smooth edges


def load_rl(
    path: str, split: str, tokenizer: Any, max_length: int | None = None, num_rows: int = 2048
) -> Rows:
    """{"messages", "images", "answer"}; pictures of the test split are in no training split."""
    rng = random.Random(f"shapes {wants_held_out(split)}")
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    rows = []
    for _ in range(num_rows):
        colour = rng.choice(list(COLOURS))
        rows.append({"messages": messages, "images": [draw(colour, rng)], "answer": colour})
    return Rows(rows)


def load_sft(
    path: str,
    split: str,
    tokenizer: Any,
    max_length: int | None = None,
    num_rows: int = 2048,
    processor: Any = None,
) -> ImageSFTRows:
    """Any colour as the reply: they teach which words are answers, not what they mean."""
    rng = random.Random(f"guesses {split}")
    rows = load_rl(path, split, tokenizer, num_rows=num_rows)
    guesses = [{**row, "answer": rng.choice(list(COLOURS))} for row in rows]
    return ImageSFTRows(guesses, tokenizer, processor, str)


def colour_reward_fn(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **data: Any
) -> float:
    """1 when the reply is the colour and nothing else."""
    return float(completions.strip() == answer)


def draw(colour: str, rng: random.Random) -> bytes:
    """A PNG of a shape on a dark background."""
    side = SIDE * _SCALE
    image = Image.new("RGB", (side, side), tuple(rng.randrange(60) for _ in range(3)))
    radius = rng.uniform(0.2, 0.3) * side
    x, y = (rng.uniform(radius, side - radius) for _ in range(2))
    _draw_shape(ImageDraw.Draw(image), rng.choice(_SHAPES), x, y, radius, COLOURS[colour])
    buffer = io.BytesIO()
    image.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(buffer, format="PNG")
    return buffer.getvalue()


def _draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, fill: tuple[int, int, int]
) -> None:
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "square":
        pen.rectangle((x - 0.85 * r, y - 0.85 * r, x + 0.85 * r, y + 0.85 * r), fill=fill)
    elif shape == "triangle":
        pen.polygon(((x, y - r), (x - r, y + 0.8 * r), (x + r, y + 0.8 * r)), fill=fill)
    else:
        pen.rectangle((x - 0.35 * r, y - r, x + 0.35 * r, y + r), fill=fill)
        pen.rectangle((x - r, y - 0.35 * r, x + r, y + 0.35 * r), fill=fill)
