"""The images of a row and the chat that shows them, apart.

    row = {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", ...}]}],
           "images": [encoded bytes]}
    chat_of(row)      the messages, each image a bare {"type": "image"}: what a chat template reads
    images_of(row)    encoded bytes in the order of the chat
    openai_chat(row)  the messages with each image as a data: URL: what an agent's client sends

An image is in `images`, or in its part of the chat as OpenAI's API writes it: {"type": "image_url",
"image_url": {"url": "data:image/png;base64,..."}}. Nothing is fetched.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

from areal.utils.images import image_bytes, image_url


def chat_of(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    chat = _messages(data)
    return [
        {**message, "content": [{"type": "image"} if _is_image(p) else p for p in content]}
        if isinstance(content := message.get("content"), list)
        else dict(message)
        for message in chat
    ]


def openai_chat(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chat of a row as OpenAI's API writes it, images included."""
    left = iter(images_of(data))
    return [
        {**message, "content": [_openai_part(part, left) for part in content]}
        if isinstance(content := message.get("content"), list)
        else dict(message)
        for message in _messages(data)
    ]


def _openai_part(part: Any, left: Iterator[bytes]) -> Any:
    if not _is_image(part):
        return part
    return {"type": "image_url", "image_url": {"url": image_url(next(left))}}


def images_of(data: Mapping[str, Any]) -> list[bytes]:
    given = iter(data.get("images") or ())
    found: list[bytes] = []
    for part in _image_parts(_messages(data)):
        source = _in_chat(part)
        if source is None:
            source = next(given, None)
            if source is None:
                raise ValueError(
                    "the chat shows more images than the row has in its column 'images' "
                    f"({len(found)})"
                )
        found.append(_encoded(source))
    if rest := len(list(given)):
        raise ValueError(
            f"the row has {rest} more images in its column 'images' than its chat shows: put a "
            '{"type": "image"} part where each belongs'
        )
    return found


def _messages(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "messages" not in data:
        raise ValueError(f"a row needs the key 'messages' (a chat), found {', '.join(data)}")
    return data["messages"]


def _image_parts(chat: list[dict[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in chat:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if _is_image(part))


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _in_chat(part: Mapping[str, Any]) -> Any:
    """What the part itself holds; None if the image is in the column."""
    url = part.get("image_url", part.get("image"))
    return url.get("url") if isinstance(url, Mapping) else url


def _encoded(source: Any) -> bytes:
    # Hugging Face stores an image that is not decoded as {"bytes", "path"}.
    data = source.get("bytes") if isinstance(source, Mapping) else source
    if isinstance(data, bytes):
        return data
    if isinstance(data, str):
        return image_bytes(data)
    save = getattr(data, "save", None)
    if callable(save):  # PIL.Image.Image; lossless, so pixels are those of the row
        buffer = io.BytesIO()
        save(buffer, format="PNG")
        return buffer.getvalue()
    raise ValueError(
        f"an image is encoded bytes, base64, a data: URL or a PIL image, got {source!r:.80}"
    )
