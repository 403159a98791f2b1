"""Child process of images.py that decodes images until its parent closes the channel.

    out  an empty frame once it is ready; then for each call
    in   encoded bytes
    out  {"height", "width"}, RGB bytes row by row | {"error": why there are none}

What a decoder does with hostile bytes (loop, allocate, crash) ends this process and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import warnings

import numpy as np
from PIL import Image, ImageOps
from pydantic_core import to_json

from areal.api.json_text import well_formed
from areal.utils.channel import Channel
from areal.utils.limited_process import cpu_time, limit_resources

CPU_S = 10.0
MEMORY_BYTES = 1 << 30
MAX_PIXELS = 1 << 25  # 33 million, 8192 x 4096
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def main(fd: str) -> None:
    channel = Channel(socket.socket(fileno=int(fd)))
    os.dup2(2, 1)  # printed text is for the log
    Image.init()  # loads the decoders, before memory is limited
    Image.MAX_IMAGE_PIXELS = None  # checked here, with a limit of our own
    warnings.simplefilter("ignore")  # about metadata that is not read
    limit_resources(MEMORY_BYTES)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
        channel.send()
        while True:
            (data,) = channel.receive()
            channel.send(*answer(data))


def answer(data: bytes | bytearray) -> list[bytes]:
    try:
        with cpu_time(CPU_S):
            rgb = _decoded(data)
    except MemoryError:
        return [to_json({"error": f"it takes more than {MEMORY_BYTES >> 20} MiB to decode"})]
    except Exception as error:  # the bytes are hostile: a decoder raises anything
        # Pillow shows the memory address of its buffer.
        text = well_formed(f"{type(error).__name__}: {error}").partition(" <_io.")[0]
        return [to_json({"error": text[:200]})]
    return [to_json({"height": rgb.height, "width": rgb.width}), rgb.tobytes()]


def _decoded(data: bytes | bytearray) -> Image.Image:
    """Eight bits of red, green and blue, upright, on white where it is transparent."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ValueError(f"{width} x {height} pixels, expected at most {MAX_PIXELS} in all")
        image.load()  # of an animation the first frame
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # 16 bits of grey, which Pillow would clip to 8
            grey = np.asarray(upright).astype(np.int64).clip(0, 65535) >> 8
            return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
        if not upright.has_transparency_data:
            return upright.convert("RGB")
        over = upright.convert("RGBA")
        white = Image.new("RGBA", over.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, over).convert("RGB")
