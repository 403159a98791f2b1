"""The image boundary: what is taken becomes the same RGB pixels; nothing else gets past it."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import struct
import threading
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from areal.utils import images
from areal.utils.images import MAX_BYTES, ImageError, decode_image, image_bytes


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(height: int = 6, width: int = 9) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + name + body + struct.pack("!I", zlib.crc32(name + body))


def png(width: int, height: int, body: bytes, *more: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack("!IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


SMALL = encoded(Image.fromarray(picture()))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP", "GIF", "JPEG"])
def test_every_format_that_is_taken(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(Image.fromarray(picture()), kind, **options)
    found = decode_image(data)
    assert found.sha256 == hashlib.sha256(data).digest()
    assert found.rgb.shape == (6, 9, 3) and found.rgb.dtype == np.uint8
    if kind in ("PNG", "BMP", "WEBP"):
        assert np.array_equal(found.rgb, picture())


def test_transparent_pixels_are_white_in_colours_and_in_palettes():
    rgba = Image.new("RGBA", (4, 4), (200, 0, 0, 0))
    rgba.putpixel((1, 1), (10, 20, 30, 255))
    for image in (rgba, rgba.quantize(8)):
        found = decode_image(encoded(image)).rgb
        assert found[0, 0].tolist() == [255, 255, 255]
        assert found[1, 1].tolist() == [10, 20, 30]


def test_sixteen_bits_of_grey_become_eight():
    grey = np.array([[0, 256, 32768, 65535]], np.uint16)
    found = decode_image(encoded(Image.fromarray(grey))).rgb
    assert found[0, :, 0].tolist() == [0, 1, 128, 255]


def test_cmyk_bits_and_grey_become_colours():
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red = decode_image(encoded(cmyk, "JPEG", quality=95)).rgb[4, 4]
    assert red[0] > 200 and red[1] < 60 and red[2] < 60
    assert decode_image(encoded(Image.new("1", (3, 3), 1))).rgb.tolist() == [[[255] * 3] * 3] * 3
    assert decode_image(encoded(Image.new("L", (1, 1), 77))).rgb.tolist() == [[[77] * 3]]


def test_an_image_is_turned_as_its_camera_says():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    upright = decode_image(encoded(Image.fromarray(picture()), exif=exif)).rgb
    assert np.array_equal(upright, np.rot90(picture(), -1))


def test_of_an_animation_the_first_frame():
    frames = [Image.new("RGB", (4, 4), (color, 0, 0)) for color in (255, 128, 0)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], loop=0)
    assert decode_image(data).rgb[0, 0].tolist() == [255, 0, 0]


HOSTILE = {
    "a bomb": png(50_000, 50_000, zlib.compress(bytes(1000))),
    "a wide bomb": png(2**31 - 1, 1, zlib.compress(b"\0")),
    "a text bomb": png(4, 4, b"", chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 27), 1))),
    "nothing": b"",
    "half of it": encoded(Image.fromarray(picture(64, 64)))[:3000],
    "only its first bytes": SMALL[:8],
    "a wrong name": b"\xff\xd8\xff" + SMALL,
    "an svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "an endless gif": b"GIF89a\x04\0\x04\0\x80\0\0" + bytes(6) + b"!\xfe" + b"\xff" * 100_000,
    "a gif without pixels": b"GIF89a\x04\0\x04\0\0\0\0;",
    "a sound": b"RIFF\x24\0\0\0WAVEfmt ",
    "a tiff": b"II*\0" + bytes(100),
    "no pixels": png(0, 0, b""),
    "noise": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images_are_refused_and_take_nothing_here(name):
    before = max_rss_bytes()
    with pytest.raises(ImageError):
        decode_image(HOSTILE[name])
    assert max_rss_bytes() - before < 1 << 27, "this process took none of it"


def max_rss_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_too_many_bytes_are_refused_before_they_are_decoded():
    with pytest.raises(ImageError, match=f"at most {MAX_BYTES}"):
        decode_image(SMALL + bytes(MAX_BYTES))
    with pytest.raises(ImageError, match="bytes"):
        image_bytes("A" * (MAX_BYTES * 2))


def test_a_decoder_that_was_killed_is_replaced():
    decode_image(SMALL)
    for child in images._children._free:
        child._process.kill()
        child._process.wait()
    assert decode_image(SMALL).rgb.shape == (6, 9, 3)


@settings(max_examples=60)
@given(st.integers(0, len(SMALL) - 1), st.binary(min_size=1, max_size=4), st.booleans())
def test_damaged_bytes_are_an_image_or_an_error(place, damage, is_cut):
    data = SMALL[:place] + damage + (b"" if is_cut else SMALL[place + len(damage) :])
    try:
        rgb = decode_image(data).rgb
    except ImageError:
        return
    assert rgb.ndim == 3 and rgb.shape[2] == 3


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("https://example.com/cat.png", "not fetched"),
        ("HTTP://example.com/cat.png", "not fetched"),
        ("file:///etc/passwd", "permit a folder"),
        ("data:image/png,abc", "base64"),
        ("data:text/html;base64,AAAA", "data:image/TYPE"),
        ("data:image/png;base64,A*A=", "base64"),
        ("data:image/png;base64,\ud83d", "base64"),
        ("/etc/passwd", "base64|begins with"),
    ],
)
def test_sources_that_are_not_read(source, says):
    with pytest.raises(ImageError, match=says):
        decode_image(image_bytes(source))


def test_base64_and_data_urls_are_read():
    text = base64.b64encode(SMALL).decode()
    assert image_bytes(text) == image_bytes(f"data:image/png;base64,{text}") == SMALL


def test_links_that_change_while_a_file_is_opened_lead_nowhere(folder):
    """`deep` is a folder and a link to a folder of secrets in turns, as fast as the kernel can."""
    outside = folder.parent / "secrets"
    outside.mkdir()
    (outside / "a b.png").write_bytes(b"secret")
    link = folder / "link"
    link.symlink_to(outside)
    ended = threading.Event()

    def swap():
        while not ended.is_set():
            os.rename(folder / "deep", folder / "kept")
            os.rename(link, folder / "deep")
            os.rename(folder / "deep", link)
            os.rename(folder / "kept", folder / "deep")

    swapping = threading.Thread(target=swap)
    swapping.start()
    read = set()
    try:
        for _ in range(1000):
            with suppress(ImageError):
                read.add(image_bytes(f"file://{folder}/deep/a%20b.png", [folder]))
    finally:
        ended.set()
        swapping.join()
    assert read <= {SMALL}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "open" / "deep").mkdir(parents=True)
    (tmp_path / "open" / "deep" / "a b.png").write_bytes(SMALL)
    (tmp_path / "secret.png").write_bytes(SMALL)
    (tmp_path / "openness").mkdir()
    (tmp_path / "openness" / "near.png").write_bytes(SMALL)
    return tmp_path / "open"


def test_files_below_a_permitted_folder_are_read(folder):
    assert image_bytes(f"file://{folder}/deep/a%20b.png", [folder]) == SMALL
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert image_bytes(f"file://{link}/deep/a%20b.png", [link]) == SMALL


def test_no_way_leads_out_of_a_permitted_folder(folder):
    (folder / "out.png").symlink_to(folder.parent / "secret.png")
    (folder / "up").symlink_to(folder.parent)
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe.png")
    inside = f"file://{folder}"
    for url in (
        f"{inside}/../secret.png",
        f"{inside}/deep/%2e%2e/%2e%2e/secret.png",
        f"{inside}/out.png",
        f"{inside}/up/secret.png",
        f"{inside}/loop",
        f"{inside}/pipe.png",
        f"{inside}/deep",
        f"{inside}/missing.png",
        f"{inside}/a%00b.png",
        f"{inside}/%ff.png",
        f"file://{folder}ness/near.png",
        f"file://otherhost{folder}/deep/a%20b.png",
        "file:secret.png",
        "file:///dev/zero",
        "file://[",
    ):
        with pytest.raises(ImageError, match="permitted folder"):
            image_bytes(url, [folder])
