"""Stands in for Harbor's package: the one class that areal asks of it."""

from __future__ import annotations

import tomllib
from pathlib import Path


class Task:
    def __init__(self, folder):
        folder = Path(folder)
        self.name = folder.name
        self.config = Config(tomllib.loads((folder / "task.toml").read_text()))
        self.instruction = (folder / "instruction.md").read_text()
        if not (folder / "tests/test.sh").exists():
            raise FileNotFoundError(f"Task directory {folder} does not contain tests/test.sh.")


class Config:
    def __init__(self, given):
        self.given = given

    def model_dump(self, mode, exclude_defaults):
        return self.given
