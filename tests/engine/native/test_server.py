"""The native server over real HTTP, in a child process as `areal serve` starts it."""

from __future__ import annotations

import http.client
import json
import socket
import time

import pytest
from fastapi.testclient import TestClient
from tiny import tiny_model, write_tiny_model

from areal.engine.native.engine import NativeEngine
from areal.engine.native.frames import FRAMES, FrameReader
from areal.engine.native.loop import EngineLoop
from areal.engine.native.server import create_app
from areal.engine.native.wire import Refusal
from areal.engine.remote.native import launch_native_server
from areal.engine.remote.server_control import ControlClient, ServerError, ServerRefusedError
from areal.utils.addresses import bind
from areal.weight_sync.publication import publish

pytestmark = pytest.mark.usefixtures("forked_children")

TOKEN = "token-of-this-run"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    child, address = launch_native_server(model, token=TOKEN, num_pages=400, setup_timeout_s=900)
    yield address
    child.terminate()


@pytest.fixture
def control(address):
    control = ControlClient(address, TOKEN, timeout_s=300)
    yield control
    control.post("/continue")
    control.post("/abort", all=True)


def call(address, method, path, body=b"", token=TOKEN):
    """(status, body) of one request, as any HTTP client sees it."""
    connection = http.client.HTTPConnection(address, timeout=300)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def entry(rid, ids=(2, 3), **options):
    return {
        "rid": rid,
        "input_ids": list(ids),
        "gconfig": {"max_new_tokens": 4, "ignore_eos": True, "seed": 1, **options},
    }


def generate(address, *entries):
    status, content = call(address, "POST", "/generate", json.dumps({"requests": entries}).encode())
    assert status == 200, content
    lines = [json.loads(line) for line in content.splitlines()]
    return {line["rid"]: line for line in lines}


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x"])
@pytest.mark.parametrize("path", ["/health", "/generate", "/stats", "/docs", "/nowhere"])
def test_nothing_answers_without_the_token(address, path, token):
    status, content = call(address, "GET", path, token=token)
    assert status == 401
    assert "Authorization" in json.loads(content)["error"]


def test_health(control):
    health = control.get("/health")
    assert health["status"] == "ok" and health["paused"] is False
    assert isinstance(health["version"], int)


def test_many_requests_in_one_exchange(address):
    lines = generate(address, *[entry(str(n), max_new_tokens=1 + n % 5) for n in range(50)])
    assert len(lines) == 50
    for n in range(50):
        line = lines[str(n)]
        assert len(line["output_tokens"]) == len(line["output_logprobs"]) == 1 + n % 5
        assert line["stop_reason"] == "length"
        assert 0 < line["ttft"] <= line["latency"]
    assert lines["0"]["output_tokens"] == lines["4"]["output_tokens"][:1]


def test_results_come_as_they_finish(address):
    connection = http.client.HTTPConnection(address, timeout=300)
    body = json.dumps({"requests": [entry("short"), entry("long", max_new_tokens=300)]})
    connection.request("POST", "/generate", body, {"Authorization": f"Bearer {TOKEN}"})
    answer = connection.getresponse()
    first = json.loads(answer.readline())
    assert first["rid"] == "short"
    assert ControlClient(address, TOKEN, timeout_s=300).get("/stats")["running"] == 1
    assert json.loads(answer.readline())["rid"] == "long"
    assert answer.readline() == b""
    connection.close()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"nonsense", "body"),
        (b'{"requests": [{"rid": "a", "input_ids": []}]}', "input_ids"),
        (b'{"requests": [{"rid": "a", "input_ids": [9999]}]}', "input_ids"),
        (b'{"requests": [{"rid": "a", "input_ids": [1], "gconfig": {"top_p": 2}}]}', "top_p"),
    ],
)
def test_a_bad_request_is_a_400_that_names_the_field(address, body, field):
    status, content = call(address, "POST", "/generate", body)
    assert status == 400
    assert field in json.loads(content)["error"]


def test_scores_are_asked_for_in_requests_of_a_size(control):
    with pytest.raises(ServerRefusedError, match="400: sequences: .* at most 65536 items, got"):
        control.post("/score", sequences=[[]] * 65_537)
    with pytest.raises(ServerRefusedError, match=r"sequences\[1\] is empty"):
        control.post("/score", sequences=[[2], []])
    # More than one forward takes, in sequences as short as they can be.
    many = control.post("/score", sequences=[[2, 3]] * 9000)["logprobs"]
    assert len(many) == 9000 and all(len(one) == 2 for one in many)


