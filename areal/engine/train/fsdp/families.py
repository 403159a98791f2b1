"""Which models of transformers can be trained packed: read from its source, not imported.

Importing transformers' models takes seconds and torch; its tables of model types are literals, and
what a family's attention asks for is in the text of its file. What this cannot tell (a default that
config.json leaves out, logits that are no product) `check_model` finds out on the built model.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_ROW = re.compile(r"\(\s*\"([\w.-]+)\",\s*\(?\"(\w+)\"")
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_LAYER_KEYS = ("layer_types", "layers_block_type", "block_types")


def check_family(hf_config: Mapping[str, Any], *, is_critic: bool) -> None:
    """ValueError for a model that packed attention cannot compute, as far as can be told."""
    model_type = hf_config["model_type"]
    classes = _classes(is_critic)
    if classes is None:  # not laid out as we know it
        return
    if model_type not in classes:
        own_code = " (it brings code of its own, which areal does not run)"
        kind = "sequence classifier, which a critic is" if is_critic else "causal language model"
        raise ValueError(
            f"model_type {model_type!r} is no {kind} that transformers has"
            f"{own_code if 'auto_map' in hf_config else ''}: use another model"
        )
    name, text = classes[model_type], _modeling_text(model_type)
    if text is not None and "_supports_attention_backend = True" not in text:
        raise ValueError(
            f"{name} has attention of its own, which lets packed sequences see each other: use "
            "another model"
        )
    asked = _asked_of_attention(hf_config, text or "")
    if asked:
        raise ValueError(
            f"{name} needs {asked} in its attention, which packed attention does not compute: use "
            "another model"
        )
    language = hf_config.get("text_config") or hf_config
    layers = {str(layer) for key in _LAYER_KEYS for layer in language.get(key) or ()}
    if odd := sorted(layers - _ATTENTION_LAYERS):
        raise ValueError(
            f"{name} has layers of {', '.join(odd)}, which mix tokens other than by attention, so "
            "that packed sequences see each other: use another model"
        )


def _asked_of_attention(hf_config: Mapping[str, Any], text: str) -> str | None:
    language = hf_config.get("text_config") or hf_config
    if language.get("attn_logit_softcapping") and "softcap" in text:
        return "softcap"
    return "s_aux (attention sinks)" if "s_aux" in text else None


@cache
def _classes(is_critic: bool) -> dict[str, str] | None:
    """Model type -> class."""
    table = "SEQUENCE_CLASSIFICATION" if is_critic else "CAUSAL_LM"
    return _table("modeling_auto.py", f"MODEL_FOR_{table}_MAPPING_NAMES")


def _modeling_text(model_type: str) -> str | None:
    folders = _table("auto_mappings.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME") or {}
    folder = folders.get(model_type, model_type.replace("-", "_"))
    file = _models() / folder / f"modeling_{folder}.py"
    return file.read_text(encoding="utf-8") if file.is_file() else None


@cache
def _table(file: str, name: str) -> dict[str, str] | None:
    """A literal `NAME = OrderedDict([("key", "value"), ...])` of transformers."""
    path = _models() / "auto" / file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    _, found, rest = text.partition(f"\n{name} = OrderedDict(")
    return dict(_ROW.findall(rest.partition("\n)")[0])) if found else None


def _models() -> Path:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "models"
