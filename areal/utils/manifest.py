"""Checksummed lists of files: any damaged file is detected and named.

Two kinds of folder have one: those of a run (recover points, checkpoints), below, and publications
of weights (weight_sync/publication.py). Both consist of the same two parts:

    raw = seal(body, key)                                # JSON with a digest over all of it
    body = unseal(raw, key)                              # ValueError if sealed with another key
    check_content(file, nbytes, digest, chunked_sha256)  # ValueError if it holds something else

With a key the digest is an HMAC-SHA-256: write access to the folder is not enough to forge a list
that verifies, since it covers the hash of every file, and SHA-256, unlike a CRC, cannot be matched
by other bytes. Without a key (`""`) only damage is detected.

The list of a run's folder:

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
import hmac
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
CHUNK_BYTES = 16 << 20
_FORMAT = 2
_NUM_THREADS = 8  # hashing releases the GIL; a single thread is far slower than memory
_MAX_SEALED_BYTES = 256 << 20
# What reading JSON that is not ours can raise.
_MALFORMED = (ValueError, KeyError, AttributeError, TypeError, RecursionError)


class DamagedError(RuntimeError):
    """A file of a checksummed folder differs from what was written."""

    def __init__(self, folder: str, name: str, fault: str) -> None:
        super().__init__(folder, name, fault)  # all arguments, so that it pickles between ranks

    def __str__(self) -> str:
        folder, name, fault = self.args
        return f"{folder} is damaged: {name}: {fault}"


@dataclass(frozen=True, slots=True)
class _Seal:
    """How a JSON object carries the digest of its other keys."""

    field: str
    digest: Callable[[bytes], str]
    sort_keys: bool
    end: bytes = b""

    def write(self, body: Mapping[str, Any]) -> bytes:
        digest = self.digest(json.dumps(body, sort_keys=self.sort_keys).encode())
        sealed = json.dumps({**body, self.field: digest}, sort_keys=self.sort_keys, indent=1)
        return sealed.encode() + self.end

    def read(self, raw: bytes) -> tuple[dict[str, Any], bool]:
        """The body, and whether it is as it was written: also bytes that JSON ignores count."""
        body = json.loads(raw)
        body.pop(self.field, None)
        return body, hmac.compare_digest(self.write(body), raw)


_CHECKSUM = _Seal("sha256", lambda text: hashlib.sha256(text).hexdigest(), sort_keys=True)


def _mac(key: str) -> _Seal:
    def digest(text: bytes) -> str:
        return hmac.digest(key.encode(), text, "sha256").hex()

    return _Seal("mac", digest, sort_keys=False, end=b"\n")


def seal(body: Mapping[str, Any], key: str) -> bytes:
    return _mac(key).write(body)


def unseal(raw: bytes, key: str) -> dict[str, Any]:
    try:
        body, is_ours = _mac(key).read(raw)
    except _MALFORMED:
        body, is_ours = {}, False
    if not is_ours:
        cause = "or was written by somebody else: its MAC is not that of this run's key"
        if not key:
            cause = "or was written with a key, and none was given to open it"
        raise ValueError(f"is damaged, {cause}")
    return body


def check_content(
    file: BufferedReader, nbytes: int, expected: str, digest: Callable[[BufferedReader], str]
) -> None:
    """ValueError says how the file differs from its description."""
    size = os.fstat(file.fileno()).st_size
    if size != nbytes:
        raise ValueError(f"{size} bytes, expected {nbytes}")
    if digest(file) != expected:
        raise ValueError("its checksum differs from the manifest")


def chunked_sha256(file: BufferedReader) -> str:
    """SHA-256 of the SHA-256 hashes of chunks, which many threads compute."""
    with _threads() as threads:
        hashes = threads.map(
            lambda start: hashlib.sha256(os.pread(file.fileno(), CHUNK_BYTES, start)).digest(),
            range(0, os.fstat(file.fileno()).st_size, CHUNK_BYTES),
        )
        return _digest_of(hashes)


def write_hashed(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file that only this user can read; returns its size and `chunked_sha256`."""
    views = [memoryview(piece) for piece in pieces]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb", buffering=0) as file, _threads() as threads:
        hashes = threads.map(_hash_slices, list(_chunks(views)))  # concurrent with writing
        for view in views:
            while view:
                view = view[file.write(view) :]
        return file.tell(), _digest_of(hashes)