def test_a_bad_request_among_good_ones_is_refused_alone(address):
    lines = generate(address, entry("good"), entry("unread", ids=[]), entry("unfit", ids=[9999]))
    assert len(lines["good"]["output_tokens"]) == 4
    for rid in ("unread", "unfit"):
        assert lines[rid]["refused"] == "request" and "input_ids" in lines[rid]["message"]


def test_pause_and_continue(address, control):
    control.post("/pause")
    assert control.get("/health")["paused"] is True
    connection = http.client.HTTPConnection(address, timeout=300)
    body = json.dumps({"requests": [entry("held")]})
    connection.request("POST", "/generate", body, {"Authorization": f"Bearer {TOKEN}"})
    before = control.get("/stats")["tokens_generated"]
    time.sleep(0.05)
    assert control.get("/stats")["tokens_generated"] == before
    control.post("/continue")
    assert json.loads(connection.getresponse().readline())["rid"] == "held"
    connection.close()


def test_a_client_that_leaves_takes_its_requests_along(address, control):
    control.post("/pause")
    connection = http.client.HTTPConnection(address, timeout=300)
    body = json.dumps({"requests": [entry(f"left{n}", max_new_tokens=500) for n in range(3)]})
    connection.request("POST", "/generate", body, {"Authorization": f"Bearer {TOKEN}"})
    wait_until(lambda: control.get("/stats")["waiting"] == 3)
    connection.close()
    wait_until(lambda: control.get("/stats")["waiting"] == 0)


def test_abort_ends_a_request_with_what_it_has(address, control):
    control.post("/pause")
    connection = http.client.HTTPConnection(address, timeout=300)
    body = json.dumps({"requests": [entry("ended", max_new_tokens=500)]})
    connection.request("POST", "/generate", body, {"Authorization": f"Bearer {TOKEN}"})
    wait_until(lambda: control.get("/stats")["waiting"] == 1)
    assert control.post("/abort", rid="somebody else") == {"aborted": 0}
    assert control.post("/abort", rid="ended") == {"aborted": 1}
    assert json.loads(connection.getresponse().readline())["stop_reason"] == "abort"
    connection.close()
    with pytest.raises(
        ServerRefusedError, match="400: rid: expected a text, or all=true instead, got nothing"
    ):
        control.post("/abort")


def test_weights_are_updated_and_damaged_ones_refused(address, control, tmp_path):
    before = generate(address, entry("a"))["a"]
    publish(tiny_model(seed=5).named_hf_tensors(), tmp_path / "v7", 7)
    control.post("/update_weights", path=str(tmp_path / "v7"), version=7)
    assert control.get("/health")["version"] == 7
    after = generate(address, entry("a"))["a"]
    assert after["output_versions"] == [7] * 4
    assert after["output_logprobs"] != before["output_logprobs"]

    publish(tiny_model(seed=6).named_hf_tensors(), tmp_path / "v8", 8)
    with pytest.raises(ServerRefusedError, match="holds version 8, expected 9"):
        control.post("/update_weights", path=str(tmp_path / "v8"), version=9)
    bucket = tmp_path / "v8" / "bucket_00000.safetensors"
    data = bytearray(bucket.read_bytes())
    data[-1] ^= 1
    bucket.write_bytes(data)
    with pytest.raises(ServerRefusedError, match="bucket_00000.safetensors is damaged"):
        control.post("/update_weights", path=str(tmp_path / "v8"), version=8)
    assert generate(address, entry("a"))["a"]["output_logprobs"] == after["output_logprobs"]


def test_weights_that_the_sender_has_not_written_are_refused(address, control, tmp_path):
    """Somebody who can write to the folder puts weights of their own there."""
    order = {"path": str(tmp_path / "v17"), "version": 17}
    publish(tiny_model(seed=5).named_hf_tensors(), tmp_path / "v17", 17, key="of this run")
    control.post("/update_weights", **order, key="of this run")
    before = generate(address, entry("a"))["a"]
    for key in ("", "a guess"):
        publish(tiny_model(seed=6).named_hf_tensors(), tmp_path / "v17", 17, key=key)
        with pytest.raises(ServerRefusedError, match="400: .*manifest.json is damaged, or was wr"):
            control.post("/update_weights", **order, key="of this run")
    assert generate(address, entry("a"))["a"]["output_logprobs"] == before["output_logprobs"]


