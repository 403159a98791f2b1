"""Redaction: which values are secret, and removal of secrets from texts and config trees.

A value is secret if its name says so (`judge_api_key`, `HF_TOKEN`, `db_password`), if an
environment variable with such a name has it (`OPENAI_KEY`, `GH_PAT`, `DB_PASS`), if it is a URL
with a password, or if it was registered (`remember_secret`: the token of a run's servers). Logs,
the run's database, the saved config and trackers are written through here. Lone surrogates are
replaced as well: neither files nor SQLite accept them.

More names count as secret in the environment than in a config, where `answer_key` and `first_pass`
are ordinary words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from areal.api.json_text import well_formed

Tree: TypeAlias = "Mapping[Any, Tree] | list[Tree] | tuple[Tree, ...] | str | float | bool | None"

HIDDEN = "<hidden>"
_MIN_CHARS = 8  # hiding shorter values would hide ordinary words
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = (
    {"secret", "password", "passwd", "passphrase", "sshpass"}
    | {"credential", "credentials", "creds"}
    | {"apikey", "token", "bearer", "jwt"}
)
_SECRET_ENDS = ("password", "passwd", "passphrase", "apikey", "authtoken")  # PGPASSWORD
_KINDS_OF_KEY = (
    {"api", "access", "admin", "private", "secret", "auth", "encryption", "signing"}
    | {"openai", "anthropic", "wandb", "hf", "azure", "aws", "gcp", "github", "gitlab"}
    | {"ssh", "deploy", "service", "master", "license", "webhook"}
)
_KINDS_OF_PASS = {"db", "user", "smtp", "mail", "ftp", "redis", "mysql", "postgres", "admin"}
# Last words of environment variables.
_SECRET_LAST = {"KEY", "PAT", "PASS", "PWD", "AUTH", "DSN", "WEBHOOK", "COOKIE", "CRED"}
# `pad_token` and the like name vocabulary entries.
_KINDS_OF_TOKEN = (
    {"pad", "eos", "bos", "unk", "stop", "sep", "cls", "mask", "end", "start", "per"}
    | {"special", "image", "video", "audio", "think", "new", "begin", "ids", "id"}
    | {"level", "type", "count"}
)
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s:]+:[^/@\s]+@")
_IN_TEXT = (
    (re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}"), rf"\1{HIDDEN}"),
    (re.compile(r"\bsk-areal-[A-Za-z0-9_-]+"), HIDDEN),
    (_URL_WITH_PASSWORD, f"://{HIDDEN}@"),
)
_remembered: set[str] = set()


def is_secret(name: str, value: Any) -> bool:
    """Whether the value called `name` must not be shown."""
    if not isinstance(value, str) or not value:
        return False
    return _is_secret_name(str(name)) or _URL_WITH_PASSWORD.search(value) is not None


def remember_secret(value: str) -> None:
    """`hide_secrets` removes it from every text from now on."""
    if len(value) >= _MIN_CHARS:
        _remembered.add(value)


def hide_secrets(text: str) -> str:
    """`text` fit to be logged, stored or shown, and encoded as UTF-8."""
    text = well_formed(text)
    for secret in sorted(_remembered | _of_environment(), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for pattern, replacement in _IN_TEXT:
        text = pattern.sub(replacement, text)
    return text


def without_secrets(tree: Tree) -> Any:
    """A config's dicts and lists with `HIDDEN` for secrets, whose values are registered."""
    _remember_tree(tree)
    return _hidden(tree)


def _remember_tree(tree: Tree, name: str = "") -> None:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            _remember_tree(value, str(key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            _remember_tree(value, name)
    elif isinstance(tree, str) and is_secret(name, tree):
        remember_secret(tree)


def _hidden(tree: Tree, name: str = "") -> Any:
    if isinstance(tree, Mapping):
        return {key: _hidden(value, str(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_hidden(value, name) for value in tree]
    if isinstance(tree, str):
        return HIDDEN if _is_secret_name(name) and tree else hide_secrets(tree)
    return tree


@lru_cache(maxsize=4096)
def _is_secret_name(name: str) -> bool:
    words = [word.lower() for word in _PARTS.findall(name)]
    for before, word in zip([""] + words, words, strict=False):
        if word == "key" and before in _KINDS_OF_KEY:
            return True
        if word == "pat" and before or word in ("pass", "pwd") and before in _KINDS_OF_PASS:
            return True
        if word.endswith(_SECRET_ENDS):
            return True
        if word in _SECRET_WORDS and not (word == "token" and _KINDS_OF_TOKEN & set(words)):
            return True
    rest, _, last = name.rpartition("_")
    return bool(rest) and name.isupper() and last in _SECRET_LAST


def _of_environment() -> set[str]:
    # Name by name: another thread may remove one meanwhile.
    return {
        value
        for name in list(os.environ)
        if len(value := os.environ.get(name, "")) >= _MIN_CHARS and _is_secret_name(name)
    }
