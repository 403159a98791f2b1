"""What is evaluated: `TARGET` of the command line to models, checkpoints and servers.

    RUN                       the final model of a run; with `checkpoints` every saved one as well
    FOLDER, org/name[@rev]    a model in Hugging Face format
    http://host:port[/v1]     a server: native (by token ids), or any with OpenAI's chat API;
                              `#name` chooses one of several models of the latter

A target's `weights` identify what was scored: file names, sizes and times of a folder, the commit
of a hub name, the version of a server's weights. Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from areal.engine.remote.server_control import ControlClient, ServerLostError, ServerRefusedError
from areal.run.checkpoints import saved_checkpoints
from areal.run.paths import RunPaths
from areal.utils.hub import hub_name, model_folder, pin
from areal.utils.model_files import CONFIG_FILE, weight_files

TOKEN_VARIABLE = "AREAL_SERVER_TOKEN"
ADAPTER_FILE = "adapter_config.json"
_PROBE_S = 30.0


@dataclass(frozen=True, slots=True)
class Target:
    kind: Literal["model", "native", "chat", "oracle"]
    name: str  # as the user gave it; unique among the targets of a call
    weights: dict[str, Any] = field(default_factory=dict)  # JSON: equal only for equal weights
    path: str = ""  # folder of the model (and tokenizer), or the name of a server's model
    run: Path | None = None
    step: int | None = None  # steps trained, of a checkpoint
    url: str = ""  # of a server


ORACLE = Target("oracle", "oracle", {"oracle": True})


def find_targets(names: Sequence[str], *, checkpoints: bool) -> list[Target]:
    found = [target for name in names for target in _find(name, checkpoints)]
    return list({target.name: target for target in found}.values())


def _find(name: str, checkpoints: bool) -> list[Target]:
    if name.startswith(("http://", "https://")):
        return [_server(name)]
    paths = RunPaths(Path(name).expanduser())
    if paths.config.is_file() and paths.database.is_file():
        return _of_run(name, paths, checkpoints)
    return [_model(name, name)]


def _of_run(name: str, paths: RunPaths, checkpoints: bool) -> list[Target]:
    run = paths.root.absolute()
    saved = saved_checkpoints(paths.checkpoints, "actor")
    targets = [
        _model(f"{name}@{step + 1}", str(folder.absolute()), run=run, step=step + 1)
        for step, folder in (saved.items() if checkpoints else ())
    ]
    if paths.model.is_dir():
        targets.append(_model(name, str(paths.model.absolute()), run=run))
    if not targets:
        other = "have it save checkpoints (saver.freq_steps)"
        if saved:
            other = f"give its newest checkpoint, {saved[max(saved)]} (areal eval: --checkpoints)"
        raise ValueError(
            f"{name}: this run has no final model yet: let it end, or resume it, or {other}"
        )
    return targets


def _model(name: str, path: str, run: Path | None = None, step: int | None = None) -> Target:
    if hub_name(path) is not None:
        path = pin(path, key=name)
        model_folder(path, key=name)
        return Target("model", name, {"hub": path}, path)
    folder = Path(path).expanduser()
    if (folder / ADAPTER_FILE).is_file():
        raise ValueError(
            f"{name}: {folder} is a LoRA adapter: make a whole model of it first (areal merge)"
        )
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"{name}: expected a run's folder (config.yaml, run.db), a model's folder "
            f"({CONFIG_FILE}), a hub name (org/name) or a server's address (http://...)"
        )
    return Target("model", name, _folder_identity(folder), str(folder), run, step)


def _folder_identity(folder: Path) -> dict[str, Any]:
    config = hashlib.sha256((folder / CONFIG_FILE).read_bytes()).hexdigest()
    stats = [(file.name, file.stat()) for file in weight_files(folder)]
    files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in sorted(stats)]
    return {"config": config, "files": files}


def server_token() -> str:
    """Of the servers that are evaluated."""
    return os.environ.get(TOKEN_VARIABLE) or os.environ.get("OPENAI_API_KEY", "")


def _server(name: str) -> Target:
    parts = urllib.parse.urlsplit(name)
    if not parts.hostname or parts.query or parts.username:
        raise ValueError(f"{name}: expected an address like http://host:8000/v1 or .../v1#model")
    address, model = urllib.parse.urldefrag(name)[0].rstrip("/"), parts.fragment
    health = _native_health(parts, name) if parts.scheme == "http" and parts.port else None
    if health is not None:
        found = {key: health[key] for key in ("model", "version")}
        weights = {"url": parts.netloc, **found}
        return Target("native", name, weights, str(found["model"]), url=parts.netloc)
    base = address if parts.path.strip("/") else f"{address}/v1"
    return Target("chat", name, {"url": base, "model": model}, model, url=base)


def _native_health(parts: urllib.parse.SplitResult, name: str) -> dict[str, Any] | None:
    """What a native server says of itself; None if it is another kind."""
    control = ControlClient(parts.netloc, server_token(), timeout_s=_PROBE_S)
    try:
        health = control.get("/health")
    except ServerLostError as error:
        raise ValueError(f"{name}: no server answers there: {error}") from error
    except ServerRefusedError as error:
        if error.status in (401, 403):
            raise ValueError(
                f"{name}: the server wants another token; it is read from {TOKEN_VARIABLE}"
            ) from error
        return None
    except RuntimeError:  # a malformed reply: no native server
        return None
    return health if {"version", "model", "paused"} <= health.keys() else None


def digest(value: Any) -> str:
    """Of JSON values."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
