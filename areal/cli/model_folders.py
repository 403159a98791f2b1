"""`areal check` of models: supported by their engine, complete weights, equal vocabularies.

Reads JSON and the headers of safetensors files; no weights, no torch. For a hub name that is not
in the cache, the hub is queried for its files and config.json.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.config.experiment import PPOConfig
from areal.api.config.train_engine import TrainEngineConfig
from areal.engine.train import fit
from areal.planner.scale import known_models
from areal.run.model_paths import model_paths, recorded_commits
from areal.run.paths import RunPaths
from areal.utils.hub import Found, hub_name, look_up
from areal.utils.model_files import (
    CONFIG_FILE,
    TOKENIZER_FILES,
    language_config,
    parse_object,
    read_hf_config,
    read_json,
    weight_files,
)

if TYPE_CHECKING:
    from areal.api.config.experiment import BaseExperimentConfig

MAX_HEADER_BYTES = 100 << 20  # limit of the safetensors library


def check_models(config: BaseExperimentConfig, *, deadline_s: float | None) -> dict[str, Found]:
    """Every role's model and the tokenizer, by role; hubs are queried until the deadline."""
    found = _look_up_all(config, deadline_s)
    paths, hf_configs = model_paths(config), {}
    for role, section in config.all_models().items():
        place = found[role]
        if place.folder is not None:
            _check_folder(role, paths[role], place.folder, needs_weights=_needs_weights(section))
            hf_configs[role] = _read_config(f"{role}.path", place.folder)
        elif (known := place.config or _known_config(paths[role])) is not None:
            hf_configs[role] = known
    fit.check_models(config, hf_configs)
    tokenizer = found["tokenizer"].folder
    if tokenizer is not None:
        _check_tokenizer(config.tokenizer_path, tokenizer)
        for role in config.all_models():
            folder = found[role].folder
            if folder is not None:
                _check_same_tokens(f"{role}.path", folder, tokenizer)
    if isinstance(config, PPOConfig) and "actor" in hf_configs:
        _check_context(config, hf_configs["actor"])
    return found


def _known_config(path: str) -> Mapping[str, Any] | None:
    """Of a model on a hub that gave no answer, if the planner has it."""
    name = hub_name(path)
    return None if name is None else known_models().get(name.repo)


def _look_up_all(config: BaseExperimentConfig, deadline_s: float | None) -> dict[str, Found]:
    commits = recorded_commits(RunPaths.of(config))

    def look(key: str, path: str, weights: bool) -> Found:
        _check_path(key, path)
        name = hub_name(path)
        if name is not None and path in commits:  # a resumed run keeps its commit
            path = str(name.at(commits[path]))
        return look_up(path, key=key, weights=weights, deadline_s=deadline_s)

    models = config.all_models()
    wanted = {
        role: (f"{role}.path", path, _needs_weights(models[role]))
        for role, path in model_paths(config).items()
    }
    wanted["tokenizer"] = ("tokenizer_path", config.tokenizer_path, False)
    with ThreadPoolExecutor(len(wanted), thread_name_prefix="hub") as pool:
        answers = {name: pool.submit(look, *what) for name, what in wanted.items()}
        return {name: answer.result() for name, answer in answers.items()}


def _needs_weights(section: Any) -> bool:
    return not (isinstance(section, TrainEngineConfig) and section.init_from_scratch)


def _check_folder(role: str, path: str, folder: Path, *, needs_weights: bool) -> None:
    key = f"{role}.path"
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"{key}: {path!r} is not a model folder: it has no {CONFIG_FILE}")
    if not needs_weights:
        return
    try:
        weights = weight_files(folder)
    except (FileNotFoundError, ValueError) as error:
        random = f"; set {role}.init_from_scratch=true to begin with random ones"
        trained = role in ("actor", "critic")
        raise ValueError(f"{key}: {error}{random if trained else ''}") from None
    for file in weights:
        _check_safetensors(key, file)


def _read_config(key: str, folder: Path) -> dict[str, Any]:
    try:
        return read_hf_config(folder)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _check_safetensors(key: str, file: Path) -> None:
    """The file size matches its header: an incomplete download or copy is shorter."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = parse_object(file, stream.read(min(header_bytes, MAX_HEADER_BYTES)))
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    found, expected = file.stat().st_size, 8 + header_bytes + max(ends, default=0)
    if found != expected:
        raise ValueError(
            f"{key}: {file} has {found} bytes, expected {expected}: it is incomplete, copy or "
            "download it again"
        )


def _check_same_tokens(key: str, folder: Path, tokenizer: Path) -> None:
    """Roles exchange token ids, so they need one vocabulary."""
    ours, theirs = tokenizer / "tokenizer.json", folder / "tokenizer.json"
    if not ours.is_file() or not theirs.is_file():
        return
    texts = ours.read_bytes(), theirs.read_bytes()
    if texts[0] == texts[1]:
        return
    vocabularies = [
        parse_object(file, text).get("model", {}).get("vocab")
        for file, text in zip((ours, theirs), texts, strict=True)
    ]
    if vocabularies[0] != vocabularies[1]:
        raise ValueError(
            f"{key}: {theirs} has another vocabulary than {ours}, so token ids have other "
            "meanings; use models of one family"
        )


def _check_context(config: PPOConfig, hf_config: Mapping[str, Any]) -> None:
    """A prompt and the longest answer fit into the model's context."""
    context = language_config(hf_config).get("max_position_embeddings")
    sections = {"gconfig": config.gconfig, "eval_gconfig": config.eval_gconfig}
    for name, section in sections.items():
        if context is not None and section.max_new_tokens >= context:
            raise ValueError(
                f"{name}.max_new_tokens: {section.max_new_tokens} leaves no room for a prompt in "
                f"the model's context of {context} tokens (max_position_embeddings in the "
                f"{CONFIG_FILE} of {config.actor.path})"
            )


def _check_tokenizer(path: str, folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"tokenizer_path: {path!r} has no tokenizer ({TOKENIZER_FILES[0]}); by default it is "
            "actor.path"
        )


def check_chat_template(path: str, folder: Path) -> None:
    """The shipped workflows render prompts with the tokenizer's chat template."""
    config = folder / "tokenizer_config.json"
    if not config.is_file() or (folder / "chat_template.jinja").is_file():
        return
    if "chat_template" not in read_json(config):
        raise ValueError(
            f"tokenizer_path: the tokenizer in {path!r} has no chat template; add "
            "chat_template.jinja there, or use the tokenizer of an instruct model"
        )


def _check_path(key: str, path: str) -> None:
    """`path` is a folder, or could be a hub name."""
    if Path(path).is_dir() or hub_name(path) is not None:
        return
    if Path(path).exists():
        raise ValueError(f"{key}: {path!r} is a file, expected a folder")
    hint = "" if path.startswith((".", os.sep)) else " (the name of a model on a hub is org/name)"
    raise ValueError(f"{key}: folder {path!r} does not exist{hint}")
