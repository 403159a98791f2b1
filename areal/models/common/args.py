"""Shape and options of a decoder, read from a parsed Hugging Face config.json.

In: the dict of a config.json, old style (`rope_theta` + `rope_scaling`) or transformers 5 style
(`rope_parameters`). Out: frozen args the modules are built from. What the modules cannot compute
exactly (an unknown activation or rope type, a window the family does not have) is refused here, so
that every model that builds agrees with transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from areal.models.vision.args import VisionArgs

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeArgs:
    """Rotary frequencies; the fields below `theta` are used by the scaled kinds only."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    attention_factor: float | None = None  # yarn: multiplies cos and sin
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    # M-RoPE: which position (0 time, 1 height, 2 width) turns each pair; (): there is only one.
    axes: tuple[int, ...] = ()

    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> RopeArgs:
        given = dict(hf.get("rope_scaling") or {}) | dict(hf.get("rope_parameters") or {})
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ROPE_KINDS:
            raise ValueError(
                f"rope type {kind!r} is not supported: expected one of {', '.join(ROPE_KINDS)}. "
                "Change rope_parameters (rope_scaling) in the model's config.json"
            )
        partial = given.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1.0):
            raise ValueError(
                f"partial_rotary_factor must be 1.0 (rotate whole heads), got {partial}"
            )
        own = {f.name for f in fields(cls)}
        values = {key: value for key, value in given.items() if key in own and value is not None}
        values["theta"] = given.get("rope_theta") or hf.get("rope_theta") or 10000.0
        if kind != "default":
            _require_scaling_keys(kind, values, hf)
        return cls(kind=kind, **values)

    def yarn_scale(self, weight: float) -> float:
        """How much attention is sharpened for a context extended by `factor`."""
        return 1.0 if self.factor <= 1 else 1.0 + 0.1 * weight * math.log(self.factor)


