"""`areal serve`: what it prints when ready, and one clear line for each mistake."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from tiny import tiny_config, write_tiny_model

from areal.cli.main import main
from areal.engine.remote.server_control import ControlClient

SERVE = [sys.executable, "-m", "areal.cli.main", "serve"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model")))


def serve(capsys, *args):
    """(exit code, what it wrote to stderr) of a start that must fail."""
    code = main(["serve", *args])
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err


def test_ready_line_and_end(model):
    env = {key: value for key, value in os.environ.items() if key != "AREAL_SERVER_TOKEN"}
    process = subprocess.Popen(
        [*SERVE, "--model", model, "--num-pages", "50"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        ready = json.loads(process.stdout.readline())
        assert ready.keys() == {"host", "port", "pid"}
        assert ready["host"] == "127.0.0.1" and ready["pid"] == process.pid
        token = process.stderr.readline().split("Bearer ")[1].rstrip("'\n")
        control = ControlClient(f"127.0.0.1:{ready['port']}", token, timeout_s=10)
        assert control.get("/health")["model"] == model
    finally:
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=20)
    assert process.returncode == 130
    assert rest == ("", "")


def test_port_in_use(capsys, model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, err = serve(capsys, "--model", model, "--port", str(port), "--token", "t")
    assert code == 1
    assert err.startswith("areal: error: ") and err.count("\n") == 1
    assert f"127.0.0.1:{port}" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--host", "0.0.0.0"], "AREAL_SERVER_TOKEN"),
        (["--port", "70000", "--token", "t"], "--port must lie between"),
        (["--threads", "0", "--token", "t"], "--threads must be at least 1, got 0"),
        (["--tensor-parallel", "0", "--token", "t"], "--tensor-parallel must be at least 1, got 0"),
        (["--tensor-parallel", "3", "--token", "t"], "num_key_value_heads"),
        (["--tensor-parallel", "2", "--batch-invariant", "--token", "t"], "--batch-invariant"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(capsys, monkeypatch, model, args, message):
    monkeypatch.delenv("AREAL_SERVER_TOKEN", raising=False)
    given = args if "--model" in args else ["--model", model, *args]
    code, err = serve(capsys, *given)
    assert code == 2
    assert message in err
    assert err.splitlines()[-1].startswith("areal: error: ")


def test_a_model_of_an_unknown_kind(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**tiny_config(), "model_type": "abacus"}))
    code, err = serve(capsys, "--model", str(tmp_path), "--token", "t")
    assert code == 2
    assert "abacus" in err
