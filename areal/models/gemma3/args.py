"""Args of Gemma 3 (text): layers that see a window, with every few one that sees all, and a rope
for each of the two kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal.models.common.args import DecoderArgs, RopeArgs, common_decoder_fields

# Checkpoints leave out what has its usual value.
_DEFAULTS: dict[str, Any] = {
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
_WINDOW, _ALL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Gemma3ModelArgs(DecoderArgs):
    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> Gemma3ModelArgs:
        hf = _DEFAULTS | {key: value for key, value in hf.items() if value is not None}
        _refuse_unsupported(hf)
        bias = hf.get("attention_bias", False)
        kinds = hf.get("layer_types") or _layer_types(hf)
        ropes = _rope_configs(hf)
        plain = {key: value for key, value in hf.items() if key not in ("layer_types", *_ROPE_KEYS)}
        return cls(
            **common_decoder_fields(plain | ropes[_ALL]),
            qk_norm=True,
            qkv_bias=bias,
            attention_out_bias=bias,
            activation="gelu_tanh",
            embedding_scale=hf["hidden_size"] ** 0.5,
            score_scale=hf["query_pre_attn_scalar"] ** -0.5,
            windows=tuple(hf["sliding_window"] if kind == _WINDOW else None for kind in kinds),
            window_rope=RopeArgs.from_hf_config(plain | ropes[_WINDOW]),
            logit_softcap=hf.get("final_logit_softcapping"),
        )


def _layer_types(hf: Mapping[str, Any]) -> list[str]:
    pattern = hf["sliding_window_pattern"]
    return [_WINDOW if (i + 1) % pattern else _ALL for i in range(hf["num_hidden_layers"])]


_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")


def _rope_configs(hf: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each kind of layer, the keys another family's config.json would have."""
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
