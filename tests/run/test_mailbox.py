"""Requests to a living run through its folder: answers, refusals, strangers and dead runs."""

from __future__ import annotations

import json
import os
import threading

import pytest

from areal.run.mailbox import MailboxServer, RunSilentError, ask, read_state

WAIT_S = 900


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "fleet"


@pytest.fixture
def serve(folder):
    opened = []

    def start(handle):
        opened.append(MailboxServer(folder, handle, lambda: {"servers": {}}))
        opened[-1].start()
        return opened[-1]

    yield start
    for server in opened:
        server.close()


def wait_for(condition):
    waited = threading.Event()
    for _ in range(WAIT_S * 20):
        if condition():
            return
        waited.wait(0.05)
    pytest.fail("it did not come to pass")


def test_an_answer_and_its_errors_reach_who_asked(serve, folder):
    def handle(op, fields):
        if op == "refuse":
            raise ValueError("address: expected host:port")
        if op == "break":
            raise OSError("the server is gone")
        return {"op": op, **fields}

    serve(handle)
    assert ask(folder, "join", address="a:1") == {"op": "join", "address": "a:1"}
    with pytest.raises(ValueError, match="expected host:port"):
        ask(folder, "refuse")
    with pytest.raises(RuntimeError, match="the server is gone"):
        ask(folder, "break")
    assert not [name for name in os.listdir(folder) if name != "state.json"]
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "state.json").stat().st_mode & 0o077 == 0


def test_a_slow_request_does_not_hold_up_another(serve, folder):
    let_go = threading.Event()

    def handle(op, fields):
        if op == "slow":
            assert let_go.wait(WAIT_S)
        return {"op": op}

    serve(handle)
    answers = []
    slow = threading.Thread(target=lambda: answers.append(ask(folder, "slow")), daemon=True)
    slow.start()
    assert ask(folder, "quick") == {"op": "quick"}
    assert not answers
    let_go.set()
    slow.join(WAIT_S)
    assert answers == [{"op": "slow"}]


@pytest.mark.parametrize(
    ("content", "mode", "fault"),
    [
        (b'{"op": "join"}', 0o644, "others may read or write it"),
        (b'{"op": "jo', 0o600, "not JSON"),
        (b'{"op": NaN}', 0o600, "not JSON"),
        (b'{"op": "\\ud800"}', 0o600, "surrogate"),
        (b'["join"]', 0o600, "expected a JSON object"),
        (b"{}", 0o600, "op: expected a text"),
        (b" " * (2 << 20), 0o600, "expected at most"),
    ],
)
def test_what_is_no_request_is_refused_and_removed(serve, folder, content, mode, fault):
    serve(lambda op, fields: pytest.fail("it was taken for a request"))
    draft, request = folder / "draft", folder / "x.request.json"
    draft.write_bytes(content)
    draft.chmod(mode)
    draft.rename(request)
    reply = folder / "x.reply.json"
    wait_for(reply.exists)
    assert fault in json.loads(reply.read_text())["error"] and not request.exists()


def test_a_link_is_not_followed(serve, folder, tmp_path):
    serve(lambda op, fields: pytest.fail("it was taken for a request"))
    (tmp_path / "elsewhere.json").write_text('{"op": "join"}')
    (folder / "x.request.json").symlink_to(tmp_path / "elsewhere.json")
    wait_for((folder / "x.reply.json").exists)
    assert (tmp_path / "elsewhere.json").exists()


def test_a_run_that_ended_or_never_was_is_named(serve, folder):
    with pytest.raises(RunSilentError, match="no run listens there"):
        ask(folder, "list")
    server = serve(lambda op, fields: {})
    assert read_state(folder)["servers"] == {}
    server.close()
    with pytest.raises(RunSilentError, match="no run listens there"):
        ask(folder, "list")


def test_a_run_that_is_started_again_is_asked_again(serve, folder):
    entered, let_go = threading.Event(), threading.Event()

    def never_answers(op, fields):
        entered.set()
        let_go.wait(WAIT_S)
        return {}

    serve(never_answers)
    errors = []

    def wait():
        try:
            ask(folder, "join")
        except RunSilentError as error:
            errors.append(str(error))

    asking = threading.Thread(target=wait, daemon=True)
    asking.start()
    assert entered.wait(WAIT_S)
    serve(lambda op, fields: {"op": op})  # the first one still beats: both write the state
    asking.join(WAIT_S)
    let_go.set()
    assert errors and "started again" in errors[0]


def test_a_state_that_cannot_be_told_once_does_not_end_the_mailbox(folder, caplog):
    told = []

    def describe():
        told.append(1)
        if len(told) == 2:
            raise KeyError("a server that has just left")
        return {"servers": {}}

    mailbox = MailboxServer(folder, lambda op, fields: {"told": len(told)}, describe)
    mailbox.start()
    try:
        wait_for(lambda: read_state(folder)["beat"] >= 2)
        assert "KeyError: 'a server that has just left'" in caplog.text
        assert ask(folder, "list")["told"] >= 3
    finally:
        mailbox.close()
