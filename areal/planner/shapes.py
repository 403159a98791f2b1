"""Numbers in a decoder's weights, cache and activations. In: `DecoderArgs`; out: counts, not bytes.

The count of weights is exact. Of the activations: what a compiled block keeps for its backward
pass, and what an uncompiled one keeps; both follow the code of models/common. Attention of each
kind: layers.py; vision towers: towers.py.

Legend: D model dim, Q query width (heads x head dim), K key or value width, F feed-forward width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from areal.models.common.args import DecoderArgs
from areal.planner.layers import AttentionCounts, attention_counts
from areal.planner.towers import tower_weights

# What the counts describe. A family that was registered from outside is not among them.
FAMILIES = (
    "deepseek_v2",
    "gemma3",
    "gemma3_text",
    "llama",
    "mistral",
    "qwen2",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_vl",
)


TORCH_PREFILL = 4096  # tokens of a prefill without kernels of our own


class UnplannableError(ValueError):
    """The counts do not describe this model."""


@dataclass(frozen=True)
class Shape:
    """Counts of one model; UnplannableError for a family they do not describe."""

    args: DecoderArgs

    def __post_init__(self) -> None:
        if self.args.model_type not in FAMILIES:
            raise UnplannableError(
                f"model_type {self.args.model_type!r} cannot be planned: known are "
                f"{', '.join(FAMILIES)}"
            )

    def has_kernels(self, tp: int, is_fp8: bool) -> bool:
        """Whether the native engine's own kernels compute the model; else torch does."""
        return self.args.delta is None or (tp == 1 and not is_fp8)

    @property
    def num_layers(self) -> int:
        return self.args.n_layers

    @property
    def query_width(self) -> int:
        return self.args.n_heads * self.args.head_dim

    @property
    def kv_width(self) -> int:
        return self.args.n_kv_heads * self.args.head_dim

    @cached_property
    def attention(self) -> tuple[AttentionCounts, ...]:
        """Of each layer."""
        return tuple(attention_counts(self.args, layer) for layer in range(self.num_layers))

    @cached_property
    def num_weights(self) -> int:
        blocks = sum(map(self.block_weights, range(self.num_layers)))
        return self.root_weights + blocks + self.tower_weights

    @cached_property
    def tower_weights(self) -> int:
        return tower_weights(self.args.vision)

    @cached_property
    def root_weights(self) -> int:
        """Embedding, head and last norm: all that is in no block."""
        args = self.args
        head = 0 if args.tie_word_embeddings else self.head_weights
        if args.is_critic:
            head = args.dim
        return args.vocab_size * args.dim + head + args.dim

    @property
    def head_weights(self) -> int:
        """Of the product that makes the logits; a tied one is the embedding."""
        return self.args.dim if self.args.is_critic else self.args.vocab_size * self.args.dim

    def block_weights(self, layer: int) -> int:
        return self.shared_weights(layer) + self.expert_weights(layer)

    def shared_weights(self, layer: int) -> int:
        """Of a block, without its experts."""
        args, attention = self.args, self.attention[layer]
        total = attention.matrices + attention.vectors + (4 if args.out_norms else 2) * args.dim
        if args.is_sparse(layer):
            moe = args.expert_args
            shared = 3 * moe.shared_dim + moe.shared_gate
            return total + (moe.num_experts + shared) * args.dim
        biases = (2 * args.hidden_dim + args.dim) * args.mlp_bias
        return total + biases + 3 * args.dim * args.hidden_dim

    def expert_weights(self, layer: int) -> int:
        """Of all experts of a block."""
        if not self.args.is_sparse(layer):
            return 0
        return self.args.expert_args.num_experts * self.one_expert

    @property
    def one_expert(self) -> int:
        return 3 * self.args.dim * self.args.expert_args.hidden_dim

    @cached_property
    def all_expert_weights(self) -> int:
        return sum(map(self.expert_weights, range(self.num_layers)))

    @cached_property
    def used_by_token(self) -> float:
        """Weights of the blocks' matrices that one token is multiplied with."""
        moe = self.args.moe
        return self._shared_matrices + (0 if moe is None else self._experts(moe.top_k))

    def read_by_rows(self, num_rows: float) -> float:
        """Weights of the blocks' matrices that `num_rows` tokens read together. Tokens choose
        their experts independently and evenly."""
        moe = self.args.moe
        if moe is None:
            return self._shared_matrices
        chosen = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** num_rows)
        return self._shared_matrices + self._experts(chosen)

    def _experts(self, number: float) -> float:
        return len(self.args.expert_args.layers) * number * self.one_expert

    @cached_property
    def _shared_matrices(self) -> float:
        """Of all blocks, without experts."""
        args = self.args
        sparse = 0 if args.moe is None else len(args.moe.layers)
        total = sum(one.matrices for one in self.attention)
        total += (self.num_layers - sparse) * 3 * args.dim * args.hidden_dim
        if args.moe is not None:
            total += sparse * (args.moe.num_experts + 3 * args.moe.shared_dim) * args.dim
        return float(total)

    def cached_per_token(self, tp: int, device: str) -> float:
        """Numbers of a token that each of `tp` ranks of a server caches in all layers: keys and
        values of its heads. For latent attention kernels cache one vector for all heads, which
        every rank has whole; torch, on a CPU, keys and values of the heads."""
        if self.args.latent is not None and device == "cuda":
            return self.num_layers * self.args.latent.cached_dim
        return sum(one.cached for one in self.attention) / tp

    @cached_property
    def kv_heads_in_layers(self) -> int:
        return sum(one.heads for one in self.attention)

    @cached_property
    def state_per_sequence(self) -> int:
        """Numbers of recurrent layers, float32."""
        return sum(one.state for one in self.attention)

    @cached_property
    def attention_width(self) -> int:
        """Q of all layers that attend."""
        return self.query_width * len(self.args.attention_layers)

    @cached_property
    def mixing(self) -> float:
        """Multiplications per token of recurrent layers, in float32."""
        return sum(one.mixing for one in self.attention)

    def cached_tokens_read(self, context: float) -> float:
        """Tokens whose keys and values a decode step reads, averaged over layers: of layers with a
        window at most as many."""
        args = self.args
        if not args.windows:
            return context
        windows = [args.window(layer) for layer in range(self.num_layers)]
        return sum(context if w is None else min(context, w) for w in windows) / self.num_layers

    def attention_pairs(self, length: float) -> float:
        """(query, key) pairs of one causal sequence, averaged over layers."""
        args, total = self.args, 0.0
        if not args.windows:
            return length**2 / 2
        for layer in range(self.num_layers):
            window = args.window(layer)
            outside = 0.0 if window is None else max(length - window, 0.0)
            total += (length**2 - outside**2) / 2
        return total / self.num_layers

    def feed_forward_width(self, layer: int) -> int:
        """F of a token: the experts it uses together, with a shared one."""
        moe = self.args.moe
        if moe is None or not self.args.is_sparse(layer):
            return self.args.hidden_dim
        return moe.top_k * moe.hidden_dim + moe.shared_dim

    @cached_property
    def mean_feed_forward(self) -> float:
        """F, averaged over layers."""
        return sum(map(self.feed_forward_width, range(self.num_layers))) / self.num_layers

    def kept(self, mode: str) -> float:
        """Numbers kept per token for the backward pass, by all layers.

        compiled: inputs and norms of both halves (4 D), queries and attention's output (2 Q), keys
        and values (2 K), gate, up and their product (3 F). none: also the activation of the gate.
        selective: the input, and results of products and attention. full: the input. Norms of
        heads also keep what they normalize, norms after attention and feed-forward too.
        """
        return self._kept[mode]

    @cached_property
    def _kept(self) -> dict[str, float]:
        return {
            mode: sum(self.kept_by_block(mode, layer) for layer in range(self.num_layers))
            for mode in ("none", "compiled", "selective", "full")
        }

    def kept_by_block(self, mode: str, layer: int) -> float:
        """The same, by one layer."""
        args, attention = self.args, self.attention[layer]
        dim, width, is_sparse = args.dim, self.feed_forward_width(layer), args.is_sparse(layer)
        if mode == "full":
            return dim
        if mode == "selective":
            kept = 3 * dim + attention.kept_products + 2 * width
            return kept + args.expert_args.top_k * dim if is_sparse else kept
        kept = 4 * dim + attention.kept + 2 * dim * args.out_norms
        if mode == "none" and args.zero_centered_norms:
            # These norms keep their inputs in float32.
            kept += (4 if args.out_norms else 2) * dim
            kept += (self.query_width + self.kv_width) * args.qk_norm * (attention.cached > 0)
        if is_sparse:
            # Never compiled; rows of experts in and out, float32 for the router.
            moe = args.expert_args
            return kept + 4 * width + 2 * moe.top_k * dim + 2 * dim + 2 * moe.num_experts
        return kept + (3 if mode == "compiled" else 4) * width

    def recomputed(self, mode: str, again: str) -> float:
        """Numbers per token that a block with the most of them computes again: what it would keep
        in mode `again`, beyond what it keeps in `mode`."""
        layers = range(self.num_layers)
        return max(self.kept_by_block(again, i) - self.kept_by_block(mode, i) for i in layers)

    @cached_property
    def widest_feed_forward(self) -> int:
        return max(map(self.feed_forward_width, range(self.num_layers)))
