"""Component loggers: `logger = logging.getLogger("RolloutExecutor")`.

A line reads `02:35:10 [RolloutExecutor Rank 3] WARNING: text`: wall time, the PascalCase component,
the rank if known, the level unless it is INFO, and the text. Lines go to standard error, in colour
on a terminal. All loggers are children of the standard logger `areal`, so levels and handlers of
the standard library apply; `AREAL_LOG_LEVEL` sets the level of a whole process tree.

Secrets (`areal.api.redact`) are removed from every line and traceback.

The traceback of a logged exception goes to the run's log file if one is open, and only its last
line to the console; AREAL_DEBUG=1 shows it there too.

If an application configures the root logger, our own handler stays silent, so that no line appears
twice.
"""

from __future__ import annotations

import logging as std_logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging import CRITICAL, DEBUG, ERROR, INFO, WARNING
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from areal.api.redact import hide_secrets
from areal.utils.fs import open_private, private_folder

__all__ = [
    "CRITICAL",
    "DEBUG",
    "ERROR",
    "INFO",
    "WARNING",
    "getLogger",
    "log_to_file",
    "quiet",
    "register_color",
    "set_rank",
]

Color = Literal["red", "green", "yellow", "blue", "magenta", "cyan", "white"]

_ANSI = {
    "red": "\033[31m",
    "green": "\033[32m",
    "yellow": "\033[33m",
    "blue": "\033[34m",
    "magenta": "\033[35m",
    "cyan": "\033[36m",
    "white": "\033[37m",
}
_RESET = "\033[0m"
_PASCAL_CASE = re.compile(r"[A-Z][A-Za-z0-9]*")
_ROOT = "areal"

# Colour by area, to tell the trainer from the servers. Others stay white.
_component_colors: dict[str, Color] = {
    "PPOTrainer": "green",
    "SFTTrainer": "green",
    "StatsLogger": "green",
    "ArchonEngine": "blue",
    "NativeEngine": "cyan",
    "NativeServer": "cyan",
    "RolloutExecutor": "magenta",
    "Recover": "yellow",
    "Saver": "yellow",
}
_rank: int | None = int(os.environ["RANK"]) if os.environ.get("RANK", "").isdigit() else None


def getLogger(component: str) -> std_logging.Logger:
    """The logger of one component, e.g. `getLogger("WeightPublisher")`."""
    if not _PASCAL_CASE.fullmatch(component):
        raise ValueError(
            f"a component logger has a PascalCase name, got {component!r}; "
            'write for example getLogger("RolloutExecutor")'
        )
    _install_handler()
    return std_logging.getLogger(f"{_ROOT}.{component}")


def register_color(component: str, color: Color) -> None:
    """Show `component` in `color` on a terminal."""
    if color not in _ANSI:
        raise ValueError(f"unknown colour {color!r}; expected one of {', '.join(_ANSI)}")
    _component_colors[component] = color


def set_rank(rank: int | None) -> None:
    """Put `Rank N` into every line of this process; None removes it."""
    global _rank
    _rank = rank


@contextmanager
def quiet(level: int = WARNING) -> Iterator[None]:
    """Suppress lines below `level` on the console, e.g. while a progress bar is drawn.

    Files opened by `log_to_file` still get every line.
    """
    handler = _install_handler()
    before = handler.level
    handler.setLevel(max(level, before))
    try:
        yield
    finally:
        handler.setLevel(before)


@contextmanager
def log_to_file(path: str | Path) -> Iterator[None]:
    """Append every line, uncoloured and dated, to `path` while the block runs."""
    _install_handler()
    private_folder(Path(path).parent)
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(_LineFormatter("%Y-%m-%d %H:%M:%S", colored=False))
    root = std_logging.getLogger(_ROOT)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        with suppress(OSError):  # the last lines on a full disk
            handler.close()


class _LogFile(std_logging.FileHandler):
    """Silently drops lines on a full disk: the writers of what the run needs fail on the same disk
    and report the cause."""

    def _open(self) -> TextIO:
        return cast(TextIO, open_private(self.baseFilename, self.mode, encoding=self.encoding))

    def handleError(self, record: std_logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _LineFormatter(std_logging.Formatter):
    def __init__(self, time_format: str, *, colored: bool) -> None:
        super().__init__(datefmt=time_format)
        self.colored = colored
        self.shows_traceback = True

    def format(self, record: std_logging.LogRecord) -> str:
        component = record.name.removeprefix(f"{_ROOT}.")
        prefix = f"[{component}]" if _rank is None else f"[{component} Rank {_rank}]"
        level = "" if record.levelno == INFO else f"{record.levelname}: "
        # The traceback is part of the message: formatted here, it stays behind the prefix.
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}{self._exception(record.exc_info)}"
        if self.colored:
            prefix = _paint(prefix, _component_colors.get(component, "white"))
            level = _paint(level, "red" if record.levelno >= ERROR else "yellow")
        return f"{self.formatTime(record, self.datefmt)} {prefix} {level}{hide_secrets(text)}"

    def _exception(self, exc_info: Any) -> str:
        if self.shows_traceback:
            return f"\n{self.formatException(exc_info)}"
        kind, error, _ = exc_info
        return f": {kind.__name__}: {' '.join(str(error).split())}"


class _ConsoleHandler(std_logging.StreamHandler):
    """Resolves standard error for each line, so redirection and live displays see it."""

    def __init__(self) -> None:
        std_logging.Handler.__init__(self)
        self._plain = _LineFormatter("%H:%M:%S", colored=False)
        self._colored = _LineFormatter("%H:%M:%S", colored=True)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    def format(self, record: std_logging.LogRecord) -> str:
        terminal = self.stream.isatty() and "NO_COLOR" not in os.environ
        formatter = self._colored if terminal else self._plain
        formatter.shows_traceback = os.environ.get("AREAL_DEBUG") == "1" or not _has_log_file()
        return formatter.format(record)

    def emit(self, record: std_logging.LogRecord) -> None:
        if not std_logging.getLogger().handlers:
            super().emit(record)


def _has_log_file() -> bool:
    return any(isinstance(h, _LogFile) for h in std_logging.getLogger(_ROOT).handlers)


def _install_handler() -> std_logging.Handler:
    root = std_logging.getLogger(_ROOT)
    for handler in root.handlers:
        if isinstance(handler, _ConsoleHandler):
            return handler
    if root.level == std_logging.NOTSET:  # else the application has set it
        root.setLevel(_level_from_environment())
    handler = _ConsoleHandler()
    root.addHandler(handler)
    return handler


def _level_from_environment() -> int:
    name = os.environ.get("AREAL_LOG_LEVEL", "INFO").upper()
    level = std_logging.getLevelNamesMapping().get(name)
    if level is None:
        raise ValueError(
            f"AREAL_LOG_LEVEL={name}: unknown level; set it to DEBUG, INFO, WARNING or ERROR"
        )
    return level


def _paint(text: str, color: Color) -> str:
    return f"{_ANSI[color]}{text}{_RESET}" if text else ""
