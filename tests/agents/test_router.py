"""One address for the sessions of several servers: sticky, streamed, errors of the clients' API."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from agent_world import ScriptedEngine
from openai import OpenAI
from sample_agents import QUESTION

from areal.agents.registry import Entry, read_entries
from areal.agents.router import AgentRouter
from areal.agents.workflow import online_workflow
from areal.api.config.inference import AgentConfig, GenerationHyperparameters

SECRET = "a secret of the test"
CONFIG = AgentConfig(mode="online", max_body_mb=0.25)


class Routed:
    """A router, and two servers as two rollout workers have them."""

    def __init__(self, world, folder):
        self.world = world
        self.folder = folder
        self.workflows = [self.open_worker() for _ in range(2)]
        self.router = AgentRouter(CONFIG, admin_key=SECRET, folder=folder)
        world.runner.run(self.router.start()).result(300)

    def open_worker(self):
        workflow = online_workflow(
            config=CONFIG,
            tokenizer=self.world.tokenizer,
            gconfig=GenerationHyperparameters(max_new_tokens=4),
            folder=self.folder,
            is_routed=True,
        )
        self.world.runner.run(workflow._proxy.get()).result(300)
        return workflow

    def close(self):
        for workflow in self.workflows:
            workflow.close()
        self.world.runner.run(self.router.stop()).result(300)

    def post(self, route, key=SECRET, body=None):
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{self.router.url}{route}"
        return httpx.post(url, headers=headers, json=body or {}, timeout=300)

    def start(self):
        answer = self.post("/rl/start_session")
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def routed(world, tmp_path):
    routed = Routed(world, tmp_path / "agents")
    yield routed
    routed.close()


def test_sessions_stay_with_their_worker(routed, world):
    running = [world.start(workflow, {"n": n}) for n, workflow in enumerate(routed.workflows)]
    sessions = [routed.start() for _ in running]
    assert sorted(session["data"]["n"] for session in sessions) == [0, 1]
    assert routed.post("/rl/start_session").status_code == 429
    for turn in range(2):
        for session in sessions:
            assert session["base_url"] == f"{routed.router.url}/v1"
            with OpenAI(base_url=session["base_url"], api_key=session["api_key"]) as client:
                reply = client.chat.completions.create(model="policy", messages=QUESTION)
            assert reply.usage.completion_tokens > 0, turn
    for session in sessions:
        reward = {"reward": session["data"]["n"] + 1.0}
        assert routed.post("/rl/end_session", session["api_key"], reward).json() == {
            "interactions": 2
        }
    rewards = [[item.reward for item in future.result(300).values()] for future in running]
    assert rewards == [[1.0, 1.0], [2.0, 2.0]]


def test_all_clients_pass_through(routed, world):
    engine = ScriptedEngine(world.tokenizer, "one", "two", "three")
    running = world.start(routed.workflows[0], {}, engine)
    session = routed.start()
    root = routed.router.url
    message = {"model": "policy", "max_tokens": 9, "messages": QUESTION}
    headers = {"x-api-key": session["api_key"], "anthropic-version": "2023-06-01"}
    reply = httpx.post(f"{root}/v1/messages?beta=true", headers=headers, json=message, timeout=300)
    assert reply.json()["content"][0]["text"] == "one"
    with OpenAI(base_url=f"{session['session_url']}/v1", api_key="none") as client:
        parts = client.chat.completions.create(model="policy", messages=QUESTION, stream=True)
        texts = [part.choices[0].delta.content for part in parts if part.choices]
        assert "".join(text or "" for text in texts) == "two"
        assert len([text for text in texts if text]) > 1, "a stream, not one piece"
        assert [model.id for model in client.models.list()] == ["policy"]
    routed.post("/rl/end_session", session["api_key"], {"reward": 1})
    assert len(running.result(300)) == 2


def test_a_client_that_leaves_frees_its_generation(routed, world):
    class Endless:
        cancelled = 0

        async def agenerate(self, request):
            request.on_tokens and request.on_tokens(request.input_ids[:1], [-0.5])
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1

    engine = Endless()
    running = world.start(routed.workflows[1], {}, engine)
    session = routed.start()
    url = f"{session['session_url']}/v1/chat/completions"
    with httpx.stream("POST", url, json={"messages": QUESTION, "stream": True}) as answer:
        assert answer.status_code == 200
        next(answer.iter_raw())

    async def until_freed():
        async with asyncio.timeout(30):
            while not engine.cancelled:
                await asyncio.sleep(0.01)

    world.runner.run(until_freed()).result(300)
    routed.post("/rl/end_session", session["api_key"])
    assert running.result(300) is None


def test_what_is_wrong_is_said_in_the_words_of_the_api(routed, world):
    running = world.start(routed.workflows[0])
    session = routed.start()
    for key in ("none", "sk-areal-00000000ffff-x", session["api_key"] + "x"):
        for route in ("/v1/chat/completions", "/rl/end_session"):
            assert routed.post(route, key).status_code == 401
        refused = routed.post("/v1/messages", key)
        assert refused.json()["error"]["type"] == "authentication_error"
    assert routed.post("/rl/start_session", session["api_key"]).status_code == 401
    big = {"messages": [{"role": "user", "content": "x" * (300 << 10)}], "max_tokens": 1}
    for route in ("/v1/chat/completions", "/v1/messages"):
        refused = routed.post(route, session["api_key"], big)
        assert refused.status_code == 413 and "at most 262144 bytes" in refused.text
        assert ("type" in refused.json()) == (route == "/v1/messages")
    routed.post("/rl/end_session", session["api_key"])
    assert running.result(300) is None
    assert routed.post("/v1/chat/completions", session["api_key"]).status_code in (401, 409)


def test_a_worker_that_is_gone_has_no_sessions(routed, world):
    """A new one is found when a session starts; the entry of a killed one does no harm."""
    running = world.start(routed.workflows[0])
    session = routed.start()
    entries = {entry.id: entry for entry in read_entries(routed.folder)}
    routed.workflows[0].close()
    assert running.result(300) is None
    (dead,) = set(entries) - {entry.id for entry in read_entries(routed.folder)}
    entries[dead].write(routed.folder)  # as after kill -9
    gone = routed.post("/v1/chat/completions", session["api_key"], {"messages": QUESTION})
    assert gone.status_code == 409 and "worker is gone" in gone.text
    assert gone.headers["x-should-retry"] == "false"
    routed.workflows[0] = routed.open_worker()
    running = world.start(routed.workflows[0], {"n": 7})
    again = routed.start()
    assert again["data"] == {"n": 7}
    routed.post("/rl/end_session", again["api_key"])
    assert running.result(300) is None


def test_entries_are_private(tmp_path):
    entry = Entry.of("0123abcd", "http://127.0.0.1:1", "key")
    entry.write(tmp_path / "agents")
    (file,) = (tmp_path / "agents").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_entries(tmp_path / "agents") == [entry]
    entry.remove(tmp_path / "agents")
    assert read_entries(tmp_path / "agents") == [] == read_entries(tmp_path / "nowhere")