def test_weights_of_another_model_are_refused(control, tmp_path):
    version = control.get("/health")["version"]
    publish(tiny_model(hidden_size=16).named_hf_tensors(), tmp_path / "v", 3)
    with pytest.raises(ServerRefusedError, match="400"):
        control.post("/update_weights", path=str(tmp_path / "v"), version=3)
    assert control.get("/health")["version"] == version


@pytest.mark.parametrize("group", ["g", "none"])
def test_weights_through_a_group_it_is_not_in_are_refused(control, group):
    with pytest.raises(ServerRefusedError, match=f"409: .* group {group}, this server is in none"):
        control.post("/update_weights", kind="xccl", group=group, version=1)


@pytest.mark.parametrize(
    ("order", "field"),
    [({}, "path"), ({"path": "x"}, "version"), ({"path": "x", "version": True}, "version")],
)
def test_an_incomplete_order_names_the_field(control, order, field):
    with pytest.raises(ServerRefusedError, match=f"400: {field}: expected"):
        control.post("/update_weights", **order)


def test_busy_intervals(address, control):
    before = time.time()
    generate(address, entry("a"))
    intervals = control.get("/busy_intervals", since=before)["intervals"]
    assert intervals and all(before <= start < end <= time.time() for start, end in intervals)
    assert control.get("/busy_intervals", since=time.time())["intervals"] == []


def test_port_in_use_is_one_clear_line():
    with bind("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use.*choose another port"):
        bind("127.0.0.1", first.getsockname()[1])


def test_a_server_that_is_not_there():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ServerError, match=rf"{address}, GET /health: ConnectionRefused"):
            ControlClient(address, TOKEN, timeout_s=1).wait_until_healthy(0.1)


def test_an_engine_that_ended_is_told_to_everybody():
    """In process, because here the engine itself must break."""

    def out_of_memory(*args):
        raise MemoryError("no memory left")

    engine = NativeEngine(tiny_model(), num_pages=20)
    engine.model.norm.register_forward_pre_hook(out_of_memory)
    loop = EngineLoop(engine)
    app = create_app(loop, TOKEN, model="m")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with TestClient(app, headers=headers, raise_server_exceptions=False) as client:
        for _ in range(2):  # the one that meets the fault, and one that comes later
            answer = client.post("/generate", json={"requests": [entry("a")]})
            assert answer.status_code == 503
            assert "MemoryError: no memory left" in answer.json()["error"]
        health = client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"
        assert "no memory left" in health.json()["error"]
        assert client.post("/pause").status_code == 503


def test_a_group_is_answered_together_and_like_single_requests(address):
    """The samples end at different steps, and the whole group comes with the last one."""
    single = generate(address, *(entry(f"s{seed}", seed=seed) for seed in (1, 2, 3)))
    group = entry("g1", seed=1) | {
        "further": [{"rid": f"g{seed}", "seed": seed} for seed in (2, 3)]
    }
    found = generate(address, group, entry("alone", max_new_tokens=1))
    assert list(found)[0] == "alone"
    for seed in (1, 2, 3):
        assert found[f"g{seed}"]["output_tokens"] == single[f"s{seed}"]["output_tokens"]
        assert found[f"g{seed}"]["output_logprobs"] == single[f"s{seed}"]["output_logprobs"]


def test_a_client_that_accepts_frames_gets_the_same_in_binary(address):
    lines = generate(address, entry("a"))
    connection = http.client.HTTPConnection(address, timeout=300)
    headers = {"Authorization": f"Bearer {TOKEN}", "Accept": FRAMES}
    body = json.dumps({"requests": [entry("a"), entry("b", ids=[2] * 3000)]})
    connection.request("POST", "/generate", body, headers)
    answer = connection.getresponse()
    assert answer.getheader("content-type") == FRAMES
    found = dict(FrameReader().feed(answer.read()))
    assert found["a"].tokens.tolist() == lines["a"]["output_tokens"]
    assert found["a"].logprobs.tolist() == lines["a"]["output_logprobs"]
    assert isinstance(found["b"], Refusal) and found["b"].kind == "request"
