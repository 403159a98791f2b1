"""Numbers in a vision tower's weights, products and activations. In: `VisionArgs`; out: counts.

The count of weights is exact. Activations follow the code of models/vision, not compiled; they are
of one image token of the decoder, for which the tower computes `merge_size` ** 2 patches.

Legend: D model dim of the tower, F feed-forward width.
"""

from __future__ import annotations

from areal.models.vision.args import VisionArgs


def tower_weights(args: VisionArgs | None) -> int:
    """Of a vision tower with its mergers; 0 without one."""
    if args is None:
        return 0
    dim, width, joined = args.dim, args.hidden_dim, args.dim * args.merge_size**2
    is_gated = args.window > 0  # Qwen2.5-VL; the other kinds have layer norms, which have biases
    block = 4 * dim * dim + 4 * dim + (2 if is_gated else 4) * dim
    block += 3 * dim * width + 2 * width + dim if is_gated else 2 * dim * width + width + dim
    total = args.n_layers * block + dim * args.patch_values
    if args.image_side:  # Gemma 3: averages in place of a merger, between two norms
        return total + dim + args.image_side**2 * dim + 3 * dim + dim * args.out_dim
    merger = joined * joined + joined + joined * args.out_dim + args.out_dim
    total += merger
    if is_gated:
        return total + dim
    deeper = len(args.deepstack_layers) * (merger + 2 * joined)
    return total + 2 * dim + dim + args.position_side**2 * dim + deeper


def tower_products(args: VisionArgs) -> int:
    """Weights that the patches of one image token are multiplied with, all together."""
    patches, dim, width = args.merge_size**2, args.dim, args.hidden_dim
    block = 4 * dim * dim + (3 if args.window else 2) * dim * width
    total = patches * (args.n_layers * block + dim * args.patch_values)
    if args.image_side:
        return total + dim * args.out_dim
    joined = patches * dim
    return total + (1 + len(args.deepstack_layers)) * joined * (joined + args.out_dim)


def tower_pairs(args: VisionArgs, image_tokens: float) -> float:
    """(query, key) pairs of patches, summed over layers, of `image_tokens` that are one image, or
    as many as these are where images have one size."""
    patches = args.merge_size**2
    whole = args.num_tokens(args.whole_grid) if args.image_side else image_tokens
    full = len(args.full_layers) if args.window else args.n_layers
    seen = full * whole + (args.n_layers - full) * min(args.window**2, whole)
    return patches**2 * image_tokens * seen


def tower_kept(args: VisionArgs, mode: str) -> float:
    """Numbers kept for the backward pass, of one image token.

    A block keeps its input, both norms, the sum between them, queries, keys and values in one
    tensor, queries and keys rotated, attention's output; of a gated feed-forward four widths, else
    two. selective: the input, and results of products and attention. full: the input.
    """
    dim = args.dim
    # Pixels, float32; the last norm, and what mergers keep.
    ends = args.patch_values + dim + (dim if args.image_side else 3 * dim)
    mergers = len(args.deepstack_layers) * 4 * dim
    return args.merge_size**2 * (args.n_layers * _block_kept(args, mode) + ends + mergers)


def _block_kept(args: VisionArgs, mode: str) -> float:
    """By one block, of one patch."""
    dim, width = args.dim, args.hidden_dim
    if mode == "full":
        return dim
    if mode == "selective":
        return 7 * dim + (2 if args.window else 1) * width
    rotated = 0 if args.rope_theta is None else 2 * dim
    return 8 * dim + rotated + (4 if args.window else 2) * width


def tower_backward(args: VisionArgs, mode: str) -> float:
    """Numbers that a block going backward computes again, and gradients of its activations; of
    one image token."""
    again = _block_kept(args, "none") - _block_kept(args, mode) if mode != "compiled" else 0
    return args.merge_size**2 * (again + (2 if args.window else 1) * args.hidden_dim)


def tower_forward(args: VisionArgs) -> float:
    """Numbers of one block that exist at once, with its input and the pixels; without gradients."""
    block = 8 * args.dim + (3 if args.window else 2) * args.hidden_dim
    return args.merge_size**2 * (block + args.patch_values)
