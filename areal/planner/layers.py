"""Numbers in the weights and activations of one layer's attention, of each kind.

In: `DecoderArgs`; out: counts, not bytes. Weights are exact; activations follow the
code of models/common, not compiled: what each kind keeps for its backward pass.

Legend: D model dim, Q query width (heads x head dim), K key or value width.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal.models.common.args import DecoderArgs

_CHUNK = 64  # tokens that the gated delta rule solves together


@dataclass(frozen=True, slots=True)
class AttentionCounts:
    """Of one layer, per token where activations are meant."""

    matrices: int  # weights that a token is multiplied with
    vectors: int  # norms and biases, and kernels of convolutions
    kept: float  # for the backward pass, beyond the layer's input and its norm
    kept_products: float  # of these, results of products and of attention
    cached: int = 0  # numbers of keys and values
    heads: int = 0  # key-value heads that have them
    state: int = 0  # float32 numbers of a sequence, in place of keys and values
    mixing: float = 0.0  # multiplications of the recurrence


def attention_counts(args: DecoderArgs, layer: int) -> AttentionCounts:
    if args.latent is not None:
        return _latent(args)
    if args.delta is not None and layer in args.delta.layers:
        return _delta(args)
    q, k, dim = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim, args.dim
    gate = q if args.delta is not None else 0  # of hybrids, the other layers have a gate
    norms, biases = 2 * args.head_dim * args.qk_norm, (q + gate + 2 * k) * args.qkv_bias
    # A gate keeps itself, its sigmoid and the product.
    return AttentionCounts(
        matrices=dim * (2 * q + gate + 2 * k),
        vectors=norms + biases + dim * args.attention_out_bias,
        kept=2 * q + 2 * k + (q + k) * args.qk_norm + 3 * gate,
        kept_products=2 * q + 2 * k + gate,
        cached=2 * k,
        heads=2 * args.n_kv_heads,
    )


def _latent(args: DecoderArgs) -> AttentionCounts:
    """Queries, keys and values of all heads are kept whole, values padded like keys."""
    sizes, heads, dim = args.latent_args, args.n_heads, args.dim
    q, values = heads * args.head_dim, heads * sizes.value_dim
    q_rank, kv_rank = sizes.q_rank or 0, sizes.kv_rank
    queries = dim * q if not q_rank else q_rank * (dim + q)
    short = kv_rank + sizes.rope_dim
    expanded = heads * sizes.plain_dim + values
    return AttentionCounts(
        matrices=queries + dim * short + kv_rank * expanded + values * dim,
        vectors=q_rank + kv_rank,
        kept=4 * q + values + short + kv_rank + 2 * q_rank,
        kept_products=2 * q + short + expanded + q_rank,
        cached=2 * q,
        heads=2 * heads,
    )


def _delta(args: DecoderArgs) -> AttentionCounts:
    """Gated delta rule, whose heads, systems and states are float32: two numbers each."""
    sizes, dim = args.delta_args, args.dim
    heads, channels, values = sizes.num_value_heads, sum(sizes.widths), sizes.widths[2]
    keys = heads * sizes.key_dim
    state = heads * sizes.key_dim * sizes.value_dim
    convolved = 5 * channels  # its input, the shifted ones, the sum before its activation
    systems = 6 * heads * _CHUNK
    whole = channels + 6 * keys + 5 * values + 2 * state / _CHUNK + systems
    products = 2 * heads * _CHUNK + 3 * values + state / _CHUNK
    pairs = heads * _CHUNK * (3 * sizes.key_dim + 2 * sizes.value_dim)
    return AttentionCounts(
        matrices=dim * (channels + 2 * values + 2 * heads),
        vectors=channels * sizes.conv_size + 2 * heads + sizes.value_dim,
        kept=convolved + 2 * whole + 5 * values,
        kept_products=channels + 2 * values + 2 * products,
        state=state,
        mixing=pairs + 3 * state,
    )
