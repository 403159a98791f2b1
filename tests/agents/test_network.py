"""Where the server for agents listens, what it is called, and what it does not take."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import pytest
from agent_world import Does, ScriptedEngine
from sample_agents import QUESTION

from areal.agents.runners import InlineAgent
from areal.agents.session import AgentError, SessionOptions
from areal.agents.workflow import AgentEpisodes
from areal.api.config.inference import AgentConfig, GenerationHyperparameters
from areal.cli.main import main
from areal.run.database import RunDatabase
from areal.utils.addresses import bind, reachable_url

ROUTES = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]
BODIES = {
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/responses": {"input": "2+2="},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 4},
}


def post(extra, route, body, **headers):
    root = extra["base_url"].removesuffix("/v1")
    headers = {"Authorization": f"Bearer {extra['api_key']}", **headers}
    return extra["http_client"].post(f"{root}{route}", json=body, headers=headers)


def other_machine():
    """This machine's address in its network; the tests that need one are skipped without."""
    host = httpx.URL(reachable_url("0.0.0.0", 1)).host
    if host == "127.0.0.1":
        pytest.skip("this machine has no network")
    return host


def test_agents_get_an_address_that_others_reach(world):
    host = other_machine()

    async def act(client, extra):
        assert extra["base_url"].startswith(f"http://{host}:")
        answer = await post(extra, "/v1/chat/completions", BODIES["/v1/chat/completions"])
        assert answer.status_code == 200
        for key in ("none", "sk-areal-0-0"):
            refused = await post({**extra, "api_key": key}, "/v1/chat/completions", {})
            assert refused.status_code == 401

    world.run(Does(act), host="0.0.0.0")


def test_by_default_only_this_machine_reaches_it(world):
    host = other_machine()

    async def act(client, extra):
        url = httpx.URL(extra["base_url"])
        assert url.host == "127.0.0.1"
        with pytest.raises(OSError):
            socket.create_connection((host, url.port), timeout=10).close()
        await post(extra, "/v1/chat/completions", BODIES["/v1/chat/completions"])

    world.run(Does(act))


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_the_advertised_address_is_what_agents_get(world, ending):
    with bind("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]

    async def act(client, extra):
        assert extra["base_url"] == f"http://localhost:{port}/v1"
        answer = await post(extra, "/v1/chat/completions", BODIES["/v1/chat/completions"])
        assert answer.status_code == 200

    url = f"http://localhost:{port}{ending}"
    world.run(Does(act), port=port, advertise_url=url)


def test_a_host_that_is_not_ours_is_an_error(world):
    with pytest.raises(ValueError, match=r"rollout.agent.host.* cannot listen on 203.0.113.7:0"):
        world.run(Does(None), host="203.0.113.7")


@pytest.mark.parametrize("route", ROUTES)
def test_a_body_too_large_is_refused_and_the_episode_goes_on(world, route):
    async def act(client, extra):
        big = await post(extra, route, {**BODIES[route], "metadata": {"x": "y" * (200 << 10)}})
        assert big.status_code == 413, big.text
        error = big.json()["error"]
        assert "expected a body of at most 131072 bytes" in error["message"]
        kind = "request_too_large" if route == "/v1/messages" else "invalid_request_error"
        assert error["type"] == kind
        assert ("type" in big.json()) == (route == "/v1/messages")
        assert (await post(extra, route, BODIES[route])).status_code == 200

    assert len(world.run(Does(act), max_body_mb=0.125)) == 1


class Slow(ScriptedEngine):
    """Its first answer never comes."""

    async def agenerate(self, request):
        if not self.requests:
            self.requests.append(request)
            await asyncio.Event().wait()
        return await super().agenerate(request)


@pytest.mark.parametrize("route", ROUTES)
def test_a_call_that_takes_too_long_fails(world, route):
    async def act(client, extra):
        late = await post(extra, route, BODIES[route])
        assert late.status_code == 504, late.text
        error = late.json()["error"]
        assert "rollout.agent.request_timeout_seconds" in error["message"]
        assert error["type"] == ("timeout_error" if route == "/v1/messages" else "server_error")
        await post(extra, route, {**BODIES[route], "temperature": 0.5})

    with pytest.raises(AgentError, match="took longer than 0.5 s"):
        world.run(Does(act), engine=Slow(world.tokenizer, "well"), request_timeout_seconds=0.5)


def test_a_call_that_is_tried_again_in_time_is_fine(world):
    route = "/v1/chat/completions"

    async def act(client, extra):
        assert (await post(extra, route, BODIES[route])).status_code == 504
        retry = {"x-stainless-retry-count": "1"}
        assert (await post(extra, route, BODIES[route], **retry)).status_code == 200

    engine = Slow(world.tokenizer, "well")
    assert len(world.run(Does(act), engine=engine, request_timeout_seconds=0.5)) == 1


def test_episodes_wait_while_there_are_enough_sessions(world):
    at_once, most = [0], [0]

    async def act(client, extra):
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        await post(extra, "/v1/chat/completions", BODIES["/v1/chat/completions"])
        at_once[0] -= 1

    with world.open(Does(act), max_sessions=2) as workflow:
        running = [world.start(workflow) for _ in range(6)]
        assert all(len(future.result(300)) == 1 for future in running)
    assert most[0] == 2


def test_the_sessions_of_a_run_are_listed(world, tmp_path, capsys):
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def act(client, extra):
        await post(extra, "/v1/chat/completions", BODIES["/v1/chat/completions"])
        asked.set()
        await go_on.wait()

    async def wait_for(event):
        await asyncio.wait_for(event.wait(), 30)

    async def set_event(event):
        event.set()

    options = SessionOptions(
        AgentConfig(), world.tokenizer, GenerationHyperparameters(max_new_tokens=2)
    )
    place = InlineAgent(Does(act), {}, timeout_s=900)
    workflow = AgentEpisodes(place, options, folder=tmp_path / "agents", logs=None)
    with RunDatabase(tmp_path / "run.db") as database:
        database.record_event("started", "step 0")
        assert main(["agents", str(tmp_path)]) == 1
        assert "has begun no episode" in capsys.readouterr().err
        running = world.start(workflow)
        world.runner.run(wait_for(asked)).result(300)
        assert main(["agents", str(tmp_path), "--json"]) == 0
        (session,) = json.loads(capsys.readouterr().out)["sessions"]
        assert (session["task_id"], session["sample"], session["completions"]) == (3, 1, 1)
        assert main(["agents", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert session["id"] in printed and "3/1" in printed and "1 live sessions" in printed
        world.runner.run(set_event(go_on)).result(300)
        running.result(300)
        workflow.close()
        database.record_event("finished", "step 4")
    assert main(["agents", str(tmp_path)]) == 1
    assert "the run has ended: finished step 4" in capsys.readouterr().err
    assert main(["agents", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("host", ""),
        ("port", 65536),
        ("advertise_url", "here:8000"),
        ("advertise_url", "http://"),
        ("advertise_url", "http://here:port"),
        ("advertise_url", "http://here?x=1"),
        ("max_sessions", 0),
        ("max_body_mb", 0),
        ("max_image_mb", 0),
        ("request_timeout_seconds", 0),
        ("set_reward_finish_timeout", -1),
    ],
)
def test_a_value_that_makes_no_sense_is_named(key, value):
    with pytest.raises(ValueError, match=f"^{key} must .*, got "):
        AgentConfig(**{key: value})
