"""A request that is sent again gets the answer of the first, and one interaction is recorded."""

from __future__ import annotations

import asyncio

import pytest
from agent_world import Does, ScriptedEngine
from sample_agents import QUESTION

from areal.agents.retries import Attempt, Attempts, SharedCall
from areal.agents.streams import ReplyStream
from areal.openai.streams import EventFormat


class Gated(ScriptedEngine):
    """Answers when `go` is set."""

    def __init__(self, *args):
        super().__init__(*args)
        self.go: asyncio.Event | None = None

    async def agenerate(self, request):
        self.go = self.go or asyncio.Event()
        response = await super().agenerate(request)
        await self.go.wait()
        return response


def post(extra, headers=None, **body):
    return extra["http_client"].post(
        f"{extra['base_url']}/chat/completions",
        headers={"authorization": f"Bearer {extra['api_key']}", **(headers or {})},
        json={"messages": QUESTION, **body},
    )


def retry(count):
    return {"x-stainless-retry-count": str(count)}


@pytest.mark.parametrize(
    "first, second, same",
    [
        (retry(0), retry(1), True),
        ({"idempotency-key": "k"}, {"idempotency-key": "k"}, True),
        ({"idempotency-key": "k"}, {"idempotency-key": "other"}, False),
        (retry(0), retry(0), False),
        ({}, {}, False),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_given(world, first, second, same, stream):
    async def act(client, extra):
        answers.extend([await post(extra, first, stream=stream)])
        answers.extend([await post(extra, second, stream=stream)])

    answers = []
    items = world.run(Does(act), engine=ScriptedEngine(world.tokenizer, "a", "b"))
    one, two = answers
    assert (one.content == two.content) == same
    assert one.headers["content-type"] == two.headers["content-type"]
    assert len(items) == (1 if same else 2)


@pytest.mark.parametrize(
    "second, same", [({}, True), (retry(1), True), (retry(0), False)], ids=["plain", "1", "0"]
)
def test_an_equal_request_in_flight(world, second, same):
    engine = Gated(world.tokenizer, "a", "b")

    async def act(client, extra):
        calls = [asyncio.create_task(post(extra))]
        while engine.go is None:
            await asyncio.sleep(0.01)
        calls.append(asyncio.create_task(post(extra, second)))
        while not same and len(engine.requests) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        engine.go.set()
        answers.extend(await asyncio.gather(*calls))

    answers = []
    items = world.run(Does(act), engine=engine)
    assert len(items) == len(engine.requests) == (1 if same else 2)
    assert (answers[0].content == answers[1].content) == same


def test_a_retry_of_another_request_is_a_request(world):
    async def act(client, extra):
        await post(extra)
        await post(extra, retry(1), seed=3)

    engine = ScriptedEngine(world.tokenizer, "a", "b")
    assert len(world.run(Does(act), engine=engine)) == 2


async def ask(attempts, attempt, work):
    with attempts.join(attempt, lambda: SharedCall(work(), ReplyStream(EventFormat()))) as call:
        return await call.answer()


async def test_a_call_ends_when_the_last_client_has_left():
    attempts, ended = Attempts(), asyncio.Event()
    attempt = Attempt("name", is_retry=False, may_join=True)

    async def work():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    clients = [asyncio.create_task(ask(attempts, attempt, work)) for _ in range(2)]
    await asyncio.sleep(0.01)
    clients[0].cancel()
    await asyncio.sleep(0.01)
    assert not ended.is_set()
    clients[1].cancel()
    await asyncio.wait_for(ended.wait(), 10)


async def test_a_failure_is_not_remembered():
    attempts = Attempts()
    attempt = Attempt("name", is_retry=True, may_join=True)
    results = [ValueError("broken"), b"fine"]

    async def work():
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    with pytest.raises(ValueError, match="broken"):
        await ask(attempts, attempt, work)
    assert await ask(attempts, attempt, work) == b"fine"
    assert await ask(attempts, attempt, work) == b"fine" and not results
