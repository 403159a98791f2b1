"""Online: clients outside start sessions, talk, give rewards and end them."""

from __future__ import annotations

from contextlib import contextmanager

import httpx
import pytest
from openai import OpenAI
from sample_agents import QUESTION

from areal.agents.preconditions import ADMIN_KEY
from areal.agents.session import AgentError, AgentTimeoutError
from areal.agents.workflow import online_workflow
from areal.api.config.inference import AgentConfig, GenerationHyperparameters

SECRET = "a secret of the test"


@contextmanager
def opened(world, monkeypatch, **config):
    monkeypatch.setenv(ADMIN_KEY, SECRET)
    workflow = online_workflow(
        config=AgentConfig(mode="online", turn_discount=0.5, **config),
        tokenizer=world.tokenizer,
        gconfig=GenerationHyperparameters(max_new_tokens=4),
    )
    try:
        yield workflow
    finally:
        workflow.close()


@pytest.fixture
def online(world, monkeypatch):
    with opened(world, monkeypatch, session_timeout_seconds=300.0) as workflow:
        yield workflow


class Outside:
    """A client that knows the address and the admin key only."""

    def __init__(self, workflow, world):
        base_url = world.runner.run(workflow._proxy.get()).result(300).base_url
        self.root = base_url.removesuffix("/v1")

    def post(self, route: str, key: str, body: dict | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{self.root}/rl/{route}", headers=headers, json=body or {})

    def sessions(self) -> list[dict]:
        answer = httpx.get(f"{self.root}/rl/sessions", headers={"x-api-key": SECRET})
        assert answer.status_code == 200, answer.text
        return answer.json()["sessions"]

    def start(self) -> dict:
        answer = self.post("start_session", SECRET)
        assert answer.status_code == 200, answer.text
        return answer.json()


def talk(session: dict, turns: int = 1) -> list[str]:
    with OpenAI(base_url=session["base_url"], api_key=session["api_key"]) as client:
        return [
            client.chat.completions.create(model="policy", messages=QUESTION).id
            for _ in range(turns)
        ]


def test_a_client_drives_an_episode(online, world):
    running = world.start(online, {"question": "2+2="})
    outside = Outside(online, world)
    session = outside.start()
    assert session["data"] == {"question": "2+2="}
    first, _ = talk(session, 2)
    reward = {"interaction_id": first, "reward": 1}
    assert outside.post("set_reward", session["api_key"], reward).status_code == 200
    ended = outside.post("end_session", session["api_key"], {"reward": 2.0})
    assert ended.json() == {"interactions": 2}
    interactions = running.result(300)
    assert [item.reward for item in interactions.values()] == [2.0, 2.0]  # 1 + 0.5 * 2, and 2
    assert outside.post("end_session", session["api_key"]).status_code in (401, 409)


def test_sessions_start_while_episodes_wait(online, world):
    outside = Outside(online, world)
    assert outside.post("start_session", SECRET).status_code == 429
    running = [world.start(online) for _ in range(2)]
    keys = [outside.start()["api_key"] for _ in running]
    assert len(set(keys)) == 2
    assert outside.post("start_session", SECRET).status_code == 429
    for key in keys:
        outside.post("end_session", key)
    assert [future.result(300) for future in running] == [None, None]


def test_an_end_without_a_reward_is_a_rejection(online, world):
    running = world.start(online)
    outside = Outside(online, world)
    session = outside.start()
    talk(session)
    outside.post("end_session", session["api_key"])
    assert running.result(300) is None


def test_a_reward_without_a_completion_ends_the_session(online, world):
    running = world.start(online)
    outside = Outside(online, world)
    session = outside.start()
    ended = outside.post("end_session", session["api_key"], {"reward": 1.0})
    assert ended.status_code == 200 and ended.json() == {"interactions": 0}
    assert running.result(300) is None, "rejected, at once: its place is free again"


def test_a_session_is_known_by_its_address(online, world):
    running = world.start(online)
    session = Outside(online, world).start()
    with OpenAI(base_url=f"{session['session_url']}/v1", api_key="none") as client:
        client.chat.completions.create(model="policy", messages=QUESTION)
    ended = httpx.post(f"{session['session_url']}/rl/end_session", json={"reward": 1.0})
    assert ended.json() == {"interactions": 1}
    assert len(running.result(300)) == 1


def test_a_client_that_leaves_is_a_failure(world, monkeypatch):
    with opened(world, monkeypatch, session_timeout_seconds=10.0) as online:
        running = world.start(online)
        talk(Outside(online, world).start())
        with pytest.raises(AgentTimeoutError, match="did not end session .* within 10 s"):
            running.result(300)


def test_only_the_admin_key_starts_sessions(online, world):
    running = world.start(online)
    outside = Outside(online, world)
    for key in ("wrong", SECRET[:-1], SECRET + "x"):
        assert outside.post("start_session", key).status_code == 401
    session = outside.start()
    assert outside.post("start_session", session["api_key"]).status_code == 401
    outside.post("end_session", session["api_key"])
    assert running.result(300) is None


@pytest.mark.parametrize("secret", [None, "short"])
def test_the_admin_key_must_be_a_secret(world, monkeypatch, secret):
    monkeypatch.delenv(ADMIN_KEY, raising=False)
    if secret is not None:
        monkeypatch.setenv(ADMIN_KEY, secret)
    with pytest.raises(ValueError, match="set the environment variable AREAL_ADMIN_API_KEY"):
        online_workflow(
            config=AgentConfig(mode="online"),
            tokenizer=world.tokenizer,
            gconfig=GenerationHyperparameters(),
        )


def test_a_row_that_is_no_json_fails_its_episode(online, world):
    running = world.start(online, {"image": object()})
    answer = Outside(online, world).post("start_session", SECRET)
    assert answer.status_code == 500 and "cannot be sent as JSON" in answer.text
    with pytest.raises(AgentError, match="not JSON serializable"):
        running.result(300)


def test_a_reward_may_come_late(world, monkeypatch):
    with opened(world, monkeypatch, set_reward_finish_timeout=60.0) as online:
        running = world.start(online)
        outside = Outside(online, world)
        session = outside.start()
        first, _ = talk(session, 2)
        assert outside.post("end_session", session["api_key"]).status_code == 200
        (shown,) = outside.sessions()
        assert (shown["state"], shown["completions"]) == ("awaits reward", 2)
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        body = {"messages": QUESTION}
        refused = httpx.post(f"{outside.root}/v1/chat/completions", headers=headers, json=body)
        assert refused.status_code == 409, "ended, but for its reward"
        unknown = {"reward": 1, "interaction_id": "none"}
        assert outside.post("set_reward", session["api_key"], unknown).status_code == 400
        assert not running.done()
        rewards = {"reward": {first: 1.0, "1": 2.0}}
        assert outside.post("set_reward", session["api_key"], rewards).status_code == 200
        assert [item.reward for item in running.result(300).values()] == [2.0, 2.0]


def test_a_reward_that_does_not_come_is_a_rejection(world, monkeypatch):
    with opened(world, monkeypatch, set_reward_finish_timeout=0.2) as online:
        running = world.start(online)
        outside = Outside(online, world)
        session = outside.start()
        talk(session)
        outside.post("end_session", session["api_key"])
        assert running.result(300) is None
        late = outside.post("set_reward", session["api_key"], {"reward": 1.0})
        assert late.status_code in (401, 409)


def test_a_rewarded_session_that_is_left_ends_by_itself(world, monkeypatch):
    with opened(world, monkeypatch, set_reward_finish_timeout=0.2) as online:
        running = world.start(online)
        outside = Outside(online, world)
        session = outside.start()
        talk(session)
        assert outside.post("set_reward", session["api_key"], {"reward": 3.0}).status_code == 200
        assert [item.reward for item in running.result(300).values()] == [3.0]


def test_open_sessions_have_a_limit(world, monkeypatch):
    with opened(world, monkeypatch, max_sessions=1) as online:
        running = [world.start(online) for _ in range(2)]
        outside = Outside(online, world)
        for _ in running:
            session = outside.start()
            refused = outside.post("start_session", SECRET)
            assert refused.status_code == 429, refused.text
            outside.post("end_session", session["api_key"])
        assert [future.result(300) for future in running] == [None, None]


def test_sessions_are_listed_for_the_admin_key(online, world):
    running = world.start(online, {"question": "2+2="})
    outside = Outside(online, world)
    (offered,) = outside.sessions()
    assert (offered["task_id"], offered["sample"], offered["state"]) == (3, 1, "offered")
    session = outside.start()
    talk(session)
    (shown,) = outside.sessions()
    assert shown["id"] == session["session_id"] == offered["id"]
    assert (shown["state"], shown["completions"]) == ("open", 1)
    assert 0 <= shown["last_request_s"] <= shown["age_s"]
    assert session["api_key"] not in str(shown)
    for key in ("wrong", session["api_key"]):
        assert httpx.get(f"{outside.root}/rl/sessions", headers={"x-api-key": key}).is_error
    outside.post("end_session", session["api_key"])
    assert running.result(300) is None
    assert outside.sessions() == []