def open_plain(path: Path) -> BufferedReader:
    """Refuses links, and pipes, whose opening would block until a writer comes."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("is not a plain file")
    return open(fd, "rb")


def read_sealed(path: Path) -> bytes:
    """The bytes of a sealed file; ValueError if it is no plain file or too large."""
    with open_plain(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found > _MAX_SEALED_BYTES:
            raise ValueError(f"has {found} bytes, expected at most {_MAX_SEALED_BYTES}")
        return file.read()


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
        with file.open("rb") as stream:
            return {"nbytes": file.stat().st_size, "sha256": _sha256(stream)}

    names = list(names)
    with _threads() as threads:
        return dict(zip(names, threads.map(facts_of, names), strict=True))


def write_manifest(
    folder: Path, files: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]
) -> None:
    body = {"format": _FORMAT, "facts": dict(facts), "files": dict(files)}
    (folder / MANIFEST).write_bytes(_CHECKSUM.write(body))


def read_manifest(folder: Path) -> Manifest:
    """The manifest, if it is intact and lists exactly the existing files."""
    try:
        raw = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise DamagedError(str(folder), MANIFEST, "missing") from None
    try:
        body, is_intact = _CHECKSUM.read(raw)
        found_format = body.get("format")
    except _MALFORMED as error:
        raise DamagedError(str(folder), MANIFEST, f"unreadable ({error})") from None
    if found_format != _FORMAT:
        fault = f"format {found_format}, expected {_FORMAT}"
        raise DamagedError(str(folder), MANIFEST, fault)
    if not is_intact:
        raise DamagedError(str(folder), MANIFEST, "its checksum differs from its text")
    files, facts = body.get("files"), body.get("facts")
    if not isinstance(facts, dict) or not isinstance(files, dict) or not _describe_files(files):
        raise DamagedError(str(folder), MANIFEST, "malformed")
    manifest = Manifest(files, facts)
    _check_names(folder, manifest)
    return manifest


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """DamagedError for the first file that differs from the manifest."""

    def check(name: str) -> None:
        expected = manifest.files[name]
        with (folder / name).open("rb") as file:
            try:
                check_content(file, expected["nbytes"], expected["sha256"], _sha256)
            except ValueError as error:
                raise DamagedError(str(folder), name, str(error)) from None

    with _threads() as threads:
        for _ in threads.map(check, names):
            pass


def _describe_files(files: dict[str, Any]) -> bool:
    return all(
        isinstance(facts, dict) and facts.keys() == {"nbytes", "sha256"} for facts in files.values()
    )


def _check_names(folder: Path, manifest: Manifest) -> None:
    found = set(list_files(folder))
    for name in sorted(manifest.files.keys() - found):
        raise DamagedError(str(folder), name, "missing")
    for name in sorted(found - manifest.files.keys()):
        raise DamagedError(str(folder), name, "foreign, the manifest does not know it")


def _sha256(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="hash")


def _chunks(views: list[memoryview]) -> Iterator[list[memoryview]]:
    """The concatenated bytes in chunks of CHUNK_BYTES."""
    chunk: list[memoryview] = []
    room = CHUNK_BYTES
    for view in views:
        while view:
            chunk.append(view[:room])
            room -= len(chunk[-1])
            view = view[len(chunk[-1]) :]
            if room == 0:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk


def _hash_slices(slices: list[memoryview]) -> bytes:
    state = hashlib.sha256()
    for piece in slices:
        state.update(piece)
    return state.digest()


def _digest_of(hashes: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(hashes)).hexdigest()
