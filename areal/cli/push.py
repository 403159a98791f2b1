"""`areal push RUN REPO`: upload the final model of a run to a hub, with a model card."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal.run.paths import RunPaths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Uploads the final model of a run in one commit, with a model card that states recipe, "
        "data set and curve. The hub is that of HF_ENDPOINT, the token that of HF_TOKEN or of `hf "
        "auth login`. A repository that does not exist is created, private."
    )
    parser.add_argument("--public", action="store_true", help="create a public repository")
    parser.add_argument("folder", metavar="RUN", help="folder of the run")
    parser.add_argument("repo", metavar="REPO", help="repository on the hub: org/name")


def run(args: argparse.Namespace) -> int:
    from areal.run.model_card import model_card
    from areal.run.paths import RunPaths
    from areal.utils.hub_upload import upload_folder

    paths = RunPaths(Path(args.folder))
    _require_model(paths)
    message = f"areal run {paths.root.absolute().parent.name}/{paths.root.absolute().name}"
    texts = {"README.md": model_card(paths)}
    url = upload_folder(paths.model, args.repo, texts, private=not args.public, message=message)
    print(url)
    return 0


def _require_model(paths: RunPaths) -> None:
    if not paths.config.is_file():
        raise ValueError(
            f"RUN: {paths.root} is not the folder of a run: it has no {paths.config.name}"
        )
    if not any(paths.model.glob("*.safetensors")):
        raise ValueError(
            f"RUN: {paths.root} has no final model: a run writes {paths.model.name}/ when it ends; "
            "let it end, or resume it"
        )
