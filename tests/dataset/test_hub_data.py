"""Data sets by their hub name: the real `datasets` package and a hub on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub

NAME = "openai/gsm8k"
CLOSED = "http://127.0.0.1:9"
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
---
"""
PROGRAM = """
import sys
from areal.dataset import get_custom_dataset
from areal.api.config.run import DatasetConfig
for path, split in (argument.split("/split=") for argument in sys.argv[1:]):
    try:
        rows = get_custom_dataset(split, DatasetConfig(path=path, type="rl"), None)
        print(len(rows), rows[0]["answer"])
    except (ValueError, RuntimeError) as error:
        print(type(error).__name__, error)
"""


def files(train: int) -> dict[str, bytes]:
    def rows(count: int) -> bytes:
        lines = [{"question": f"{i}+1?", "answer": f"#### {i + count}"} for i in range(count)]
        return "".join(json.dumps(line) + "\n" for line in lines).encode()

    return {"README.md": CARD, "main/train.jsonl": rows(train), "main/test.jsonl": rows(2)}


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        hub.push(NAME, files(train=5))
        yield hub


def load(hub: LoopbackHub, home: Path, *arguments: str, **env: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=hub.env(home, **env),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_by_name_by_revision_and_without_the_hub(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.branches[NAME]["v1"] = hub.branches[NAME]["main"]
    hub.push(NAME, files(train=7))
    arguments = [f"{NAME}/split=train", f"{NAME}@v1/split=train", "gsm8k/split=test"]
    expected = ["7 #### 7", "5 #### 5", "2 #### 2"]
    assert load(hub, tmp_path, *arguments) == expected
    before = len(hub.requests)
    main, v1, _ = load(hub, tmp_path, *arguments, HF_HUB_OFFLINE="1")
    assert len(hub.requests) == before
    # `datasets` has prepared v1 last, and would give its rows for main.
    assert v1 == expected[1]
    assert "this machine has prepared commit" in main


@pytest.mark.slow  # the client tries again and again
def test_without_the_hub_the_rows_are_the_same(hub: LoopbackHub, tmp_path: Path) -> None:
    argument = f"{NAME}/split=train"
    rows = load(hub, tmp_path, argument)
    hub.push(NAME, files(train=7))
    unknown = f"{NAME}@{'0' * 40}/split=train"
    with ThreadPoolExecutor() as threads:  # most of the time the clients sleep between two tries
        known = threads.submit(load, hub, tmp_path, argument, HF_ENDPOINT=CLOSED)
        bare = threads.submit(load, hub, tmp_path / "other", argument, HF_ENDPOINT=CLOSED)
        found, line = load(hub, tmp_path, argument, unknown, HF_HUB_OFFLINE="1")
    assert [found] == known.result() == rows == ["5 #### 5"]
    assert line.startswith("ValueError dataset.path:"), line
    (line,) = bare.result()
    assert line.startswith("RuntimeError dataset.path: 'openai/gsm8k' is not a local file")


def test_faults_are_one_line(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.push("org/gsm8k", files(train=2))
    hub.refuse["org/gsm8k"] = (403, "GatedRepo")
    lines = load(
        hub,
        tmp_path,
        f"{NAME}/split=nope",
        "absent/gsm8k/split=train",
        "org/gsm8k/split=train",
    )
    assert lines[0].startswith(f"ValueError dataset.path: '{NAME}', split 'nope': ")
    for line, name in zip(lines[1:], ("absent", "org"), strict=True):
        assert line.startswith(
            f"RuntimeError dataset.path: '{name}/gsm8k' is not a local file or folder, and the hub"
        ), line
