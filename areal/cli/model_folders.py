"""`areal check` on model folders: a config, whole weights, and the same tokens for every role.

Reads JSON and the headers of safetensors files; no weights, no torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.alloc_mode import (
    ModelAllocation,
    ParallelStrategy,
    check_equal_stages,
    check_num_experts,
)
from areal.api.config.train_engine import TrainEngineConfig

if TYPE_CHECKING:
    from areal.api.config.experiment import BaseExperimentConfig, PPOConfig

MAX_HEADER_BYTES = 100 << 20  # as the safetensors library has it
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def check_models(config: BaseExperimentConfig) -> None:
    """The folder of every role, and that of the tokenizer. Hub names cannot be looked into."""
    roles = config.models()
    for role, section in roles.items():
        from_scratch = isinstance(section, TrainEngineConfig) and section.init_from_scratch
        _check_model(role, section.path, needs_weights=not from_scratch)
        check_experts(role, section.path, section.backend)
        _check_cut(role, section.path, ModelAllocation.from_str(section.backend).parallel)
        if not isinstance(section, TrainEngineConfig):
            section = section.engine_config(config.actor)
        _check_stages(role, section)
    _check_tokenizer(config.tokenizer_path)
    for role, section in roles.items():
        _check_same_tokens(f"{role}.path", section.path, config.tokenizer_path)


def _check_model(role: str, path: str, *, needs_weights: bool) -> None:
    key = f"{role}.path"
    if not _is_local(key, path):
        return
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{key}: {path!r} is no model folder: it holds no config.json")
    if not needs_weights:
        return
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        random = f"; set {role}.init_from_scratch=true to begin with random ones"
        trained = role in ("actor", "critic")
        raise ValueError(
            f"{key}: {path!r} holds no *.safetensors weights{random if trained else ''}"
        )
    for file in weights:
        _check_safetensors(key, file)


def check_experts(role: str, path: str, backend: str) -> None:
    """The model has experts for the layout to spread, if it spreads any."""
    size = ModelAllocation.from_str(backend).parallel.expert_parallel_size
    file = Path(path) / "config.json"
    if size == 1 or not file.is_file():
        return
    model = _parse_object(file, file.read_bytes())
    try:
        check_num_experts(size, model.get("num_experts", model.get("num_local_experts", 0)))
    except ValueError as error:
        raise ValueError(f"{role}.backend: {backend!r} with {path!r}: {error}") from None


def _check_cut(role: str, path: str, layout: ParallelStrategy) -> None:
    """The heads of the model can be divided among the ranks that compute the same rows."""
    config = _model_config(path)
    for key in ("num_attention_heads", "num_key_value_heads"):
        count, parts = config.get(key), layout.tensor_parallel_size
        if count is not None and count % parts:
            raise ValueError(
                f"{role}.backend: t{parts} cannot cut this model: {key} in {path}/config.json must "
                f"be a multiple of {parts}, got {count}; choose another t"
            )


def _check_stages(role: str, engine: TrainEngineConfig) -> None:
    """The layers make as many equal stages as megatron-core's pipeline has."""
    allocation = ModelAllocation.from_str(engine.backend)
    config = _model_config(engine.path)
    if allocation.backend != "megatron" or "num_hidden_layers" not in config:
        return
    num_stages = engine.megatron.virtual_pipeline_parallel_size
    size = allocation.parallel.pipeline_parallel_size
    try:
        check_equal_stages(size, num_stages, config["num_hidden_layers"])
    except ValueError as error:
        raise ValueError(
            f"{role}.backend: {engine.backend!r} with {engine.path!r}: {error}"
        ) from None


def _model_config(path: str) -> dict[str, Any]:
    """That of the language model; empty when it is not on this machine."""
    file = Path(path) / "config.json"
    if not file.is_file():
        return {}
    config = _parse_object(file, file.read_bytes())
    return config.get("text_config", config)


def _check_safetensors(key: str, file: Path) -> None:
    """The file is as long as its header says: a download or copy that broke off is shorter."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = _parse_object(file, stream.read(min(header_bytes, MAX_HEADER_BYTES)))
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    found, expected = file.stat().st_size, 8 + header_bytes + max(ends, default=0)
    if found != expected:
        raise ValueError(
            f"{key}: {file} has {found} bytes, expected {expected}: it is not whole, copy or "
            "download it again"
        )


def _check_same_tokens(key: str, path: str, tokenizer_path: str) -> None:
    """Roles exchange token ids, so an id must mean the same to all of them."""
    ours, theirs = Path(tokenizer_path) / "tokenizer.json", Path(path) / "tokenizer.json"
    if not ours.is_file() or not theirs.is_file():
        return
    texts = ours.read_bytes(), theirs.read_bytes()
    if texts[0] == texts[1]:
        return
    vocabularies = [
        _parse_object(file, text).get("model", {}).get("vocab")
        for file, text in zip((ours, theirs), texts, strict=True)
    ]
    if vocabularies[0] != vocabularies[1]:
        raise ValueError(
            f"{key}: {theirs} has another vocabulary than {ours}, so the same token ids would be "
            "other words; use models of one family"
        )


def check_context(config: PPOConfig) -> None:
    """A prompt and the longest answer fit into the model's context."""
    file = Path(config.actor.path) / "config.json"
    if not file.is_file():
        return
    context = _parse_object(file, file.read_bytes()).get("max_position_embeddings")
    sections = {"gconfig": config.gconfig, "eval_gconfig": config.eval_gconfig}
    for name, section in sections.items():
        if context is not None and section.max_new_tokens >= context:
            raise ValueError(
                f"{name}.max_new_tokens: {section.max_new_tokens} leaves no room for a prompt in "
                f"the model's context of {context} tokens (max_position_embeddings in {file})"
            )


def _check_tokenizer(path: str) -> None:
    if not _is_local("tokenizer_path", path):
        return
    if not any((Path(path) / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"tokenizer_path: {path!r} holds no tokenizer ({_TOKENIZER_FILES[0]}); "
            "by default it is actor.path"
        )


def check_chat_template(path: str) -> None:
    """`rlvr` writes prompts with the tokenizer's chat template, so a local one must have it."""
    folder = Path(path)
    config = folder / "tokenizer_config.json"
    if not config.is_file() or (folder / "chat_template.jinja").is_file():
        return
    if "chat_template" not in _parse_object(config, config.read_bytes()):
        raise ValueError(
            f"tokenizer_path: the tokenizer in {path!r} has no chat template; add "
            "chat_template.jinja there, or use the tokenizer of an instruct model"
        )


def _is_local(key: str, path: str) -> bool:
    """Whether `path` is a folder here. A hub name (`org/name`) is not, and cannot be checked."""
    if Path(path).is_dir():
        return True
    if Path(path).exists():
        raise ValueError(f"{key}: {path!r} is a file, expected a folder")
    if _looks_like_path(path):
        raise ValueError(f"{key}: folder {path!r} does not exist")
    return False


def _looks_like_path(path: str) -> bool:
    """Absolute, relative with a dot, or deeper than the `org/name` of a hub."""
    return path.startswith((os.sep, ".")) or path.count("/") > 1


def _parse_object(file: Path, data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError as error:  # bad JSON or bad UTF-8
        raise ValueError(f"{file} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged: expected a JSON object, found {content!r:.40}")
    return content
