"""The one error a user's configuration can end in."""

from __future__ import annotations


class ConfigError(ValueError):
    """One line: where it was written, what was found, what was expected, what to change."""

    def __init__(self, message: str) -> None:
        # What a user wrote may hold line breaks; the message quotes it and stays one line.
        super().__init__(" ".join(message.splitlines()))
