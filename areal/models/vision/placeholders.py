"""Image tokens of a prompt: one per merged patch, made from one per image where that is given.

Tokens that stand for images, or enclose them, are never sampled: the text around them would have no
image for them. Engines give them probability 0, and so does training (`never_sampled`).

A chat template writes one image token for each image; the decoder reads as many as the image has
merged patches. `expand_placeholders` takes either form and returns the second. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal.models.vision.args import VisionArgs


def never_sampled(args: VisionArgs | None, vocab_size: int) -> list[int]:
    """Tokens of probability 0; none without a vision tower."""
    return [] if args is None else [t for t in args.placeholder_ids if t < vocab_size]


def expand_placeholders(
    tokens: Sequence[int], grids: Sequence[Sequence[int]], args: VisionArgs
) -> list[int]:
    """ValueError unless `tokens` has an image token for each image, or for each merged patch."""
    image = args.image_token_id
    counts = [args.num_tokens(grid) for grid in grids]
    found = sum(token == image for token in tokens)
    if found == sum(counts):  # one per patch; `image_spans` checks that they are in order
        return list(tokens)
    if found != len(grids):
        raise ValueError(
            f"input_ids has {found} image tokens ({image}) for {len(grids)} images: expected "
            f"{len(grids)}, one for each, or {sum(counts)}, one for each of their merged patches"
        )
    left = iter(counts)
    return [token for given in tokens for token in [given] * (next(left) if given == image else 1)]
