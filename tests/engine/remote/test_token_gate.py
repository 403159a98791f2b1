"""The token on every route, also of a server that loads the gate by its name."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from areal.engine.remote.token_gate import TokenGate, VLLMTokenGate

TOKEN = "token-of-this-run"


def app_of(gate, **options):
    app = FastAPI()
    app.add_middleware(gate, **options)

    @app.api_route("/collective_rpc", methods=["GET", "POST"])
    async def collective_rpc() -> dict[str, str]:
        return {"done": "everything"}

    @app.websocket("/ws")
    async def talk(websocket) -> None:
        raise AssertionError("nobody gets here")

    return app


@pytest.fixture(params=["own", "vllm"])
def client(request, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", TOKEN)
    if request.param == "own":
        return TestClient(app_of(TokenGate, token=TOKEN))
    return TestClient(app_of(VLLMTokenGate))


@pytest.mark.parametrize(
    "value", ["", TOKEN, "Bearer", "Bearer ", "Bearer wrong", f"bearer {TOKEN}"]
)
def test_only_the_token_opens(client, value):
    for method in ("GET", "POST", "OPTIONS"):
        for path in ("/collective_rpc", "/nowhere", "/docs"):
            answer = client.request(method, path, headers={"Authorization": value})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert client.post("/collective_rpc", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    assert client.post("/collective_rpc").status_code == 401
    with pytest.raises(Exception), client.websocket_connect("/ws"):  # noqa: B017
        pass


def test_a_stock_server_without_a_key_does_not_start(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(KeyError, match="VLLM_API_KEY"):
        VLLMTokenGate(None)


def test_it_needs_the_standard_library_only():
    code = (
        "import sys\n"
        "import areal.engine.remote.token_gate\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded - {'areal', '__main__', *sys.stdlib_module_names}))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
