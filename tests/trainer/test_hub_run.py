"""Whole runs from a hub name: fetched once, the same commit after a kill, one line for a fault."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import yaml
from cli_process import Program
from loopback_hub import LoopbackHub
from ray_cluster import ray_cluster
from safetensors.torch import load_file, save_file
from sglang_server import sglang_python
from tiny_run import PATIENCE_S, SMALL, query

from areal.cli.demo import make_model, recipe_path
from areal.run.recover import newest_step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

NAME = "org/tiny"
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        make_model(tmp_path / "pushed")
        hub.push(NAME, tmp_path / "pushed")
        yield hub


def move(hub: LoopbackHub, tmp_path: Path) -> str:
    """Other weights under the same name."""
    make_model(tmp_path / "other")
    file = tmp_path / "other" / WEIGHTS
    save_file({name: 1.5 * tensor for name, tensor in load_file(file).items()}, file)
    return hub.push(NAME, tmp_path / "other")


def train(hub: LoopbackHub, root: Path, *more: str, **env: str) -> Program:
    recipe = recipe_path("arithmetic_grpo.yaml")
    overrides = [f"cluster.fileroot={root}", f"actor.path={NAME}", "trial_name=t", *SMALL, *more]
    env = {"HF_HUB_OFFLINE": "0", **hub.env(root / "home", **env)}
    return Program("train", recipe, *overrides, cwd=Path(__file__).parents[1], env=env)


def finish(process: Program, timeout_s: float = PATIENCE_S) -> str:
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, out + err
    return err


def run_dir(root: Path) -> Path:
    return next(root.glob("*/t"))


def test_ranks_and_a_stock_server_fetch_once_and_adapters_name_their_base(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    """The server is given the folder of the cache."""
    commit = hub.branches[NAME]["main"]
    options = ["total_train_steps=1", "actor.backend=fsdp:d2", "actor.use_lora=true"]
    options += ["rollout.backend=sglang:d1", f"sglang.python={sglang_python(tmp_path)}"]
    finish(train(hub, tmp_path, *options))
    assert hub.fetched(WEIGHTS) == 1
    adapter = json.loads((run_dir(tmp_path) / "model" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (NAME, commit)


def test_each_machine_fetches_once(hub: LoopbackHub, tmp_path: Path) -> None:
    """Two machines of a Ray cluster, each with a cache of its own, and the controller with another:
    two ranks and two servers find room on both, and the weights go through a group of them all."""
    with ray_cluster() as cluster:
        for name in ("one", "two"):
            home = {"HF_HOME": str(tmp_path / name), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
            cluster.add_node(num_cpus=2, num_gpus=0, env_vars=home)
        options = ["total_train_steps=1", "actor.backend=archon:d2", "rollout.backend=native:d2"]
        options += ["actor.weight_update_mode=xccl", "scheduler.placement=SPREAD"]
        options += ["scheduler.type=ray", "rollout.max_head_offpolicyness=0"]
        finish(train(hub, tmp_path, *options, RAY_ADDRESS=cluster.address))
    caches = [file.parents[4].name for file in tmp_path.glob(f"*/hub/*/snapshots/*/{WEIGHTS}")]
    assert hub.fetched(WEIGHTS) == len(caches)
    assert sorted(caches) == ["one", "two"]
    ((last,),) = query(run_dir(tmp_path), "SELECT stats FROM steps ORDER BY step DESC LIMIT 1")
    stats = json.loads(last)
    assert (stats["server/version"], stats["server/servers"]) == (1, 2)


def test_a_run_from_a_hub_name_goes_on_after_a_kill_with_the_commit_it_began_with(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    """With a server and a reference of its own. Those that go on do without the server, whose start
    takes longer than their steps."""
    first = hub.branches[NAME]["main"]
    options = ["recover.mode=on", "recover.freq_steps=1", "actor.kl_ctl=0.01", f"ref.path={NAME}"]
    process = train(hub, tmp_path, *options, "total_train_steps=40")
    deadline = time.monotonic() + PATIENCE_S
    while not list(tmp_path.glob("*/t/recover/step_*/manifest.json")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    _, err = process.communicate()
    assert f"[Startup] {NAME} from {hub.url}" in err
    assert hub.fetched(WEIGHTS) == hub.fetched("tokenizer.json") == 1  # controller, server, ref
    move(hub, tmp_path)
    options.append("actor.weight_update_mode=direct")
    steps = newest_step(run_dir(tmp_path) / "recover") + 1
    finish(train(hub, tmp_path, *options, f"total_train_steps={steps + 2}"))
    config = yaml.safe_load((run_dir(tmp_path) / "config.yaml").read_text())
    pinned = f"{NAME}@{first}"
    assert config["actor"]["path"] == config["ref"]["path"] == config["tokenizer_path"] == pinned
    assert hub.fetched(WEIGHTS) == 1
    assert (run_dir(tmp_path) / "model" / "tokenizer.json").is_file()
    # And without the hub.
    finish(train(hub, tmp_path, *options, f"total_train_steps={steps + 3}", HF_HUB_OFFLINE="1"))
    # Another revision is another model.
    hub.branches[NAME]["v2"] = hub.branches[NAME]["main"]
    process = train(hub, tmp_path, *options, f"actor.path={NAME}@v2")
    _, err = process.communicate(timeout=900)
    assert process.returncode == 2
    assert "was written under another config: actor.path was" in err.splitlines()[-1]


def test_a_download_that_stands_still_is_ended_and_named(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.stall[WEIGHTS] = 100
    # Longer than a busy machine takes to load the tokenizer before.
    process = train(hub, tmp_path, "watchdog.seconds=30", HF_HUB_DOWNLOAD_TIMEOUT="600")
    _, err = process.communicate(timeout=900)
    assert process.returncode == 1
    assert "no progress for" in err.splitlines()[-1]
    assert f"the trainer waits for {NAME} from {hub.url} since" in err.splitlines()[-1]


def test_a_wrong_name_ends_in_one_line_and_leaves_no_folder(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    process = train(hub, tmp_path, "actor.path=org/tyni")
    _, err = process.communicate(timeout=900)
    assert process.returncode == 2
    assert err.splitlines()[-1].startswith(
        "areal: error: actor.path: 'org/tyni' is neither a folder here nor a model of"
    )
    assert not list(tmp_path.glob("*/t"))


def test_two_servers_at_once_fetch_once(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.delay_s = 0.05
    argv = [sys.executable, "-m", "areal.cli.main", "serve", "--model", NAME, "--port", "0"]
    servers = [
        subprocess.Popen(
            argv,
            env=hub.env(tmp_path / "home", AREAL_SERVER_TOKEN="secret"),
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for server in servers:
            port = json.loads(server.stdout.readline())["port"]
            request = Request(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json.dumps(
                    {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 2}
                ).encode(),
                {"Authorization": "Bearer secret", "Content-Type": "application/json"},
            )
            with urlopen(request, timeout=900) as reply:
                assert json.load(reply)["model"] == NAME
    finally:
        for server in servers:
            server.terminate()
            server.communicate(timeout=900)
    assert hub.fetched(WEIGHTS) == 1
