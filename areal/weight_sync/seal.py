"""What binds a publication to the run that wrote it: hashes of its files, and a MAC over the list.

    nbytes, digest = write_hashed(path, pieces)       # SHA-256 of the SHA-256 hashes of chunks
    digest = hash_file(path, nbytes)
    raw = seal(body, key)                             # JSON with an HMAC-SHA-256 of `body`
    body = unseal(raw, key)                           # ValueError if sealed with another key

The key is new for each run and is sent with the load request, over the authenticated channel.
Without it, write access to the folder is not enough to forge a publication that loads: the MAC
covers version, names, sizes, shapes and the hash of every file, and SHA-256, unlike a CRC, cannot
be matched by other bytes. Without a key (`""`) only damage is detected.

Files are hashed in chunks by many threads; a single thread is far slower than memory.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from areal.utils.device import num_cores

CHUNK_BYTES = 16 << 20
MAX_SEALED_BYTES = 256 << 20  # of a manifest
_MAX_THREADS = 8


def write_hashed(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Writes a new file that only this user can read; returns its size and hash."""
    views = [memoryview(piece) for piece in pieces]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb", buffering=0) as file, _pool() as pool:
        hashes = pool.map(_hash_slices, list(_chunks(views)))  # concurrent with writing
        for view in views:
            while view:
                view = view[file.write(view) :]
        return file.tell(), _digest(hashes)


def hash_file(path: Path, nbytes: int) -> str:
    """Hash of a file of `nbytes`; ValueError for another size, or if it is no plain file."""
    with _open_plain(path) as file, _pool() as pool:
        found = os.fstat(file.fileno()).st_size
        if found != nbytes:
            raise ValueError(f"has {found} bytes, the manifest says {nbytes}")
        hashes = pool.map(
            lambda start: _hash_slices([os.pread(file.fileno(), CHUNK_BYTES, start)]),
            range(0, nbytes, CHUNK_BYTES),
        )
        return _digest(hashes)


def read_plain(path: Path) -> bytes:
    """The bytes of a manifest; ValueError if it is no plain file or too large."""
    with _open_plain(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found > MAX_SEALED_BYTES:
            raise ValueError(f"has {found} bytes, expected at most {MAX_SEALED_BYTES}")
        return file.read()


def seal(body: dict[str, Any], key: str) -> bytes:
    mac = hmac.digest(key.encode(), json.dumps(body).encode(), "sha256").hex()
    return json.dumps({**body, "mac": mac}, indent=1).encode() + b"\n"


def unseal(raw: bytes, key: str) -> dict[str, Any]:
    try:
        body = json.loads(raw)
        del body["mac"]
        # Compares the canonical encoding, so that bytes JSON ignores also count as damage.
        is_ours = hmac.compare_digest(seal(body, key), raw)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        is_ours = False
    if not is_ours:
        cause = "or was written by somebody else: its MAC is not that of this run's key"
        if not key:
            cause = "or was written with a key, and none was given to open it"
        raise ValueError(f"is damaged, {cause}")
    return body


def _open_plain(path: Path):
    """Refuses links, and pipes, whose opening would block until a writer comes."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("is not a plain file")
    return open(fd, "rb")


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(num_cores(), _MAX_THREADS), thread_name_prefix="hash")


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


def _hash_slices(slices: list[memoryview] | list[bytes]) -> bytes:
    state = hashlib.sha256()
    for piece in slices:
        state.update(piece)
    return state.digest()


def _digest(hashes: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(hashes)).hexdigest()
