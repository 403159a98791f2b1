"""`rollout.api_url`: runs on servers that somebody else started, and goes on running afterwards."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from server_checks import check_grpo_run
from sglang_server import sglang_python
from tiny_run import grpo_config

from areal.cli.demo import make_model
from areal.engine.remote.sglang import launch_sglang_server
from areal.run.paths import RunPaths
from areal.trainer.servers import TOKEN_VARIABLE, open_inference

pytestmark = pytest.mark.usefixtures("forked_children")

TOKEN = "token-of-these-servers"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a server from the folder of the run's model; its child and its address."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    make_model(tmp_path / "tiny_model")
    children = []

    def launch(model="tiny_model"):
        child, address = launch_sglang_server(
            tmp_path / model,
            python=sglang_python(tmp_path),
            token=TOKEN,
            dtype="float32",
            setup_timeout_s=900,
        )
        children.append(child)
        return child, address

    yield launch
    for child in children:
        child.terminate()


def open_with(root, address: str, *more: str) -> None:
    options = ("actor.weight_update_mode=disk", f"rollout.api_url=[{address}]", *more)
    config = grpo_config(root, "rollout.backend=sglang:d1", *options)
    with ExitStack() as stack:
        open_inference(config, RunPaths.of(config), stack, None)


def test_what_cannot_be_used_is_refused_at_the_start(tmp_path, start, monkeypatch):
    _, address = start()
    open_with(tmp_path, address)
    with pytest.raises(ValueError, match=f"rollout.api_url: {address} cannot .* a native server"):
        open_with(tmp_path, address, "rollout.backend=native:d1")
    with pytest.raises(ValueError, match=f"rollout.api_url: {address} cannot .* a vLLM server"):
        open_with(tmp_path, address, "rollout.backend=vllm:d1")
    make_model(tmp_path / "another")
    with pytest.raises(ValueError, match=r"was started with the model .*tiny_model', expected "):
        open_with(tmp_path, address, f"actor.path={tmp_path / 'another'}")
    with pytest.raises(ValueError, match="rollout.api_url: 127.0.0.1:9 cannot be used"):
        open_with(tmp_path, "127.0.0.1:9", "rollout.setup_timeout=0.2")
    monkeypatch.setenv(TOKEN_VARIABLE, "another")
    with pytest.raises(ValueError, match=f"401: Unauthorized.* {TOKEN_VARIABLE}"):
        open_with(tmp_path, address)


@pytest.mark.slow
def test_two_runs_one_after_another(tmp_path, start):
    """The second finds the weights that the first has trained, and begins with its own."""
    servers = [start() for _ in range(2)]
    urls = ", ".join(f"http://{address}/v1" for _, address in servers)
    for trial in ("first", "second"):
        check_grpo_run(
            tmp_path,
            f"trial_name={trial}",
            "rollout.backend=sglang:d2",
            f"rollout.api_url=[{urls}]",
            "actor.weight_update_mode=disk",
        )
        assert all(child.poll() is None for child, _ in servers)
