"""Shape and options of each family, read from config.json. Loads no torch: `areal check` asks it.

A class refuses what the family's modules do not compute exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal.models.common.args import (
    DecoderArgs,
    DeltaArgs,
    LatentArgs,
    MoEArgs,
    RopeArgs,
    common_decoder_fields,
)
from areal.models.vision.args import (
    VisionArgs,
    gemma3_vision,
    qwen2_5_vl_vision,
    qwen3_5_vision,
    qwen3_vl_vision,
)
from areal.utils.model_files import language_config

# config.json omits default values.
_GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_DEEPSEEK_V2_DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "moe_intermediate_size": 1407,
}
_QWEN35_DEFAULTS: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
}
_QWEN35_MOE_DEFAULTS: dict[str, Any] = _QWEN35_DEFAULTS | {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_WINDOW, _ALL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_QWEN2_5_VL_DEFAULTS: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_QWEN3_VL_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rope_theta": 5e5,
}
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")


@dataclass(frozen=True, kw_only=True)
class LlamaModelArgs(DecoderArgs):
    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> LlamaModelArgs:
        bias = hf.get("attention_bias", False)
        return cls(
            **common_decoder_fields(hf),
            qkv_bias=bias,
            attention_out_bias=bias,
            mlp_bias=hf.get("mlp_bias", False),
        )


@dataclass(frozen=True, kw_only=True)
class MistralModelArgs(DecoderArgs):
    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> MistralModelArgs:
        window = hf.get("sliding_window", 4096)  # transformers' default, which a file may omit
        plain = {key: value for key, value in hf.items() if key != "layer_types"}
        fields = common_decoder_fields({"num_key_value_heads": 8} | plain)
        return cls(**fields, windows=(window,) * fields["n_layers"] if window else ())


@dataclass(frozen=True, kw_only=True)
class Qwen2ModelArgs(DecoderArgs):
    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> Qwen2ModelArgs:
        return cls(**common_decoder_fields(hf), qkv_bias=True)


@dataclass(frozen=True, kw_only=True)
class Qwen2_5VLModelArgs(DecoderArgs):
    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> Qwen2_5VLModelArgs:
        """`hf` is whole: its text_config and vision_config, or the flat form of older files."""
        fields = common_decoder_fields(_text_config(hf, _QWEN2_5_VL_DEFAULTS))
        sections = _mrope_section(hf, default=(16, 24, 24))
        pairs = fields["head_dim"] // 2
        if sum(sections) != pairs:
            raise ValueError(
                f"mrope_section must add up to {pairs}, half of a head, got {list(sections)}"
            )
        axes = tuple(axis for axis, size in enumerate(sections) for _ in range(size))
        fields["rope"] = replace(fields["rope"], axes=axes)
        return cls(**fields, qkv_bias=True, vision=qwen2_5_vl_vision(hf, fields["dim"]))


def _text_config(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's keys of a config.json with a vision_config."""
    given = {key: value for key, value in language_config(hf).items() if value is not None}
    text = {**defaults, **given, "model_type": hf["model_type"]}
    # Either place of the key ties them, as in transformers.
    text["tie_word_embeddings"] = bool(
        hf.get("tie_word_embeddings") or text.get("tie_word_embeddings")
    )
    for key in ("rope_scaling", "rope_parameters"):
        rope = text.get(key)
        if rope and "mrope" in (rope.get("type"), rope.get("rope_type")):
            text[key] = {**rope, "rope_type": "default"}
    return text


def _mrope_section(hf: Mapping[str, Any], default: Sequence[int]) -> tuple[int, ...]:
    text = language_config(hf)
    given = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    sections = tuple(given.get("mrope_section") or default)
    if len(sections) != 3:
        raise ValueError(f"mrope_section must be three numbers, got {list(sections)}")
    return sections


@dataclass(frozen=True, kw_only=True)
class Qwen3ModelArgs(DecoderArgs):
    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> Qwen3ModelArgs:
        bias = hf.get("attention_bias", False)
        moe = _moe_args(hf) if hf.get("model_type") == "qwen3_moe" else None
        if moe is None and not hf.get("head_dim"):
            # The dense models' own default: heads wider than hidden_size / num_attention_heads.
            hf = {**hf, "head_dim": 128}
        fields = common_decoder_fields(hf)
        return cls(**fields, qk_norm=True, qkv_bias=bias, attention_out_bias=bias, moe=moe)


