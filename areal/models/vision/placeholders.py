"""Image tokens of a prompt: one per merged patch, made from one per image where that is given.

Tokens that stand for images, or enclose them, are never sampled: the text around them would have no
image for them. Engines give them probability 0, and so does training (`never_sampled`).

A chat template writes one token for each image; the decoder reads as many as the image has merged
patches. `expand_placeholders` takes either form and returns the second. Families differ: the token
of the template is the image token, which is repeated; or it is the one that starts an image
(`VisionArgs.starts_images`), after which come image tokens and the one that ends it, with an empty
line before and after. Line breaks that meet are one token there, as if the text had been written so
at once (`LineBreaks`). No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from areal.models.vision.args import VisionArgs


def never_sampled(args: VisionArgs | None, vocab_size: int) -> list[int]:
    """Tokens of probability 0; none without a vision tower."""
    return [] if args is None else [t for t in args.placeholder_ids if t < vocab_size]


def expand_placeholders(
    tokens: Sequence[int],
    grids: Sequence[Sequence[int]],
    args: VisionArgs,
    tokenizer: Any = None,
) -> list[int]:
    """ValueError unless `tokens` has what a template writes for each image, or an image token for
    each merged patch. `tokenizer`: of families that put line breaks around images."""
    image, single = args.image_token_id, args.template_token_id
    counts = [args.num_tokens(grid) for grid in grids]
    found = sum(token == image for token in tokens)
    if found == sum(counts):  # one per patch; `image_spans` checks that they are in order
        return list(tokens)
    if (image != single and found) or sum(token == single for token in tokens) != len(grids):
        others = "" if image == single else f" and {tokens.count(single)} that start one ({single})"
        raise ValueError(
            f"input_ids has {found} image tokens ({image}){others} for {len(grids)} images: "
            f"expected {len(grids)} of token {single}, one for each, or {sum(counts)} image "
            "tokens, one for each of their merged patches"
        )
    left = iter(counts)
    if not args.starts_images:
        return [t for given in tokens for t in [given] * (next(left) if given == image else 1)]
    if tokenizer is None:
        raise ValueError(
            f"input_ids has no image tokens ({image}): without a tokenizer only prompts with all "
            "of them are read; put its tokenizer.json into the model's folder"
        )
    return _expand_starts(tokens, counts, args, LineBreaks(tokenizer))


def _expand_starts(
    tokens: Sequence[int], counts: Sequence[int], args: VisionArgs, breaks: LineBreaks
) -> list[int]:
    expanded: list[int] = []
    left, pending = iter(counts), 0  # line breaks that are not written yet
    for token in tokens:
        if token in breaks.counts:
            pending += breaks.counts[token]
            continue
        if token == args.vision_start_token_id:
            expanded += breaks.ids(pending + _EMPTY_LINE)
            expanded += [token, *[args.image_token_id] * next(left), args.vision_end_token_id]
            pending = _EMPTY_LINE
            continue
        expanded += [*breaks.ids(pending), token]
        pending = 0
    return expanded + breaks.ids(pending)


_EMPTY_LINE = 2  # line breaks
_LONGEST = 31  # line breaks in one token, of the tokenizers that have such


class LineBreaks:
    """Runs of line breaks as a tokenizer writes them, some in one token."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def counts(self) -> dict[int, int]:
        """Line breaks in each token that has nothing else."""
        runs = {count: self.ids(count) for count in range(_LONGEST, 0, -1)}
        return {ids[0]: count for count, ids in runs.items() if len(ids) == 1}

    def ids(self, count: int) -> list[int]:
        if not count:
            return []
        return list(self._tokenizer.encode("\n" * count, add_special_tokens=False))
