"""Images from outside: read from where they are given, checked, and decoded in a process apart.

    data = image_bytes("data:image/png;base64,...")       # or base64, or a file of `folders`
    image = decode_image(data)                            # image.rgb uint8 [H, W, 3], image.sha256

An image is hostile until it is decoded: a file of 200 bytes can ask for gigabytes, and decoders
have faults. So a child (image_worker.py) decodes it, and whatever happens there is an `ImageError`
here, which says what was found and what is expected.

| limit                               | enforced by                                         |
|-------------------------------------|-----------------------------------------------------|
| 32 MiB of encoded bytes             | this process                                        |
| PNG, JPEG, WebP, GIF (first frame), | this process, by the first bytes, and the child     |
| BMP                                 |                                                     |
| 33 million pixels                   | the child, before it decodes them                   |
| 1 GiB of memory, 10 s of CPU time   | the kernel, which ends the child                    |

Nothing is ever fetched: an http URL is refused. A file is read only if its real path, after all
links, lies below a permitted folder, also if somebody puts links there at that moment. Transparent
pixels are on white, 16 bits of grey become 8, and the orientation that a camera noted is applied,
so that all who see the image see the same pixels.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
from pydantic_core import from_json

from areal.utils.image_worker import CPU_S, FORMATS
from areal.utils.limited_process import LimitedProcesses, LimitExceededError

MAX_BYTES = 32 << 20
_MAX_TEXT = MAX_BYTES * 4 // 3 + 4
_MAX_SHOWN = 60
_TYPES = {
    b"\x89PNG\r\n\x1a\n": "png",
    b"\xff\xd8\xff": "jpeg",
    b"RIFF": "webp",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"BM": "bmp",
}
_MAGIC = tuple(_TYPES)
_children = LimitedProcesses("areal.utils.image_worker", "the decoder of images", cpu_s=CPU_S)


class ImageError(ValueError):
    """An image that is not taken, and why."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedImage:
    sha256: bytes  # of the encoded bytes
    rgb: np.ndarray  # uint8 [H, W, 3]


def image_bytes(source: str, folders: Sequence[str | Path] = ()) -> bytes:
    """Encoded bytes of base64, of a `data:` URL, or of a `file:` URL below one of `folders`."""
    if source.startswith("data:"):
        head, comma, text = source.partition(",")
        if not comma or not head.endswith(";base64") or not head.startswith("data:image/"):
            raise ImageError(
                f"an image URL begins with data:image/TYPE;base64, got {head[:_MAX_SHOWN]!r}"
            )
        return _from_base64(text)
    if source.startswith("file:"):
        return _from_file(source, folders)
    if source.partition(":")[0].lower() in ("http", "https", "ftp", "s3", "gs"):
        raise ImageError(
            f"images are not fetched from the network, got {source[:_MAX_SHOWN]!r}: send the bytes "
            "as data:image/png;base64,..."
        )
    return _from_base64(source)


def check_encoded(data: bytes) -> None:
    """ImageError unless size and first bytes are those of an image that is taken."""
    if not data:
        raise ImageError("the image has 0 bytes")
    if len(data) > MAX_BYTES:
        raise ImageError(f"the image has {len(data)} bytes, expected at most {MAX_BYTES}")
    if not data.startswith(_MAGIC) or (data[:4] == b"RIFF" and data[8:12] != b"WEBP"):
        raise ImageError(
            f"the image begins with {data[:8]!r}, which is none of {', '.join(FORMATS)}"
        )


def image_url(data: bytes) -> str:
    """Encoded bytes as a `data:` URL; ImageError for what does not begin like an image."""
    check_encoded(data)
    kind = next(kind for magic, kind in _TYPES.items() if data.startswith(magic))
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def decode_image(data: bytes) -> DecodedImage:
    check_encoded(data)
    try:
        with _children.one() as child:
            head, *rows = child.ask(data)
    except LimitExceededError as error:
        raise ImageError(f"decoding the image takes more than {error}") from None
    match from_json(head), rows:
        case {"error": str(error)}, []:
            raise ImageError(f"the image cannot be decoded: {error}")
        case {"height": int(height), "width": int(width)}, [pixels] if (
            len(pixels) == height * width * 3
        ):
            rgb = np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
            return DecodedImage(hashlib.sha256(data).digest(), rgb)
    raise ImageError("the image cannot be decoded: its decoder gave a malformed reply")


def _from_base64(text: str) -> bytes:
    if len(text) > _MAX_TEXT:
        raise ImageError(f"the image has more than {MAX_BYTES} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):  # ValueError: not ASCII
        raise ImageError(f"an image is base64, got {text[:_MAX_SHOWN]!r}") from None


def _from_file(url: str, folders: Sequence[str | Path]) -> bytes:
    shown = repr(url[:_MAX_SHOWN])
    if not folders:
        raise ImageError(
            f"files are not read, got {shown}: send the bytes as data:image/png;base64,..., or "
            "permit a folder when the server is started"
        )
    refusal = ImageError(f"{shown} is no file below a permitted folder")
    try:
        parts = urlsplit(url)
        path = Path(os.path.realpath(unquote(parts.path, errors="strict"), strict=True))
    except (OSError, ValueError):  # also NUL, a surrogate, a loop of links
        raise refusal from None
    permitted = [Path(os.path.realpath(folder)) for folder in folders]
    above = next(filter(path.is_relative_to, permitted), None)
    if parts.netloc not in ("", "localhost") or above is None or path == above:
        raise refusal
    try:
        fd = _open_below(above, path.relative_to(above))
    except OSError:
        raise refusal from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise refusal
    with open(fd, "rb") as file:
        return file.read(MAX_BYTES + 1)


def _open_below(folder: Path, path: Path) -> int:
    """A descriptor of `folder/path`; OSError if a part of `path` is a link.

    The path was real when it was looked at. Whoever may write below `folder` may have put a link
    in the place of one of its parts since then; so each part is opened in the one before it.
    """
    # NONBLOCK: a FIFO must not be waited for.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(folder, flags | os.O_DIRECTORY)
    for part in path.parts:
        try:
            inner = os.open(part, flags, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
    return fd