def _require_scaling_keys(kind: str, values: dict[str, Any], hf: Mapping[str, Any]) -> None:
    """Fill in the keys that transformers derives; ValueError for those still missing."""
    max_positions = hf.get("max_position_embeddings")
    original = hf.get("original_max_position_embeddings") or max_positions
    if original is not None:
        values.setdefault("original_max_position_embeddings", original)
    if kind == "yarn" and "factor" not in values and max_positions is not None:
        values["factor"] = max_positions / values["original_max_position_embeddings"]
    required = {
        "linear": ["factor"],
        "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
        "yarn": ["factor", "original_max_position_embeddings"],
    }[kind]
    missing = [key for key in required if key not in values]
    if missing:
        raise ValueError(
            f"rope type {kind!r} needs {', '.join(missing)}: "
            "add to rope_parameters (rope_scaling) in the model's config.json"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEArgs:
    """Mixture of experts: each token uses a few of many feed-forwards."""

    num_experts: int
    top_k: int  # experts per token
    hidden_dim: int  # of one expert
    norm_topk_prob: bool  # the weights of a token's experts sum to 1
    layers: frozenset[int]  # indices of the layers with experts; the others are dense
    expert_bias: bool = False  # choose by probability plus a bias that balances the load
    shared_dim: int = 0  # hidden dim of a feed-forward that every token uses besides; 0: none
    num_groups: int = 1  # of consecutive experts
    top_groups: int = 1  # groups per token: those with the most probable experts
    weight_scale: float = 1.0  # factor on the weights of a token's experts
    shared_gate: bool = False  # the shared feed-forward is weighed by a sigmoid of the token

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok must be from 1 to num_experts ({self.num_experts}), "
                f"got {self.top_k}"
            )
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"n_group must divide the {self.num_experts} experts, got {self.num_groups}"
            )
        num_choosable = self.num_experts // self.num_groups * self.top_groups
        if not self.top_k <= num_choosable <= self.num_experts:
            raise ValueError(
                f"topk_group must be from 1 to n_group ({self.num_groups}), and its groups must "
                f"hold num_experts_per_tok ({self.top_k}) experts, got {self.top_groups}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentArgs:
    """Multi-head latent attention: keys and values of all heads are products of one short vector
    per token, and only a part of each head, with one key for all of them, is rotated."""

    q_rank: int | None  # length of such a vector for queries; None: they are one product
    kv_rank: int  # length of the vector of keys and values
    plain_dim: int  # of a head of queries and keys, not rotated
    rope_dim: int  # of a head of queries and keys, rotated
    value_dim: int  # of a head of values

    @property
    def cached_dim(self) -> int:
        """Numbers of a token that keys and values of all heads follow from: the vector, and the
        rotated part of all keys."""
        return self.kv_rank + self.rope_dim

    def __post_init__(self) -> None:
        if self.rope_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim must be even to be rotated in pairs, got {self.rope_dim}"
            )
        if self.value_dim > self.plain_dim + self.rope_dim:
            raise ValueError(
                f"v_head_dim must be at most qk_nope_head_dim + qk_rope_head_dim "
                f"({self.plain_dim + self.rope_dim}), got {self.value_dim}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaArgs:
    """Gated delta rule (delta_rule.py): layers that keep a matrix per head and sequence in place of
    keys and values. The other layers of such a model have gated attention."""

    layers: frozenset[int]  # indices of the layers with it
    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int  # of a head
    conv_size: int  # tokens that the convolution before it sees, itself included

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads ({self.num_value_heads}) must be a multiple of "
                f"linear_num_key_heads ({self.num_key_heads})"
            )
        if self.conv_size < 2:
            raise ValueError(f"linear_conv_kernel_dim must be at least 2, got {self.conv_size}")

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of queries, keys and values of all heads."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class DecoderArgs:
    """A decoder: blocks of attention (grouped-query, or latent) and a gated feed-forward, dense or
    sparse."""

    model_type: str
    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    norm_eps: float
    rope: RopeArgs
    max_position_embeddings: int
    tie_word_embeddings: bool
    zero_centered_norms: bool = False  # norms multiply by 1 + weight
    out_norms: bool = False  # also after attention and feed-forward, before the residual add
    qk_norm: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"  # of the feed-forward: a name in moe.ACTIVATIONS
    embedding_scale: float = 1.0
    score_scale: float | None = None  # of attention scores; None: head_dim ** -0.5
    windows: tuple[int | None, ...] = ()  # how many tokens each layer sees; None, or (): all
    window_rope: RopeArgs | None = None  # rope of layers with a window; None: as the others
    logit_softcap: float | None = None  # logits = cap * tanh(logits / cap)
    moe: MoEArgs | None = None
    latent: LatentArgs | None = None  # latent attention; `head_dim` is that of queries and keys
    delta: DeltaArgs | None = None  # some layers have a recurrent state instead of attention
    rotated_dim: int | None = None  # leading dims of a head that are rotated; None: all
    vision: VisionArgs | None = None  # a tower for images
    initializer_range: float = 0.02
    is_critic: bool = False  # a score head in place of the LM head

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.n_heads}) must be a multiple of "
                f"num_key_value_heads ({self.n_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even to be rotated in pairs, got {self.head_dim}")
        if self.windows and len(self.windows) != self.n_layers:
            raise ValueError(
                f"layer_types must name all {self.n_layers} layers, got {len(self.windows)}"
            )

    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> DecoderArgs:
        """From a parsed config.json; each family has its own."""
        raise NotImplementedError(f"{cls.__name__} reads no config.json")

    @property
    def expert_args(self) -> MoEArgs:
        """`moe`, of a model that has experts."""
        assert self.moe is not None, f"this {self.model_type} has no experts"
        return self.moe

    @property
    def latent_args(self) -> LatentArgs:
        """`latent`, of a model that has such attention."""
        assert self.latent is not None, f"this {self.model_type} has no latent attention"
        return self.latent

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale

    @property
    def rope_dim(self) -> int:
        """How much of a head is rotated."""
        if self.latent is not None:
            return self.latent.rope_dim
        return self.rotated_dim or self.head_dim

    @property
    def delta_args(self) -> DeltaArgs:
        """`delta`, of a model that has such layers."""
        assert self.delta is not None, f"this {self.model_type} has no recurrent layers"
        return self.delta

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that cache keys and values."""
        recurrent = frozenset() if self.delta is None else self.delta.layers
        return tuple(layer for layer in range(self.n_layers) if layer not in recurrent)

    @property
    def vision_args(self) -> VisionArgs:
        """`vision`, of a model that has a tower."""
        assert self.vision is not None, f"this {self.model_type} has no vision tower"
        return self.vision

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def is_sparse(self, layer: int) -> bool:
        return self.moe is not None and layer in self.moe.layers


def share_of(args: DecoderArgs, num_ranks: int) -> DecoderArgs:
    """Args of one of `num_ranks` shards. ValueError if the model does not divide evenly."""
    if args.delta is not None:
        raise ValueError(
            f"tensor parallelism over {num_ranks} ranks: layers with a recurrent state "
            f"({args.model_type}) are not cut; serve copies of the model with d"
        )
    counts = {"num_key_value_heads": args.n_kv_heads, "intermediate_size": args.hidden_dim}
    moe = args.moe
    if moe is not None:
        counts["moe_intermediate_size"] = moe.hidden_dim
        moe = replace(
            moe,
            hidden_dim=moe.hidden_dim // num_ranks,
            shared_dim=moe.shared_dim // num_ranks,
        )
    for key, count in counts.items():
        if count % num_ranks:
            raise ValueError(
                f"tensor parallelism over {num_ranks} ranks: {key} of the model's config.json "
                f"must be a multiple of it, got {count}; choose another number of ranks"
            )
    return replace(
        args,
        n_heads=args.n_heads // num_ranks,
        n_kv_heads=args.n_kv_heads // num_ranks,
        hidden_dim=args.hidden_dim // num_ranks,
        moe=moe,
    )


def common_decoder_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `DecoderArgs` whose config.json keys mean the same in every family."""
    _refuse_unsupported(hf)
    heads = _size(hf, "num_attention_heads")
    dim = _size(hf, "hidden_size")
    return {
        "model_type": _required(hf, "model_type"),
        "vocab_size": _size(hf, "vocab_size"),
        "dim": dim,
        "n_layers": _size(hf, "num_hidden_layers"),
        "n_heads": heads,
        "n_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or dim // heads,
        "hidden_dim": _required(hf, "intermediate_size"),
        "norm_eps": hf.get("rms_norm_eps", 1e-6),
        "rope": RopeArgs.from_hf_config(hf),
        "max_position_embeddings": _required(hf, "max_position_embeddings"),
        "tie_word_embeddings": hf.get("tie_word_embeddings", False),
        "initializer_range": hf.get("initializer_range", 0.02),
    }


def _required(hf: Mapping[str, Any], key: str) -> Any:
    if hf.get(key) is None:
        raise ValueError(f"the model's config.json has no {key!r}: every decoder needs it")
    return hf[key]


def _size(hf: Mapping[str, Any], key: str) -> int:
    value = _required(hf, key)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"the model's config.json has {key} {value!r}: expected a positive number")
    return value


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act must be 'silu' (SwiGLU), got {activation!r}")
    if hf.get("use_sliding_window") or "sliding_attention" in (hf.get("layer_types") or ()):
        raise ValueError(
            "sliding window attention is not supported: "
            "set use_sliding_window to false in the model's config.json"
        )
    if hf.get("quantization_config"):
        raise ValueError(
            "quantized weights are not supported: use the unquantized checkpoint of this model"
        )
