"""Hub names: fetched once, by the real client, from a hub on loopback; a fault is one line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub

from areal.utils.hub import HubName, hub_name

NAME = "org/tiny"
CONFIG = json.dumps({"model_type": "qwen3"}).encode()
INDEX = json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}).encode()
FILES = {
    "config.json": CONFIG,
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "tokenizer_config.json": b"{ }",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"w" * 300_000,
    # What areal does not read:
    "pytorch_model.bin": b"pickle",
    "model.onnx": b"onnx",
    "model.gguf": b"gguf",
    "modeling_tiny.py": b"import os",
    "consolidated.safetensors": b"again" * 1000,
    "original/consolidated.00.pth": b"pth",
    "original/config.json": b"{}",
    "README.md": b"# tiny",
}
FOLDER = """
import sys
from areal.utils.hub import model_folder
for name in sys.argv[1:]:
    weights = not name.endswith("!")
    try:
        folder = model_folder(name.rstrip("!"), key="actor.path", weights=weights)
        print(folder.name, *sorted(file.name for file in folder.iterdir()))
    except (ValueError, RuntimeError) as error:
        print(type(error).__name__, error)
"""


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        yield hub


def start(hub: LoopbackHub, home: Path, *names: str, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", FOLDER, *names],
        env=hub.env(home, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fetch_all(hub: LoopbackHub, home: Path, *names: str, **env: str) -> list[str]:
    """For each name what a process printed: commit and files, or the error; one line."""
    out, err = start(hub, home, *names, **env).communicate(timeout=900)
    assert out.count("\n") == len(names), out + err
    return out.splitlines()


def fetch(hub: LoopbackHub, home: Path, name: str, **env: str) -> str:
    return fetch_all(hub, home, name, **env)[0]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("org/name@main", HubName("org/name", "main")),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1")),
        ("org/name@" + "a" * 40, HubName("org/name", "a" * 40)),
        ("./org/name", None),
        ("../org/name", None),
        ("/org/name", None),
        ("~/name", None),
        ("name", None),
        ("a/b/c", None),
        ("org/../name", None),
        ("org/name@", None),
        ("org/name@../x", None),
        ("org/na me", None),
        ("örg/name", None),
    ],
)
def test_what_a_hub_name_is(path: str, name: HubName | None) -> None:
    assert hub_name(path) == name
    assert name is None or str(name) == path


def test_a_folder_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert hub_name(NAME) is None


def test_only_what_is_read_is_fetched_and_only_once(hub: LoopbackHub, tmp_path: Path) -> None:
    commit = hub.push(NAME, FILES)
    wanted = [name for name in FILES if name in list(FILES)[:6]]
    assert fetch(hub, tmp_path, NAME).split() == [commit, *sorted(wanted)]
    assert all(hub.fetched(name) == 1 for name in wanted)
    assert sum(hub.gets.values()) == len(wanted)
    assert fetch(hub, tmp_path, f"{NAME}@{commit}").split()[0] == commit
    assert sum(hub.gets.values()) == len(wanted)


def test_a_tokenizer_needs_no_weights(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.push(NAME, FILES)
    fetch(hub, tmp_path, f"{NAME}!")  # without weights
    assert hub.fetched("model.safetensors") == 0
    assert hub.fetched("tokenizer.json") == 1
    fetch(hub, tmp_path, NAME)  # adds what is missing
    assert hub.fetched("model.safetensors") == hub.fetched("tokenizer.json") == 1


def test_the_index_says_which_shards(hub: LoopbackHub, tmp_path: Path) -> None:
    files = {name: data for name, data in FILES.items() if name != "model.safetensors"}
    files |= {"model.safetensors.index.json": INDEX}
    files |= {"part-1.safetensors": b"1" * 1000, "part-2.safetensors": b"2" * 1000}
    hub.push(NAME, files)
    names = fetch(hub, tmp_path, NAME).split()[1:]
    assert {"part-1.safetensors", "part-2.safetensors"} <= set(names)
    assert "consolidated.safetensors" not in names


def test_processes_of_one_machine_fetch_once(hub: LoopbackHub, tmp_path: Path) -> None:
    commit = hub.push(NAME, {**FILES, "model.safetensors": b"w" * 2_000_000})
    hub.delay_s = 0.05
    processes = [start(hub, tmp_path, NAME) for _ in range(3)]
    outs = [process.communicate(timeout=900)[0] for process in processes]
    assert {out.split()[0] for out in outs} == {commit}
    assert hub.fetched("model.safetensors") == 1


def test_a_connection_that_breaks_is_resumed(hub: LoopbackHub, tmp_path: Path) -> None:
    data = bytes(range(256)) * 2000
    commit = hub.push(NAME, {**FILES, "model.safetensors": data})
    hub.cut["model.safetensors"] = [200_000, 100_000]
    assert fetch(hub, tmp_path, NAME).split()[0] == commit
    assert hub.fetched("model.safetensors") == 3
    file = next(tmp_path.glob(f"**/{commit}/model.safetensors"))
    assert file.read_bytes() == data


def test_a_killed_download_goes_on(hub: LoopbackHub, tmp_path: Path) -> None:
    commit = hub.push(NAME, {**FILES, "model.safetensors": b"w" * 5_000_000})
    hub.stall["model.safetensors"] = 1_000_000
    process = start(hub, tmp_path, NAME)
    deadline = time.monotonic() + 300
    while not hub.fetched("model.safetensors"):
        assert time.monotonic() < deadline, process.poll()
        time.sleep(0.05)
    process.kill()
    process.communicate()
    offline = fetch(hub, tmp_path, f"{NAME}@{commit}", HF_HUB_OFFLINE="1")
    assert "is not whole in the cache" in offline  # never half a model
    hub.stall.clear()
    assert fetch(hub, tmp_path, NAME).split()[0] == commit
    assert hub.fetched("tokenizer.json") == 1


def test_offline_needs_a_whole_cache(hub: LoopbackHub, tmp_path: Path) -> None:
    commit = hub.push(NAME, FILES)
    line = fetch(hub, tmp_path, NAME, HF_HUB_OFFLINE="1")
    assert line.startswith("ValueError actor.path: org/tiny is not whole in the cache")
    assert "HF_HUB_OFFLINE is set" in line
    assert "hf download org/tiny" in line
    fetch(hub, tmp_path, NAME)
    before = len(hub.requests)
    lines = fetch_all(hub, tmp_path, NAME, f"{NAME}@{commit}", HF_HUB_OFFLINE="1")
    assert [line.split()[0] for line in lines] == [commit, commit]
    assert len(hub.requests) == before


def test_a_hub_that_is_away_does_not_matter_to_what_is_cached(tmp_path: Path) -> None:
    with LoopbackHub() as hub:
        commit = hub.push(NAME, FILES)
        fetch(hub, tmp_path, NAME)
        env = hub.env(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", FOLDER, NAME, "org/other"],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
    )
    cached, other = done.stdout.splitlines()
    assert cached.split()[0] == commit
    assert "cannot be reached" in done.stderr  # and that it is the cache's commit
    assert other.startswith("HubUnreachableError actor.path: http://127.0.0.1:")


def test_a_model_without_tokenizer_is_cached_too(tmp_path: Path) -> None:
    with LoopbackHub() as hub:
        commit = hub.push(
            NAME, {name: FILES[name] for name in ("config.json", "model.safetensors")}
        )
        fetch(hub, tmp_path, NAME)
        env = hub.env(tmp_path)
    for more in ({}, {"HF_HUB_OFFLINE": "1"}):
        done = subprocess.run(
            [sys.executable, "-c", FOLDER, f"{NAME}@{commit}"],
            env={**env, **more},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.stdout.split() == [commit, "config.json", "model.safetensors"]


def test_revisions(hub: LoopbackHub, tmp_path: Path) -> None:
    old = hub.push(NAME, FILES)
    hub.branches[NAME]["v1"] = old
    new = hub.push(NAME, {**FILES, "generation_config.json": b'{"new": 1}'})
    names = [NAME, f"{NAME}@v1", f"{NAME}@{old}", f"{NAME}@v9"]
    *lines, line = fetch_all(hub, tmp_path, *names)
    assert [line.split()[0] for line in lines] == [new, old, old]
    assert line.startswith("ValueError actor.path: org/tiny has no revision 'v9'")


def refusals(hub: LoopbackHub) -> dict[str, str]:
    """Name -> what its refusal says."""
    hub.push("org/gated", FILES)
    hub.refuse["org/gated"] = (403, "GatedRepo")
    hub.push("org/files", FILES)
    hub.refuse_files["org/files"] = (403, "GatedRepo")
    hub.push("org/private", FILES)
    hub.refuse["org/private"] = (401, "")
    hub.push("org/forbidden", FILES)
    hub.refuse["org/forbidden"] = (403, "")
    hub.push("org/broken", FILES)
    hub.refuse["org/broken"] = (503, "")
    hub.push("org/bin", {"config.json": CONFIG, "pytorch_model.bin": b"x"})
    hub.push("org/data", {"rows.csv": b"x"})
    hub.push("org/text", {**FILES, "config.json": b"<html>not found</html>"})
    hub.push("org/list", {**FILES, "config.json": b"[1, 2]"})
    shards = {name: data for name, data in FILES.items() if name != "model.safetensors"}
    index = "model.safetensors.index.json"
    hub.push("org/shardless", {**shards, index: INDEX})
    hub.push("org/badindex", {**shards, index: b"{]"})
    climbing = {"weight_map": {"a": "../../../etc/model.safetensors"}}
    hub.push("org/climbs", {**shards, index: json.dumps(climbing).encode()})
    code = json.dumps({"weight_map": {"a": "modeling_tiny.py"}}).encode()
    hub.push("org/code", {**shards, index: code})
    hub.push("org/up", {**FILES, "..json": b"{}", "../../up.json": b"{}"})
    return {
        "org/absent": "ValueError actor.path: 'org/absent' is neither a folder here nor a model",
        "org/gated": "ValueError actor.path: org/gated is gated: ask for access at",
        "org/files": "ValueError actor.path: org/files is gated: ask for access at",
        "org/private": "set HF_TOKEN to a token that may read it",
        "org/forbidden": "ValueError actor.path: http",
        "org/broken": "HubUnreachableError actor.path:",
        "org/bin": "has no model.safetensors and no model.safetensors.index.json",
        "org/data": "has no config.json, so it is no model of transformers; it has rows.csv",
        "org/text": "ValueError actor.path: config.json of org/text@",
        "org/list": "has no model_type",
        "org/shardless": "has no part-1.safetensors, which its model.safetensors.index.json names",
        "org/badindex": "is not valid JSON",
        "org/climbs": "expected *.safetensors files beside it",
        "org/code": "names 'modeling_tiny.py'",
    }


def test_each_fault_is_one_line_that_names_the_key(hub: LoopbackHub, tmp_path: Path) -> None:
    expected = refusals(hub)
    lines = fetch_all(hub, tmp_path, *expected)
    for (name, says), line in zip(expected.items(), lines, strict=True):
        assert says in line, name
        assert "actor.path: " in line
    assert hub.fetched("modeling_tiny.py") == hub.fetched("pytorch_model.bin") == 0
    # A name that leads out of the folder is not fetched.
    assert fetch(hub, tmp_path, "org/up").split()[0] == hub.branches["org/up"]["main"]
    assert not list(tmp_path.parent.glob("**/up.json"))


def test_a_body_that_stays_short_is_no_model(hub: LoopbackHub, tmp_path: Path) -> None:
    commit = hub.push(NAME, FILES)
    hub.cut["tokenizer.json"] = [1, *([0] * 30)]
    line = fetch(hub, tmp_path, NAME)
    assert "RuntimeError" in line or "HubUnreachableError" in line
    assert "start again" in line
    hub.cut.clear()
    assert fetch(hub, tmp_path, NAME).split()[0] == commit


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"sha": "../../../etc"}, "calls the commit of org/tiny '../../../etc'"),
        ({"sha": None}, "calls the commit of org/tiny None"),
        (
            {"siblings": [{"rfilename": "config.json", "size": 1 << 40}]},
            "config.json of org/tiny has 1099.5 GB",
        ),
        (
            {
                "siblings": [
                    {"rfilename": "config.json", "size": 30},
                    {"rfilename": "model.safetensors", "size": 1 << 55},
                ]
            },
            "set HF_HOME to a folder on another disk",
        ),
        ({"siblings": "no"}, "could not be fetched from http"),
    ],
)
def test_odd_replies_of_a_hub(hub: LoopbackHub, tmp_path: Path, info: dict, says: str) -> None:
    hub.push(NAME, FILES)
    hub.info = info
    line = fetch(hub, tmp_path, NAME)
    assert says in line.replace(f"@{hub.branches[NAME]['main']}", "")
    assert "actor.path: " in line


def test_a_reply_that_is_not_json(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.push(NAME, FILES)
    hub.raw_info = b"<html>sign in to the Wi-Fi</html>"
    assert "could not be fetched from http" in fetch(hub, tmp_path, NAME)


MOVES = """
import sys, threading, time
from areal.utils import waits
from areal.utils.hub import model_folder
quiet = []
def look():
    while True:
        quiet.append(waits.quiet_s())
        time.sleep(0.1)
threading.Thread(target=look, daemon=True).start()
model_folder(sys.argv[1])
print(max(quiet))
"""


def test_a_download_moves_also_for_those_who_wait_for_it(hub: LoopbackHub, tmp_path: Path) -> None:
    """The client shows what came in every 10 MB: so much takes 1.6 s here, all of it 8 s."""
    hub.push(NAME, {**FILES, "model.safetensors": b"w" * (50 << 20)})
    hub.delay_s = 0.01
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MOVES, NAME],
            env=hub.env(tmp_path),
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    began = time.monotonic()
    outs = [process.communicate(timeout=900)[0] for process in processes]
    took = time.monotonic() - began
    assert took > 8
    assert all(float(out) < max(5.5, 0.6 * took) for out in outs), (took, outs)
    assert hub.fetched("model.safetensors") == 1
