"""Which variables of our environment a confined process gets, and which files it must not read.

An allow-list: what a program needs to find itself, its libraries, its caches and its language.
Names nobody thought of (`OPENAI_KEY`, `GH_PAT`) stay here. `limits.env` adds names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from areal.api.config.limits import ProcessLimits
from areal.api.redact import is_secret
from areal.api.scratch import variable_set

RUN_FOLDER = "AREAL_RUN_FOLDER"  # where the database and the recover points of this run lie

_NAMES = (
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "HOSTNAME", "TERM", "TZ", "LANG"}
    | {"LANGUAGE", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "JAVA_HOME"}
    | {"LD_PRELOAD", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "NLTK_DATA", "TORCH_HOME"}
    | {"HF_HOME"}
    | {"HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"}
    | {"HF_ENDPOINT", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_CACHE", "TOKENIZERS_PARALLELISM"}
    | {"XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "MPLBACKEND", "MPLCONFIGDIR"}
    | {"CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"}
    | {"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"}
    | {"NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"}
    | {"AREAL_STACKS", "AREAL_DEBUG", "AREAL_LOG_LEVEL"}
)
_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_")


def reward_environment(limits: ProcessLimits | None, folder: str) -> dict[str, str]:
    """Without limits: everything but areal's own secrets."""
    if limits is None:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not (name.startswith("AREAL_") and is_secret(name, value))
        }
    else:
        kept = {name: value for name, value in os.environ.items() if _is_kept(name, value, limits)}
    return {**kept, "TMPDIR": folder}


def _is_kept(name: str, value: str, limits: ProcessLimits) -> bool:
    if name in limits.env:
        return True
    # A proxy's URL may hold a password.
    return (name in _NAMES or name.startswith(_PREFIXES)) and not is_secret(name, value)


def hidden_paths(limits: ProcessLimits) -> list[str]:
    """Files and folders that it must not read: keys, and the folder of the run."""
    hidden = [*limits.unreadable]
    if os.environ.get(RUN_FOLDER):
        hidden.append(os.environ[RUN_FOLDER])
    if "HF_TOKEN" not in limits.env:
        hub = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
        hidden += [str(hub / "token"), str(hub / "stored_tokens")]
    return hidden + _block_devices()


def _block_devices() -> list[str]:
    """To root, who may read them, they hold every file."""
    found = [*Path("/dev").glob("*"), *Path("/dev/mapper").glob("*")]
    return [str(path) for path in found if path.is_block_device()]


@contextlib.contextmanager
def hidden_from_rewards(folder: Path) -> Generator[None]:
    """Confined processes that are started meanwhile, here or by a child, cannot read `folder`."""
    with variable_set(RUN_FOLDER, str(folder.absolute())):
        yield
