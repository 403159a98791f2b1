"""Where images are in a sequence, and the rotary positions of a sequence with images.

With M-RoPE each token of a sequence has a position in time, one in height and one in width.

Text advances all three by one per token. The tokens of an image share a position in time and have
their row and column in the others; the text behind it goes on after the largest of them. So a
sequence with images ends at a smaller position than its length: `position_delta` is the
difference, by which decoding corrects the positions of new tokens.

Numpy only: the engine's scheduler asks it too.

Shape legend: S tokens of a sequence, N images.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal.models.vision.args import VisionArgs


def rotary_positions(
    tokens: Sequence[int] | np.ndarray,
    grids: Sequence[Sequence[int]] | np.ndarray,
    args: VisionArgs,
) -> np.ndarray | None:
    """`mrope_positions`, or None where they are those of text: each token's index."""
    return mrope_positions(tokens, grids, args) if args.has_axes else None


def mrope_positions(
    tokens: Sequence[int] | np.ndarray,
    grids: Sequence[Sequence[int]] | np.ndarray,
    args: VisionArgs,
) -> np.ndarray:
    """[3, S] int64 (time, height, width) of one sequence whose images have the `grids` [N, 3].

    ValueError if the runs of image tokens are not those of the images.
    """
    tokens_S = np.asarray(tokens)
    spans = image_spans(tokens_S, grids, args)
    positions_3S = np.empty((3, len(tokens_S)), np.int64)
    position = done = 0
    for (start, end), grid in zip(spans, grids, strict=True):
        _count_up(positions_3S[:, done:start], position)
        position += start - done
        height, width = int(grid[1]) // args.merge_size, int(grid[2]) // args.merge_size
        row, column = np.divmod(np.arange(height * width), width)
        positions_3S[:, start:end] = position
        positions_3S[1, start:end] += row
        positions_3S[2, start:end] += column
        position += max(height, width)
        done = end
    _count_up(positions_3S[:, done:], position)
    return positions_3S


def _count_up(positions_3S: np.ndarray, first: int) -> None:
    positions_3S[:] = np.arange(first, first + positions_3S.shape[1])


def position_delta(positions_3S: np.ndarray) -> int:
    """Position of the next token minus its index in the sequence; 0 without images, else below."""
    return int(positions_3S.max()) + 1 - positions_3S.shape[1] if positions_3S.size else 0


def last_visible(length: int, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """[S]: the last position that each token sees where tokens of an image see all of it."""
    last_S = np.arange(length)
    for start, end in spans:
        last_S[start:end] = end - 1
    return last_S


def image_spans(
    tokens: Sequence[int] | np.ndarray,
    grids: Sequence[Sequence[int]] | np.ndarray,
    args: VisionArgs,
) -> list[tuple[int, int]]:
    """(start, end) of each image's tokens in a sequence."""
    places = np.flatnonzero(np.asarray(tokens) == args.image_token_id)
    spans, used = [], 0
    for number, grid in enumerate(grids):
        args.check_grid(grid)
        length = args.num_tokens(grid)
        own = places[used : used + length]
        if len(own) < length or own[-1] - own[0] != length - 1:
            raise ValueError(
                f"image {number} of a sequence has {length} tokens by its image_grid_thw "
                f"{[int(size) for size in grid]}, and the sequence has {len(own)} in a row for "
                f"it: give input_ids one image token ({args.image_token_id}) for each"
            )
        if args.is_bidirectional and spans and spans[-1][1] == own[0]:
            raise ValueError(
                f"images {number - 1} and {number} of a sequence touch, and the tokens of an image "
                "see all of it: enclose each by the tokens that start and end an image"
            )
        spans.append((int(own[0]), int(own[-1]) + 1))
        used += length
    if used != len(places):
        raise ValueError(
            f"a sequence has {len(places)} image tokens ({args.image_token_id}), and its "
            f"{len(grids)} images have {used}: pass an image for each placeholder"
        )
    return spans
