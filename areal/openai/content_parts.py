"""Parts of a message: texts, refusals, and images as clients write them and templates read them.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}     # chat completions
    {"type": "input_image", "image_url": "data:..."}                             # responses
    {"type": "image", "source": {"type": "base64", "data": "...", ...}}          # Anthropic

The last two become the first (anthropic_requests.py, responses_requests.py). For a template, and in
a recorded chat, the content of such a message is a list of parts, in which an image is named by a
hash: `{"type": "image", "image": "sha256:..."}`. So equal chats are equal, and a long one stays
short. The URLs are in `ChatCall.images`, in the order of the chat. Only messages of users and tools
may have images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from areal.utils.http_body import Body, Expect, Name, Text, refused

_URL = "the URL of an image: data:image/png;base64,..."
ImageUrlText = Annotated[Name, Expect(_URL)]
Content = str | list[dict[str, Any]]


class TextPart(Body):
    type: Annotated[
        Literal["text"], Expect("'text' or 'image_url': nothing else is understood here")
    ]
    text: Text


class RefusalPart(Body):
    """An assistant's, of an earlier turn."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


class ImageUrl(Body):
    url: ImageUrlText
    detail: Any = None  # without effect: the model's own image processor decides


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl | ImageUrlText

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


def _part_kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if kind in ("refusal", "image_url") else "words"


Part = Annotated[
    Annotated[TextPart, Tag("words")]
    | Annotated[RefusalPart, Tag("refusal")]
    | Annotated[ImagePart, Tag("image_url")],
    Discriminator(_part_kind),
]


class InputImage(Body):
    """Of OpenAI's responses."""

    type: Literal["input_image"]
    image_url: ImageUrlText
    detail: Any = None

    @property
    def url(self) -> str:
        return self.image_url


class Base64Source(Body):
    type: Literal["base64"]
    media_type: Name = "image/png"
    data: Name

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(Body):
    type: Literal["url"]
    url: ImageUrlText


class ImageBlock(Body):
    """Of Anthropic's messages."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]

    @property
    def url(self) -> str:
        return self.source.url


AnyImage = ImagePart | InputImage | ImageBlock


def chat_content(blocks: Iterable[Any], separator: str) -> Content:
    """The content of a chat completion's message: its texts, joined, or parts if it has images."""
    blocks = list(blocks)
    if not any(isinstance(block, AnyImage) for block in blocks):
        return separator.join(block.text for block in blocks)
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, AnyImage):
            parts.append({"type": "image_url", "image_url": {"url": block.url}})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += separator + block.text
        else:
            parts.append({"type": "text", "text": block.text})
    return parts


def template_content(parts: Sequence[Any]) -> list[dict[str, Any]]:
    """Parts of a chat completion's message as a template reads them."""
    return [
        {"type": "image", "image": _name_of(part.url)}
        if isinstance(part, ImagePart)
        else {"type": "text", "text": part.text}
        for part in parts
    ]


def sent_again(message: dict[str, Any]) -> dict[str, Any]:
    """A recorded message as a client would send it: each image by its name in place of its URL."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {"type": "image_url", "image_url": {"url": part["image"]}}
        if part["type"] == "image"
        else part
        for part in content
    ]
    return {**message, "content": parts}


def image_names(messages: Iterable[dict[str, Any]]) -> list[str]:
    """Of messages as templates read them, in their order."""
    return [part["image"] for message in messages for part in _image_parts(message)]


def named_images(messages: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """`messages` with other names for their images, in their order."""
    left = iter(names)
    return [
        {
            **message,
            "content": [
                {"type": "image", "image": next(left)} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        if _image_parts(message)
        else message
        for message in messages
    ]


def _image_parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return (
        [part for part in content if part["type"] == "image"] if isinstance(content, list) else []
    )


def joined_contents(contents: Sequence[Content]) -> Content:
    """Of several messages, for one."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(str(content) for content in contents)
    parts: list[dict[str, Any]] = []
    for number, content in enumerate(contents):
        if number:
            parts.append({"type": "text", "text": "\n\n"})
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def check_place(role: str, parts: Sequence[Any]) -> None:
    """For the model of a message: PydanticCustomError if images may not stand in it."""
    if role not in ("user", "tool") and any(isinstance(part, ImagePart) for part in parts):
        raise refused(
            "content", f"a message of role {role!r} has no images, only users' and tools'"
        )


def _name_of(url: str) -> str:
    return f"sha256:{hashlib.sha256(url.encode()).hexdigest()}"
