"""Models by hub name: `org/name`, or `org/name@revision` (a branch, tag or commit).

    pinned = pin("Qwen/Qwen3-0.6B", key="actor.path")            # "Qwen/Qwen3-0.6B@c1899de2..."
    folder = model_folder("Qwen/Qwen3-0.6B", key="actor.path")   # downloaded unless cached
    found = look_up("Qwen/Qwen3-0.6B", key="actor.path")         # for `areal check`: no weights

A path that starts with `.`, `/` or `~`, or that exists, is local and returned unchanged.
huggingface_hub provides the rest: its cache, shared by the processes of a machine and locked so
that one downloads a file while others wait; its variables (HF_HOME, HF_ENDPOINT, HF_TOKEN,
HF_HUB_OFFLINE). Only files that areal reads are downloaded: configs, tokenizer, chat template, and
the safetensors in the index. A commit that is complete in the cache needs no request to the hub.

An error is one line that starts with `key`: ValueError if the name or the model is wrong,
RuntimeError if the network, the hub or the disk is at fault. While files arrive, whichever process
downloads them, `waits.progress()` is called: a download may take hours, a stalled one may not.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal.utils import logging, waits
from areal.utils.model_files import (
    CONFIG_FILE,
    INDEX_FILE,
    TOKENIZER_FILES,
    WEIGHTS_FILE,
    shard_names,
    weight_files,
)
from areal.utils.startup import stage

logger = logging.getLogger("Hub")

_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w][\w./-]*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_MAX_SMALL_BYTES = 1 << 30  # bound on files that are read whole; the largest tokenizers have 40 MB
_ASK_S = 10.0
_LOOK_S = 1.0  # between two measurements of what has arrived
_NUM_TRIES = 3  # for a branch that moves between two requests


class HubUnreachableError(RuntimeError):
    """No reply, or a server error of the hub: the model may still exist."""


@dataclass(frozen=True, slots=True)
class HubName:
    repo: str
    revision: str | None = None  # None: the default branch

    @property
    def is_pinned(self) -> bool:
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> HubName:
        return HubName(self.repo, commit)

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def hub_name(path: str | Path) -> HubName | None:
    """None if `path` is local or cannot be a model name."""
    if str(path).startswith((".", "/", "~")) or Path(path).exists():
        return None
    match = _NAME.fullmatch(str(path))
    return HubName(match["repo"], match["revision"]) if match else None


def pin(path: str, *, key: str) -> str:
    """`path` with the current commit of its revision; a local path unchanged.

    If the hub cannot be reached, the commit of the cache is used.
    """
    name = hub_name(path)
    if name is None or name.is_pinned:
        return path
    cached = _cached(name)
    if cached is not None and _is_offline():
        return str(name.at(cached.name))
    try:
        for _ in range(_NUM_TRIES):
            listing = _ask(name, key)
            _require_files(name, key, listing, weights=False)
            # By branch name, so that the cache can resolve it in a later offline start.
            if _download(name, [CONFIG_FILE], key).name == listing.commit:
                return str(name.at(listing.commit))
    except HubUnreachableError as error:
        if cached is None:
            raise
        logger.warning("%s; using commit %s, which is in the cache", error, cached.name)
        return str(name.at(cached.name))
    raise RuntimeError(f"{key}: {name} has changed {_NUM_TRIES} times while it was read: try again")


def model_folder(path: str | Path, *, key: str = "path", weights: bool = True) -> Path:
    """The local folder of a model. Without `weights`, config and tokenizer suffice."""
    name = hub_name(path)
    if name is None:
        return Path(path)
    if not name.is_pinned:
        name = hub_name(pin(str(path), key=key))
        assert name is not None
    # A model may have no tokenizer, but only the hub knows whether it has one.
    folder = _cached(name, weights=weights, tokenizer=True)
    if folder is not None:
        return folder
    folder = _cached(name, weights=weights)
    if folder is not None and _is_offline():
        return folder
    try:
        return _fetch(name, key, weights)
    except HubUnreachableError:
        if folder is None:
            raise
        return folder


@dataclass(frozen=True, slots=True)
class Found:
    """What is known about a model without downloading its weights."""

    state: Literal["local", "cached", "reachable", "unknown"]
    folder: Path | None = None  # local folder; only of a `cached` or local one
    config: Mapping[str, Any] | None = None  # parsed config.json of a `reachable` one
    why: str = ""  # reason of `unknown`


def look_up(path: str, *, key: str, weights: bool = True, deadline_s: float | None = 5.0) -> Found:
    """`cached` (complete on this machine), `reachable` (the hub has it) or `unknown` (no reply in
    time; without a deadline the hub is not queried).

    Raises what a run would, once certain: no such model, no access, no weights; HF_HUB_OFFLINE and
    not in the cache.
    """
    name = hub_name(path)
    if name is None:
        return Found("local", Path(path))
    cached = _cached(name, weights=weights)
    if cached is not None and (name.is_pinned or _is_offline()):
        return Found("cached", cached)
    try:
        if _is_offline():
            _ask(name, key)  # raises the offline error
        if deadline_s is None:
            return Found("unknown") if cached is None else Found("cached", cached)
        return _within(deadline_s, lambda: _look_at_hub(name, key, weights))
    except HubUnreachableError as error:
        return Found("unknown", why=str(error)) if cached is None else Found("cached", cached)


def _look_at_hub(name: HubName, key: str, weights: bool) -> Found:
    from huggingface_hub import hf_hub_download

    listing = _ask(name, key)
    pinned = name.at(listing.commit)
    cached = _cached(pinned, weights=weights)
    if cached is not None:
        return Found("cached", cached)
    _require_files(name, key, listing, weights)
    with tempfile.TemporaryDirectory(prefix="areal-check-") as scratch:
        with _one_line(pinned, key):
            file = hf_hub_download(
                name.repo, CONFIG_FILE, revision=pinned.revision, local_dir=scratch
            )
        config = _parse_config(pinned, key, Path(file))
    return Found("reachable", config=config)


def _within(deadline_s: float, look: Callable[[], Found]) -> Found:
    """In a thread: resolving a host name may take a minute."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(look())
        except Exception as error:  # raised below
            outcome.append(error)

    thread = threading.Thread(target=run, name="hub", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if not outcome:
        raise HubUnreachableError(f"{endpoint()} does not answer within {deadline_s:g} s")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


@dataclass(frozen=True, slots=True)
class _Listing:
    commit: str
    sizes: Mapping[str, int]  # by file


def _ask(name: HubName, key: str) -> _Listing:
    """The files of a revision."""
    from huggingface_hub import HfApi

    with _one_line(name, key):
        info = HfApi().model_info(
            name.repo, revision=name.revision, files_metadata=True, timeout=_ASK_S
        )
        sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or ()}
    commit = info.sha or ""
    if not _COMMIT.fullmatch(commit):  # it becomes a folder name
        raise RuntimeError(f"{key}: {endpoint()} calls the commit of {name} {info.sha!r:.80}")
    return _Listing(commit, sizes)


