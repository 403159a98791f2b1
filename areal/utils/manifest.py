"""Checksummed list of a folder's files: any damaged file is detected and named.

    with atomic_folder(path) as folder:
        ...                                              # write files
        write_manifest(folder, describe(folder, list_files(folder)), facts={"step": 7})

    manifest = read_manifest(path)                       # checks the manifest itself
    check_files(path, manifest, list(manifest.files))    # and these files, byte by byte

A file that is missing, truncated, changed or unlisted is a DamagedError with its name. A subfolder
with its own manifest is listed by that manifest file alone, which covers the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_FORMAT = 2
_NUM_THREADS = 8  # hashing releases the GIL


class DamagedError(RuntimeError):
    """A file of a checksummed folder differs from what was written."""

    def __init__(self, folder: str, name: str, fault: str) -> None:
        super().__init__(folder, name, fault)  # all arguments, so that it pickles between ranks

    def __str__(self) -> str:
        folder, name, fault = self.args
        return f"{folder} is damaged: {name}: {fault}"


@dataclass(frozen=True, slots=True)
class Manifest:
    files: dict[str, dict[str, Any]]  # name relative to the folder -> nbytes, sha256
    facts: dict[str, Any]


def list_files(folder: Path) -> list[str]:
    """Names of the files that a manifest of `folder` covers, in order."""
    vouched = [found.parent for found in folder.rglob(MANIFEST) if found.parent != folder]
    names = []
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        inside = any(parent in file.parents for parent in vouched)
        if file != folder / MANIFEST and (not inside or file.name == MANIFEST):
            names.append(str(file.relative_to(folder)))
    return names


def describe(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size and checksum of each file."""

    def facts_of(name: str) -> dict[str, Any]:
        file = folder / name
        return {"nbytes": file.stat().st_size, "sha256": _sha256(file)}

    names = list(names)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        return dict(zip(names, threads.map(facts_of, names), strict=True))


def write_manifest(
    folder: Path, files: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]
) -> None:
    body = {"format": _FORMAT, "facts": dict(facts), "files": dict(files)}
    (folder / MANIFEST).write_bytes(_with_own_checksum(body))


def read_manifest(folder: Path) -> Manifest:
    """The manifest, if it is intact and lists exactly the existing files."""
    try:
        raw = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise DamagedError(str(folder), MANIFEST, "missing") from None
    try:
        body = json.loads(raw)
        own_checksum, found_format = body.pop("sha256", None), body.get("format")
    except (ValueError, AttributeError) as error:  # bad UTF-8, bad JSON, not a JSON object
        raise DamagedError(str(folder), MANIFEST, f"unreadable ({error})") from None
    if found_format != _FORMAT:
        fault = f"format {found_format}, expected {_FORMAT}"
        raise DamagedError(str(folder), MANIFEST, fault)
    if own_checksum is None or _with_own_checksum(body) != raw:
        raise DamagedError(str(folder), MANIFEST, "its checksum differs from its text")
    files, facts = body.get("files"), body.get("facts")
    if not isinstance(facts, dict) or not _are_descriptions(files):
        raise DamagedError(str(folder), MANIFEST, "malformed")
    manifest = Manifest(files, facts)
    _check_names(folder, manifest)
    return manifest


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """DamagedError for the first file that differs from the manifest."""

    def check(name: str) -> None:
        file, expected = folder / name, manifest.files[name]
        size = file.stat().st_size
        if size != expected["nbytes"]:
            raise DamagedError(str(folder), name, f"{size} bytes, expected {expected['nbytes']}")
        if _sha256(file) != expected["sha256"]:
            raise DamagedError(str(folder), name, "its checksum differs from the manifest")

    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for _ in threads.map(check, names):
            pass


def _are_descriptions(files: Any) -> bool:
    return isinstance(files, dict) and all(
        isinstance(facts, dict) and facts.keys() == {"nbytes", "sha256"} for facts in files.values()
    )


def _check_names(folder: Path, manifest: Manifest) -> None:
    found = set(list_files(folder))
    for name in sorted(manifest.files.keys() - found):
        raise DamagedError(str(folder), name, "missing")
    for name in sorted(found - manifest.files.keys()):
        raise DamagedError(str(folder), name, "foreign, the manifest does not know it")


def _with_own_checksum(body: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, sort_keys=True, indent=1).encode()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