@dataclass(frozen=True, kw_only=True)
class Qwen3VLModelArgs(DecoderArgs):
    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> Qwen3VLModelArgs:
        """`hf` is whole: its text_config and vision_config."""
        text = _text_config(hf, _QWEN3_VL_DEFAULTS)
        fields, bias = common_decoder_fields(text), text.get("attention_bias", False)
        vision = qwen3_vl_vision(hf, fields["dim"])
        if len(vision.deepstack_layers) > fields["n_layers"]:
            raise ValueError(
                f"vision_config.deepstack_visual_indexes has {len(vision.deepstack_layers)} "
                f"entries, one for each of the first layers; num_hidden_layers is "
                f"{fields['n_layers']}"
            )
        sections = _mrope_section(hf, default=(24, 20, 20))
        axes = _interleaved_axes(sections, fields["head_dim"] // 2)
        fields["rope"] = replace(fields["rope"], axes=axes)
        return cls(**fields, qk_norm=True, qkv_bias=bias, attention_out_bias=bias, vision=vision)


def _interleaved_axes(sections: Sequence[int], num_pairs: int) -> tuple[int, ...]:
    """Every third pair turns with the row, another third with the column, as long as they last."""
    sizes = (0, *sections[1:])
    return tuple(pair % 3 if pair < 3 * sizes[pair % 3] else 0 for pair in range(num_pairs))


def _moe_args(hf: Mapping[str, Any]) -> MoEArgs:
    num_experts = hf.get("num_experts", hf.get("num_local_experts"))
    _require_expert_keys(
        {
            "num_experts": num_experts,
            "num_experts_per_tok": hf.get("num_experts_per_tok"),
            "moe_intermediate_size": hf.get("moe_intermediate_size"),
        }
    )
    step, dense = hf.get("decoder_sparse_step", 1), set(hf.get("mlp_only_layers") or ())
    layers = range(hf["num_hidden_layers"])
    return MoEArgs(
        num_experts=num_experts,
        top_k=hf["num_experts_per_tok"],
        hidden_dim=hf["moe_intermediate_size"],
        norm_topk_prob=hf.get("norm_topk_prob", False),
        layers=frozenset(i for i in layers if i not in dense and (i + 1) % step == 0),
        expert_bias=hf.get("use_expert_bias", False),
    )


def _require_expert_keys(values: Mapping[str, Any]) -> None:
    missing = [key for key, value in values.items() if value is None]
    if missing:
        raise ValueError(f"the model's config.json has no {', '.join(missing)}: experts need it")


@dataclass(frozen=True, kw_only=True)
class DeepseekV2ModelArgs(DecoderArgs):
    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> DeepseekV2ModelArgs:
        hf = _DEEPSEEK_V2_DEFAULTS | dict(hf)
        _refuse_unsupported_deepseek(hf)
        latent = LatentArgs(
            q_rank=hf["q_lora_rank"],
            kv_rank=hf["kv_lora_rank"],
            plain_dim=hf["qk_nope_head_dim"],
            rope_dim=hf["qk_rope_head_dim"],
            value_dim=hf["v_head_dim"],
        )
        head_dim = latent.plain_dim + latent.rope_dim
        fields = common_decoder_fields(hf | {"head_dim": head_dim})
        rope: RopeArgs = fields["rope"]
        sharpened = rope.yarn_scale(rope.mscale_all_dim or 0.0) if rope.kind == "yarn" else 1.0
        return cls(
            **fields,
            score_scale=head_dim**-0.5 * sharpened**2,
            moe=_deepseek_moe_args(hf),
            latent=latent,
        )


def _deepseek_moe_args(hf: Mapping[str, Any]) -> MoEArgs:
    _require_expert_keys({"num_experts_per_tok": hf.get("num_experts_per_tok")})
    in_groups = hf["topk_method"] == "group_limited_greedy"
    if in_groups:
        _require_expert_keys({key: hf.get(key) for key in ("n_group", "topk_group")})
    first, num_layers = hf["first_k_dense_replace"], hf["num_hidden_layers"]
    if first >= num_layers:
        raise ValueError(
            f"first_k_dense_replace must be below num_hidden_layers ({num_layers}), got {first}"
        )
    return MoEArgs(
        num_experts=hf["n_routed_experts"],
        top_k=hf["num_experts_per_tok"],
        hidden_dim=hf["moe_intermediate_size"],
        norm_topk_prob=False,
        layers=frozenset(range(first, num_layers)),
        shared_dim=hf["n_shared_experts"] * hf["moe_intermediate_size"],
        num_groups=hf["n_group"] if in_groups else 1,
        top_groups=hf["topk_group"] if in_groups else 1,
        weight_scale=hf["routed_scaling_factor"],
    )


def _refuse_unsupported_deepseek(hf: Mapping[str, Any]) -> None:
    method = hf["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method must be 'greedy' or 'group_limited_greedy', got {method!r}")
    heads, kv_heads = hf.get("num_attention_heads"), hf.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise ValueError(
            f"num_key_value_heads must be num_attention_heads ({heads}): latent attention has a "
            f"key for each head, got {kv_heads}"
        )
    # Of the last one transformers computes nothing, and other implementations differ.
    for key in ("attention_bias", "mlp_bias", "norm_topk_prob"):
        if hf.get(key):
            raise ValueError(f"{key} of a deepseek_v2 must be false, as in DeepSeek's checkpoints")


@dataclass(frozen=True, kw_only=True)
class Gemma3ModelArgs(DecoderArgs):
    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> Gemma3ModelArgs:
        """`hf` of a gemma3 is whole: its text_config and vision_config."""
        whole, text = hf, {**language_config(hf), "model_type": hf.get("model_type")}
        hf = _GEMMA3_DEFAULTS | {key: value for key, value in text.items() if value is not None}
        _refuse_unsupported(hf)
        bias = hf.get("attention_bias", False)
        kinds = hf.get("layer_types") or _layer_types(hf)
        ropes = _rope_configs(hf)
        plain = {key: value for key, value in hf.items() if key not in ("layer_types", *_ROPE_KEYS)}
        return cls(
            **common_decoder_fields(plain | ropes[_ALL]),
            zero_centered_norms=True,
            out_norms=True,
            qk_norm=True,
            qkv_bias=bias,
            attention_out_bias=bias,
            activation="gelu_tanh",
            embedding_scale=hf["hidden_size"] ** 0.5,
            score_scale=hf["query_pre_attn_scalar"] ** -0.5,
            windows=tuple(hf["sliding_window"] if kind == _WINDOW else None for kind in kinds),
            window_rope=RopeArgs.from_hf_config(plain | ropes[_WINDOW]),
            logit_softcap=hf.get("final_logit_softcapping"),
            vision=_gemma3_tower(whole, hf) if "vision_config" in whole else None,
        )


def _gemma3_tower(whole: Mapping[str, Any], text: Mapping[str, Any]) -> VisionArgs:
    vision = gemma3_vision(whole, text["hidden_size"])
    if vision.image_token_id >= text["vocab_size"]:
        raise ValueError(
            f"image_token_index ({vision.image_token_id}) must be a token of the vocabulary "
            f"(vocab_size {text['vocab_size']})"
        )
    there = tuple(token for token in vision.placeholder_ids if token < text["vocab_size"])
    return replace(vision, placeholder_ids=there)


@dataclass(frozen=True, kw_only=True)
class Qwen35ModelArgs(DecoderArgs):
    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> Qwen35ModelArgs:
        return cls(**_qwen35_fields(hf, is_sparse=hf.get("model_type") == "qwen3_5_moe_text"))


@dataclass(frozen=True, kw_only=True)
class Qwen35VLModelArgs(DecoderArgs):
    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> Qwen35VLModelArgs:
        """`hf` is whole: its text_config and vision_config."""
        fields = _qwen35_fields(_text_config(hf, {}), is_sparse=hf["model_type"] == "qwen3_5_moe")
        sections = _mrope_section(hf, default=(11, 11, 10))
        axes = _interleaved_axes(sections, fields["rotated_dim"] // 2)
        fields["rope"] = replace(fields["rope"], axes=axes)
        return cls(**fields, vision=qwen3_5_vision(hf, fields["dim"]))


def _qwen35_fields(hf: Mapping[str, Any], *, is_sparse: bool) -> dict[str, Any]:
    """Of the decoder; `hf` is the language model's config."""
    defaults = _QWEN35_MOE_DEFAULTS if is_sparse else _QWEN35_DEFAULTS
    hf = defaults | {key: value for key, value in hf.items() if value is not None}
    if not hf.get("attn_output_gate", True):
        raise ValueError("attn_output_gate must be true: attention of a qwen3_5 is gated")
    if is_sparse:
        hf["intermediate_size"] = hf["moe_intermediate_size"]  # no layer is dense
        hf |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    rope = dict(hf.get("rope_parameters") or {})
    share = rope.pop("partial_rotary_factor", hf.pop("partial_rotary_factor"))
    fields = common_decoder_fields(hf | {"rope_parameters": rope})
    rotated = int(fields["head_dim"] * share)
    if rotated < 2 or rotated % 2:
        raise ValueError(
            f"partial_rotary_factor {share} rotates {rotated} of the {fields['head_dim']} dims "
            "of a head: expected an even number of at least 2"
        )
    bias = hf.get("attention_bias", False)
    return {
        **fields,
        "zero_centered_norms": True,
        "qk_norm": True,
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "moe": _gated_shared(hf) if is_sparse else None,
        "delta": _delta_args(hf),
        "rotated_dim": rotated,
    }


def _gated_shared(hf: Mapping[str, Any]) -> MoEArgs:
    shared_dim = hf["shared_expert_intermediate_size"]
    return replace(_moe_args(hf), shared_dim=shared_dim, shared_gate=shared_dim > 0)


def _delta_args(hf: Mapping[str, Any]) -> DeltaArgs:
    num_layers, every = hf["num_hidden_layers"], hf["full_attention_interval"]
    default = [_LINEAR if (i + 1) % every else _ALL for i in range(num_layers)]
    kinds = hf.get("layer_types") or default
    if unknown := set(kinds) - {_LINEAR, _ALL}:
        raise ValueError(f"layer_types must be {_LINEAR!r} or {_ALL!r}, got {sorted(unknown)}")
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types must name all {num_layers} layers, got {len(kinds)}")
    return DeltaArgs(
        layers=frozenset(i for i, kind in enumerate(kinds) if kind == _LINEAR),
        num_key_heads=hf["linear_num_key_heads"],
        num_value_heads=hf["linear_num_value_heads"],
        key_dim=hf["linear_key_head_dim"],
        value_dim=hf["linear_value_head_dim"],
        conv_size=hf["linear_conv_kernel_dim"],
    )


def _layer_types(hf: Mapping[str, Any]) -> list[str]:
    pattern = hf["sliding_window_pattern"]
    return [_WINDOW if (i + 1) % pattern else _ALL for i in range(hf["num_hidden_layers"])]


def _rope_configs(hf: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each kind of layer, the rope keys as in other families' config.json."""
    given = hf.get("rope_parameters") or {}
    windowed = {"rope_theta": hf.get("rope_local_base_freq", 1e4)} | (given.get(_WINDOW) or {})
    whole = {"rope_theta": hf.get("rope_theta", 1e6)} | (hf.get("rope_scaling") or {})
    return {
        _WINDOW: {"rope_parameters": windowed},
        _ALL: {"rope_parameters": whole | (given.get(_ALL) or {})},
    }


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    activation = hf["hidden_activation"]
    if activation != "gelu_pytorch_tanh":
        raise ValueError(f"hidden_activation must be 'gelu_pytorch_tanh', got {activation!r}")
    unknown = set(hf.get("layer_types") or ()) - {_WINDOW, _ALL}
    if unknown:
        raise ValueError(f"layer_types must be {_WINDOW!r} or {_ALL!r}, got {sorted(unknown)}")
    for key in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if hf.get(key):
            raise ValueError(f"{key} is not supported: remove it from the model's config.json")
