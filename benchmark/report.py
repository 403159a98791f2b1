"""How every benchmark reports: a table on the terminal and, when asked, a JSON file."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areal.utils.fs import atomic_write_text


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    value: float
    unit: str


def print_table(rows: Sequence[Row]) -> None:
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"{row.name:<{width}}  {row.value:>12.3f}  {row.unit}")


def write_json(path: str, rows: Sequence[Row], **more: Any) -> None:
    """The report; `more` are further keys of a benchmark that has more to tell than rows."""
    report = {
        "rows": [asdict(row) for row in rows],
        "machine": _machine(),
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        **more,
    }
    atomic_write_text(path, json.dumps(report, indent=1) + "\n")


def _machine() -> str:
    import os

    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{platform.machine()}, {os.cpu_count()} CPU cores, {device}, torch {torch.__version__}"


def _commit() -> str:
    root = Path(__file__).resolve().parent
    answer = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or "unknown"
