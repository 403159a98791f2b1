"""Images in an agent's calls: read, kept in the run's folder, and expanded in the prompt.

    ChatCall.images, URLs -> encoded bytes -> kept by sha256 -> names in the chat: "sha256:HEX"
                                                        +-> image tokens in the prompt

A URL is `data:`, `file:` below a permitted folder, or the name of an image that the session has
shown before (`previous_response_id` sends those). Nothing is fetched. An image is on disk before
the engine sees it, and a trajectory names it by its hash, so the record has no pixels.

Blocking: decoding happens in another process, and files are flushed. Not for an event loop.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from areal.agents.image_budget import ImageBudget
from areal.api.image_references import ShownImage
from areal.models.vision.processor import ImageProcessor
from areal.models.vision.prompt_images import MAX_IMAGES
from areal.openai.content_parts import named_images
from areal.openai.errors import WireError
from areal.openai.requests import ChatCall
from areal.utils.images import ImageError, image_bytes, image_url

_NAME = "sha256:"


class Store(Protocol):
    """Images of a run by the sha256 of their bytes (run/images.py)."""

    def add(self, data: bytes) -> bytes: ...

    def read(self, digest: bytes) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Sight:
    """How the model of a run sees, and where its images are kept."""

    processor: ImageProcessor
    store: Store
    folders: Sequence[str] = ()  # `file:` URLs below these are read

    def look(
        self, call: ChatCall, known: Collection[ShownImage], budget: ImageBudget
    ) -> tuple[ChatCall, list[ShownImage]]:
        """The call with its images by name, and the images. WireError for one that is not taken.

        `known` are the images that the session has shown; new ones are taken from its budget.
        """
        if len(call.images) > MAX_IMAGES:
            message = f"messages: {len(call.images)} images, at most {MAX_IMAGES}"
            raise WireError(400, message, "messages")
        by_name = {name_of(image): image for image in known}
        images = [self._image(i, url, by_name, budget) for i, url in enumerate(call.images)]
        messages = named_images(call.messages, [name_of(image) for image in images])
        return dataclasses.replace(call, messages=messages), images

    def expand(self, ids: Sequence[int], images: Sequence[ShownImage]) -> list[int]:
        """An image token for each merged patch. WireError if a text has one, too."""
        try:
            return self.processor.expand(ids, [image.grid for image in images])
        except ValueError as error:
            raise WireError(400, f"messages: {error}", "messages") from None

    def num_tokens(self, images: Sequence[ShownImage]) -> int:
        """That these images have in a prompt."""
        return sum(self.processor.args.num_tokens(image.grid) for image in images)

    def count_tokens(self, ids: Sequence[int]) -> int:
        """That a prompt has for images."""
        return sum(one == self.processor.args.image_token_id for one in ids)

    def data_of(self, images: Sequence[ShownImage]) -> list[str]:
        """For the engine, in base64."""
        return [base64.b64encode(self.store.read(image.sha256)).decode() for image in images]

    def _image(
        self, number: int, url: str, known: dict[str, ShownImage], budget: ImageBudget
    ) -> ShownImage:
        if url in known:
            return known[url]
        try:
            data = image_bytes(url, self.folders)
            # A client sends the whole chat with every call: what was seen is not decoded again.
            name = f"{_NAME}{hashlib.sha256(data).hexdigest()}"
            if name in known:
                return known[name]
            grid = self.processor.grid_of(data)  # first: it refuses what is no image
        except ImageError as error:
            raise WireError(400, f"messages: image {number}: {error}", "messages") from None
        budget.take(name, len(data))
        return ShownImage(self.store.add(data), grid)


def name_of(image: ShownImage) -> str:
    return f"{_NAME}{image.sha256.hex()}"


def refuse_images(call: ChatCall) -> None:
    """For a model of text."""
    if call.images:
        message = "messages: the model of this run reads text only: leave the images out"
        raise WireError(400, message, "messages")


def sendable_row(value: Any) -> Any:
    """A row of a data set for JSON: encoded images become data: URLs, all else stays."""
    if isinstance(value, bytes):
        return image_url(value)
    if isinstance(value, dict):
        return {key: sendable_row(one) for key, one in value.items()}
    return [sendable_row(one) for one in value] if isinstance(value, list) else value
