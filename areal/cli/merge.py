"""`areal merge RUN_OR_ADAPTER --out FOLDER`: a whole model of an adapter and its base."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_CONFIG = "adapter_config.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a Hugging Face folder with the weights of a base model and an adapter's product "
        "added, for programs that read whole models."
    )
    parser.add_argument(
        "folder",
        metavar="RUN_OR_ADAPTER",
        help="folder of a finished run with use_lora, or of an adapter that areal or peft saved",
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="must not exist yet")
    parser.add_argument(
        "--base", metavar="MODEL", help="folder or hub name; default: as the adapter names it"
    )


def run(args: argparse.Namespace) -> int:
    from areal.models.lora_merge import merge_adapter
    from areal.utils.fs import atomic_folder
    from areal.utils.hub import model_folder
    from areal.utils.model_files import read_json

    adapter, out = _adapter(Path(args.folder)), Path(args.out)
    if out.exists():
        raise ValueError(f"--out {out} is there already: choose another folder, or remove it")
    name = args.base or _base_name(read_json(adapter / _CONFIG), adapter)
    base = model_folder(name, key="--base")
    if not (base / "config.json").is_file():
        raise FileNotFoundError(f"--base {name}: expected a Hugging Face folder, with config.json")
    with atomic_folder(out, private=False) as folder:
        merge_adapter(adapter, base, folder)
    print(f"{out}: {base} with the adapter {adapter} merged")
    return 0


def _adapter(folder: Path) -> Path:
    from areal.run.paths import RunPaths

    for place in (folder, RunPaths(folder).model):
        if (place / _CONFIG).is_file():
            return place
    raise FileNotFoundError(
        f"{folder} has no {_CONFIG}, nor has its folder model/: expected an adapter, or a run with "
        "use_lora that has ended (checkpoints/ has those of a run that goes on)"
    )


def _base_name(config: dict[str, Any], adapter: Path) -> str:
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{adapter / _CONFIG} names no base model: give it by --base")
    return f"{name}@{revision}" if isinstance(revision, str) else name