def _fetch(name: HubName, key: str, weights: bool) -> Path:
    """Config and tokenizer first: errors in them show before the weights are downloaded."""
    listing = _ask(name, key)
    _require_files(name, key, listing, weights)
    small = [file for file in listing.sizes if _is_small(file)]
    with stage(f"{name.repo} from {endpoint()}"), downloading(cache_folder(name.repo, "model")):
        folder = _download(name, small, key)
        _parse_config(name, key, folder / CONFIG_FILE)
        if weights:
            files = [WEIGHTS_FILE]
            if WEIGHTS_FILE not in listing.sizes:
                files = _shards(name, key, folder / INDEX_FILE, listing)
            _require_space(name, key, folder, {file: listing.sizes[file] for file in files})
            _download(name, files, key)
    return folder


def _is_small(file: str) -> bool:
    return "/" not in file and file.endswith(_SMALL_SUFFIXES)


def _shards(name: HubName, key: str, index: Path, listing: _Listing) -> list[str]:
    try:
        files = shard_names(index)
    except ValueError as error:
        raise ValueError(f"{key}: {name}: {error}") from None
    missing = [file for file in files if file not in listing.sizes]
    if missing:
        raise ValueError(f"{key}: {name} has no {missing[0]}, which its {INDEX_FILE} names")
    return files


