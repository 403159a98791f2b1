"""`areal check` of hub names: cached, reachable or unknown, and what a hub refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from tiny import tiny_config

from areal.cli.demo import make_model

CONFIG = """
experiment_name: e
trial_name: t
train_dataset: {path: arithmetic, batch_size: 4}
gconfig: {n_samples: 2, max_new_tokens: 32}
actor: {path: org/tiny, optimizer: {lr: 1e-3}}
"""
HEAVY = """
import json, sys
from areal.cli.main import main
for overrides in json.loads(sys.argv[1]):
    print("exit code", main(["check", "c.yaml", *overrides]), file=sys.stderr)
heavy = {"torch", "transformers", "datasets", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        (tmp_path / "c.yaml").write_text(CONFIG)
        make_model(tmp_path / "pushed")
        hub.push("org/tiny", tmp_path / "pushed")
        yield hub


def check(hub: LoopbackHub, root: Path, *overrides: str, **env: str) -> tuple[int, str]:
    (found,) = check_each(hub, root, [overrides], **env)
    return found


def check_each(
    hub: LoopbackHub, root: Path, each: Sequence[Sequence[str]], **env: str
) -> list[tuple[int, str]]:
    """Exit code and the one line of each check, all in one process."""
    done = subprocess.run(
        [sys.executable, "-u", "-c", HEAVY, json.dumps(each)],
        env=hub.env(root / "home", **env),
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    texts, codes = lines[::2], lines[1::2]
    assert len(texts) == len(codes) == len(each), done.stdout
    return [
        (int(code.removeprefix("exit code ")), text)
        for code, text in zip(codes, texts, strict=True)
    ]


def fetch(hub: LoopbackHub, root: Path) -> None:
    program = "from areal.utils.hub import model_folder; model_folder('org/tiny')"
    subprocess.run([sys.executable, "-c", program], env=hub.env(root / "home"), check=True)


def test_reachable_then_cached(hub: LoopbackHub, tmp_path: Path) -> None:
    code, line = check(hub, tmp_path)
    assert code == 0, line
    assert "ppo of org/tiny (reachable) on arithmetic" in line
    assert not (tmp_path / "home" / "hub" / "models--org--tiny").exists()  # nothing is written
    assert hub.fetched("model.safetensors") == 0
    fetch(hub, tmp_path)
    assert "ppo of org/tiny (cached) on" in check(hub, tmp_path)[1]
    assert "ppo of org/tiny (cached) on" in check(hub, tmp_path, HF_HUB_OFFLINE="1")[1]
    hub.push("org/tiny", {"config.json": b"{}", "model.safetensors": b"moved"})
    code, line = check(hub, tmp_path)
    assert (code, "config.json of org/tiny@" in line) == (2, True)  # of the commit it is at now


def test_no_answer_is_unknown_and_within_a_deadline(hub: LoopbackHub, tmp_path: Path) -> None:
    closed = "http://127.0.0.1:9"
    code, line = check(hub, tmp_path, HF_ENDPOINT=closed)
    assert code == 0, line
    assert "ppo of org/tiny (unknown: actor.path: http://127.0.0.1:9 cannot be reached" in line
    fetch(hub, tmp_path)
    assert "(cached)" in check(hub, tmp_path, HF_ENDPOINT=closed)[1]
    hub.push("org/slow", {"config.json": b"{}"})
    hub.answer_delay_s = 90.0
    began = time.monotonic()
    code, line = check(hub, tmp_path, "actor.path=org/slow")
    assert (code, "does not answer within 5 s" in line) == (0, True), line
    assert time.monotonic() - began < 80


def test_offline_and_not_cached_is_refused(hub: LoopbackHub, tmp_path: Path) -> None:
    code, line = check(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert code == 2
    assert "actor.path: org/tiny is not whole in the cache" in line
    assert hub.requests == []


def test_what_a_hub_refuses_is_refused(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.push("org/gated", {"config.json": b"{}"})
    hub.refuse["org/gated"] = (403, "GatedRepo")
    hub.push("org/bin", {"config.json": b"{}", "pytorch_model.bin": b""})
    olmo2 = json.dumps(tiny_config() | {"model_type": "olmo2"}).encode()
    hub.push("org/olmo2", {"config.json": olmo2, "model.safetensors": b"w"})
    expected = {
        "actor.path=org/absent": "'org/absent' is neither a folder here nor a model of",
        "actor.path=org/tiny@v7": "org/tiny has no revision 'v7'",
        "actor.path=org/gated": "org/gated is gated: ask for access at",
        "actor.path=org/bin": "org/bin has no model.safetensors",
        "teacher.path=org/absent": "teacher.path: 'org/absent' is neither",
        "tokenizer_path=org/absent": "tokenizer_path: 'org/absent' is neither",
        "actor.path=org/olmo2": "actor.backend: 'archon:d1' with 'org/olmo2': model_type",
    }
    found = check_each(hub, tmp_path, [[override] for override in expected])
    for (code, line), says in zip(found, expected.values(), strict=True):
        assert code == 2, line
        assert says in line


def test_a_resumed_run_is_checked_at_its_commit(hub: LoopbackHub, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    run = tmp_path / "runs" / "e" / "t"
    run.mkdir(parents=True)
    (run / "models.json").write_text(json.dumps({"org/tiny": hub.branches["org/tiny"]["main"]}))
    (run / "config.yaml").write_text("")
    del hub.commits["org/tiny"]
    code, line = check(hub, tmp_path)
    assert (code, "(cached)" in line) == (0, True), line
