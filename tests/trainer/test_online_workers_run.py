"""A whole run whose episodes are driven from outside, in two rollout workers, at one address."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest
from tiny_run import grpo_config, query

from areal.agents.preconditions import ADMIN_KEY
from areal.cli.main import main
from areal.run.paths import RunPaths
from areal.trainer.experiment import run_experiment
from areal.utils.addresses import bind

SECRET = "a secret of the test"
QUESTION = [{"role": "user", "content": "2+2="}]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]


class Client(threading.Thread):
    """Takes every session it gets through one completion."""

    def __init__(self, root: str) -> None:
        super().__init__(daemon=True)
        self.root = root
        self.is_over = threading.Event()
        self.servers: set[str] = set()  # those that had a session
        self.on_session = lambda: None

    def run(self) -> None:
        with httpx.Client(timeout=900) as http:
            while not self.is_over.is_set():
                try:
                    self.one_session(http)
                except httpx.TransportError:  # not there yet, or not any more
                    time.sleep(0.05)

    def one_session(self, http: httpx.Client) -> None:
        admin = {"Authorization": f"Bearer {SECRET}"}
        answer = http.post(f"{self.root}/rl/start_session", headers=admin)
        if answer.status_code != 200:
            time.sleep(0.02)
            return
        session = answer.json()
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        url = f"{session['base_url']}/chat/completions"
        reply = http.post(url, headers=headers, json={"messages": QUESTION})
        if reply.status_code == 200:
            self.servers.add(session["session_id"][:8])
            self.on_session()
            text = reply.json()["choices"][0]["message"]["content"]
            body = {"reward": float(len(text) % 2)}
            http.post(f"{self.root}/rl/end_session", headers=headers, json=body)


def test_clients_of_two_workers_have_one_address(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(ADMIN_KEY, SECRET)
    with bind("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    config = grpo_config(
        tmp_path,
        "rollout.agent.mode=online",
        f"rollout.agent.port={port}",
        "rollout.workers=2",
        "rollout.max_head_offpolicyness=1",
        "train_dataset.batch_size=4",
        "gconfig.n_samples=2",
        "total_train_steps=2",
        "evaluator.freq_steps=null",
        "valid_dataset=null",
    )
    paths = RunPaths.of(config)
    of_two: list[dict] = []  # the sessions, once each worker has begun an episode

    def list_sessions():
        """While its own session is open, so that those of both workers are there in the end."""
        deadline = time.monotonic() + 300
        while not of_two and time.monotonic() < deadline:
            assert main(["agents", str(paths.root), "--json"]) == 0
            listed = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["sessions"]
            of_two.extend(listed if len({session["pid"] for session in listed}) == 2 else [])

    client = Client(f"http://127.0.0.1:{port}")
    client.on_session = list_sessions
    client.start()
    try:
        run_experiment(config)
    finally:
        client.is_over.set()
        client.join(300)
    (trained,) = query(paths.root, "SELECT count(*) FROM tasks WHERE state = 'trained'")
    assert trained[0] == 8
    assert len(client.servers) == 2, "both workers had sessions"
    states = {session["state"] for session in of_two}
    assert "open" in states and states <= {"open", "offered", "generating", "ended"}
    assert not list(paths.agents.glob("*.json")), "the servers have left"