def _parse_config(name: HubName, key: str, file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:  # bad JSON or bad UTF-8
        raise ValueError(f"{key}: {CONFIG_FILE} of {name} is not JSON: {error}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{key}: {CONFIG_FILE} of {name} has no model_type: it is no model's")
    return config


def _require_files(name: HubName, key: str, listing: _Listing, weights: bool) -> None:
    files = listing.sizes
    if CONFIG_FILE not in files:
        raise ValueError(
            f"{key}: {name} has no {CONFIG_FILE}, so it is no model of transformers; it has "
            f"{_some(files)}"
        )
    for file, size in files.items():
        if _is_small(file) and size > _MAX_SMALL_BYTES:
            raise ValueError(f"{key}: {file} of {name} has {_gb(size)}, which is no such file")
    if weights and WEIGHTS_FILE not in files and INDEX_FILE not in files:
        raise ValueError(
            f"{key}: {name} has no {WEIGHTS_FILE} and no {INDEX_FILE}; it has {_some(files)}: use "
            "a model with safetensors, or convert it"
        )


def _require_space(name: HubName, key: str, folder: Path, sizes: Mapping[str, int]) -> None:
    needed = sum(size for file, size in sizes.items() if not (folder / file).exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise RuntimeError(
            f"{key}: {name} needs {_gb(needed)}, and the disk of {_cache()} has {_gb(free)} free: "
            "free some, or set HF_HOME to a folder on another disk"
        )
    if needed:
        logger.info("%s: %s into %s", name.repo, _gb(needed), _cache())


def _download(name: HubName, files: Sequence[str], key: str) -> Path:
    """The snapshot folder, with `files` in it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        """The hub client's progress bar, on terminals only."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if not sys.stderr.isatty():
                kwargs["disable"] = True
            super().__init__(*args, **kwargs)

    with _one_line(name, key):
        folder = snapshot_download(
            name.repo,
            revision=name.revision,
            allow_patterns=[_literally(file) for file in files],
            tqdm_class=Bar,
        )
    return Path(folder)


def _literally(file: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", file)


def _cached(name: HubName, *, weights: bool = False, tokenizer: bool = False) -> Path | None:
    """The cached snapshot of `name`, if it has the requested parts."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                name.repo,
                revision=name.revision,
                allow_patterns=[f"*{suffix}" for suffix in _SMALL_SUFFIXES],
                ignore_patterns=["*/*"],
                local_files_only=True,
            )
        )
        if weights:
            weight_files(folder)
    except (LocalEntryNotFoundError, FileNotFoundError, ValueError):
        return None
    files = {file.name for file in folder.iterdir()}
    if CONFIG_FILE not in files or (tokenizer and not files.intersection(TOKENIZER_FILES)):
        return None
    return folder


@contextlib.contextmanager
def downloading(*folders: Path) -> Iterator[None]:
    """In this context, whatever any process writes below `folders` counts as progress."""
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(folders, done), name="hub", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()


def _watch(folders: Sequence[Path], done: threading.Event) -> None:
    seen = -1
    while not done.wait(_LOOK_S):
        size = sum(map(_size, folders))
        if size != seen:
            waits.progress()
        seen = size


def _size(folder: Path) -> int:
    size = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # renamed, removed
            size += file.lstat().st_size
    return size


@contextlib.contextmanager
def _one_line(name: HubName, key: str) -> Iterator[None]:
    """Errors of the hub's client, as one line that says what to do."""
    try:
        yield
    except Exception as error:  # the client raises dozens of types, some from its HTTP client
        raise _explained(name, key, error) from error


def _explained(name: HubName, key: str, error: Exception) -> Exception:
    from huggingface_hub import errors

    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    page = f"{endpoint()}/{name.repo}"
    token = "set HF_TOKEN to a token that may read it (or log in: hf auth login)"
    if _is_offline():
        return ValueError(
            f"{key}: {name} is not whole in the cache ({_cache()}), and HF_HUB_OFFLINE is set: "
            f"fetch it where there is a network (hf download {name.repo}), or unset the variable"
        )
    if isinstance(error, errors.GatedRepoError):
        return ValueError(f"{key}: {name.repo} is gated: ask for access at {page}, and {token}")
    if isinstance(error, errors.RevisionNotFoundError):
        return ValueError(
            f"{key}: {name.repo} has no revision {name.revision!r}: the branches, tags and commits "
            f"it has are at {page}/tree/main"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ValueError(
            f"{key}: {name.repo!r} is neither a folder here nor a model of {endpoint()}: correct "
            f"the name, or, for a private model, {token}"
        )
    if status in (401, 403):
        return ValueError(f"{key}: {endpoint()} refuses access to {name.repo}: {token}")
    if isinstance(error, errors.HFValidationError):
        return ValueError(f"{key}: {name.repo!r} is no name of a model: expected org/name")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return RuntimeError(
            f"{key}: no space left in {_cache()} for {name}: free some, or set HF_HOME to a folder "
            "on another disk; what has come whole is kept"
        )
    if is_unreachable(error):
        return HubUnreachableError(
            f"{key}: {endpoint()} cannot be reached for {name} ({first_line(error)}): check the "
            "network and HF_ENDPOINT, and start again; what has come whole is kept"
        )
    return RuntimeError(
        f"{key}: {name} could not be fetched from {endpoint()} ({first_line(error)}): start "
        "again, what has come whole is kept"
    )


def is_unreachable(error: BaseException | None) -> bool:
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code == 429
    if isinstance(error, errors.LocalEntryNotFoundError):  # the client then tried its cache
        return is_unreachable(error.__cause__)
    of_http_client = type(error).__module__.startswith("httpx")
    return of_http_client or isinstance(error, ConnectionError | TimeoutError)


def _is_offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cache_folder(repo: str, kind: Literal["model", "dataset"]) -> Path:
    """Cache folder of a repository on this machine."""
    return _cache() / f"{kind}s--{repo.replace('/', '--')}"


def cached_commit(repo: str, revision: str | None, kind: Literal["model", "dataset"]) -> str | None:
    """The commit of `revision` when this machine last resolved it; None if it never did."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    try:
        folder = snapshot_download(
            repo, repo_type=kind, revision=revision, local_files_only=True, allow_patterns=[]
        )
    except LocalEntryNotFoundError:
        return None
    return Path(folder).name


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _some(files: Mapping[str, int]) -> str:
    names = sorted(files)
    return ", ".join(names[:5]) + (", ..." if names[5:] else "") if names else "no files"


def first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
