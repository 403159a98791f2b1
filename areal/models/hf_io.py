"""Models from and to Hugging Face folders: config.json and streamed safetensors, no transformers.

Loading checks every name and shape against the files' headers before the first byte is copied, so a
wrong checkpoint never leaves a half-loaded model. Memory stays at the model plus one tensor (load)
or one shard (save). `save_hf` writes into the given folder: to make it atomic, pass the temporary
folder of `areal.utils.fs.atomic_folder`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from areal.models import get_model_spec, own_config
from areal.models.common.decoder import Decoder, build_share
from areal.models.common.fp8 import FP8
from areal.models.common.tensor_parallel import Ranks
from areal.utils.model_files import (
    CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    read_hf_config,
    weight_files,
)

SCORE_HEAD = "score.weight"


def build_model(
    path_or_config: str | Path | Mapping[str, Any],
    *,
    device: str | torch.device,
    dtype: torch.dtype,
    is_critic: bool = False,
    ranks: Ranks | None = None,
) -> Decoder:
    """The module with undefined weights: follow with `load_hf` or `model.init_weights(seed)`.

    A critic has a score head in place of the LM head. With `ranks` it is this rank's shard. With
    dtype `FP8` the linear layers of its blocks are FP8 and the rest has `default_dtype`.
    """
    is_config = isinstance(path_or_config, Mapping)
    config = own_config(path_or_config if is_config else read_hf_config(path_or_config))
    spec = get_model_spec(config["model_type"])
    args = spec.model_args_class.from_hf_config(config)
    args = dataclasses.replace(args, is_critic=is_critic)
    with torch.device("meta"):
        if ranks is None:
            model = spec.model_class(args)
        else:
            model = build_share(spec.model_class, args, ranks)
        model.to(default_dtype(device) if dtype == FP8 else dtype)
        if dtype == FP8:
            model.store_in_fp8()
    # Like `to_empty`, whose `empty_like` of a meta tensor imports sympy: a second of every start.
    return model._apply(lambda meta: torch.empty(meta.shape, dtype=meta.dtype, device=device))


def dtype_named(name: str | None) -> torch.dtype | None:
    """Of a config's `dtype`, with fp8 for `FP8`."""
    if name is None:
        return None
    return FP8 if name == "fp8" else getattr(torch, name)


def default_dtype(device: str | torch.device) -> torch.dtype:
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


def has_score_head(path: str | Path) -> bool:
    """Whether the folder holds a critic or reward model (else a language model)."""
    return SCORE_HEAD in read_shapes(weight_files(Path(path)))


def load_hf(model: Decoder, path: str | Path, *, without: Sequence[str] = ()) -> None:
    """Fill `model` from the safetensors of a folder, cast to the model's dtype.

    Every weight must be present except those in `without`, which keep their values.
    """
    files = weight_files(Path(path))
    own = model.hf_shapes()
    kept = {name: own[name] for name in without}
    found, adapter = read_shapes(files), model.adapter
    shapes = {
        part: tuple(torch.empty(shape, device="meta")[place].shape)
        for name, shape in found.items()
        for part, place in adapter.unfused(name, shape)
    }
    check_hf_shapes(model, {**kept, **shapes}, source=str(path))
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                parts = [one for one in adapter.unfused(name, found[name]) if model.holds(one[0])]
                whole = tensors.get_tensor(name) if parts else None
                for part, place in parts:
                    assert whole is not None
                    model.load_hf_tensor(part, whole[place])


def kept_tensors(path: str | Path, model: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    """What the folder has beside the model's weights and a saved model keeps, bit for bit."""
    for file in weight_files(Path(path)):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if model.adapter.is_kept(name):
                    yield name, tensors.get_tensor(name)


def check_hf_shapes(model: Decoder, shapes: Mapping[str, Sequence[int]], *, source: str) -> None:
    """ValueError unless the named weights match the model's exactly."""
    expected, adapter = model.hf_shapes(), model.adapter
    shapes = {adapter.usual_hf_name(name): shape for name, shape in shapes.items()}
    faults = [
        f"missing {name}"
        for name in expected
        if name not in shapes and not adapter.is_optional(name)
    ]
    faults += [
        f"unexpected {name}"
        for name in shapes
        if name not in expected and not _is_derived(model, name)
    ]
    faults += [
        f"{name} is {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if faults[8:] else "")
        raise ValueError(f"weights of {source} do not fit this {model.args.model_type}: {shown}")


def save_hf(
    weights: Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any],
    path: str | Path,
    *,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Write weights and config.json so that transformers loads the folder.

    The config's dtype is set to that of the first weight, which readers load in.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []
    dtypes: list[torch.dtype] = []
    total_bytes = 0
    for shard in _shards(weights, max_shard_bytes):
        _save_file(shard, folder / _part_name(len(shards)))
        shards.append(list(shard))
        dtypes += [tensor.dtype for tensor in shard.values()]
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    if not shards:
        raise ValueError(f"no weights to save in {folder}: expected at least one tensor")
    _name_shards(folder, shards, total_bytes)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    _write_json(folder / CONFIG_FILE, {**config, key: str(dtypes[0]).removeprefix("torch.")})


def critic_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a critic: transformers loads it as a classifier with one label."""
    architectures = [
        name.replace("ForCausalLM", "ForSequenceClassification")
        for name in config.get("architectures") or ()
    ]
    one_label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**config, "architectures": architectures, **one_label}


def _is_derived(model: Decoder, hf_name: str) -> bool:
    try:
        return model.adapter.from_hf_name(hf_name) is None
    except ValueError:
        return False


def read_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights, from the files' headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file: {error}") from error
    return shapes


def _shards(
    weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Consecutive tensors in shards of at most `max_bytes` (a larger tensor is its own shard)."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().to("cpu").contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def _save_file(shard: Mapping[str, torch.Tensor], file: Path) -> None:
    try:
        save_file(dict(shard), file, metadata={"format": "pt"})
    except SafetensorError as error:  # also raised for a full disk, and no OSError
        raise OSError(f"cannot write {file}: {error}. Free space or choose another path") from error


def _part_name(index: int) -> str:
    return f"model-{index + 1:05d}.safetensors.part"


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Rename the parts to their final names, which include the shard count; write the index."""
    if len(shards) == 1:
        (folder / _part_name(0)).rename(folder / WEIGHTS_FILE)
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / _part_name(index)).rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index_content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(folder / INDEX_FILE, index_content)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
