"""RemoteEngine against stock servers that break, hang and lie: scripts behind real HTTP.

The scripts stand for the network and for dying processes. What a healthy server does is tested with
one that speaks SGLang's protocol (test_sglang_remote.py), and with vLLM itself.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest
from aiohttp import web
from server_checks import Told
from tiny import tiny_model, write_tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest, WeightUpdateMeta
from areal.engine.remote.engine import RemoteEngine
from areal.engine.remote.server_control import ServerError
from areal.engine.remote.sglang import SGLangProtocol
from areal.engine.remote.vllm import VLLMProtocol
from areal.engine.train.export import send_weights
from areal.weight_sync.transports import PublicationRoot


def request(ids=(2, 3), **options):
    gconfig = GenerationHyperparameters(**{"max_new_tokens": 4, **options})
    return ModelRequest(input_ids=list(ids), gconfig=gconfig)


def answer(tokens, reason="stop", **finish):
    pairs = [[-0.5, token, None] for token in tokens]
    return web.json_response(
        {
            "meta_info": {
                "finish_reason": {"type": reason, **finish},
                "output_token_logprobs": pairs,
            }
        }
    )


class ScriptedServer:
    """Answers the nth POST /generate by scripts[n] (the last one for all later): a function from
    the body, awaited when it is a coroutine. Control calls succeed unless `fails` names them, or
    the server `hides`: then their connections break."""

    def __init__(self, *scripts, fails=()):
        self.scripts = scripts
        self.fails = fails
        self.hides = False
        self.seen = []  # bodies of /generate
        self.orders = []  # control routes, in order

    async def generate(self, call):
        self.seen.append(await call.json())
        script = self.scripts[min(len(self.seen), len(self.scripts)) - 1]
        result = script(self.seen[-1])
        result = await result if asyncio.iscoroutine(result) else result
        if hasattr(result, "__aiter__"):
            return await self.stream(call, result)
        if result is None:
            call.transport.close()
            raise ConnectionError
        return result

    async def stream(self, call, events):
        """Each event when the script yields it; None breaks the connection."""
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(call)
        async with aclosing(events):
            async for event in events:
                if event is None:
                    call.transport.close()
                    raise ConnectionError
                data = event if isinstance(event, str) else json.dumps(event)
                await answer.write(f"data: {data}\n\n".encode())
        return answer

    async def order(self, call):
        if self.hides:
            call.transport.close()
            raise ConnectionError
        self.orders.append(call.path)
        if call.path in self.fails:
            return web.json_response({"success": False, "message": "no such file"}, status=400)
        return web.json_response({"success": True})


@asynccontextmanager
async def serving(server):
    app = web.Application()
    for route in ("/generate", "/v1/completions"):
        app.router.add_post(route, server.generate)
    app.router.add_route("*", "/{other}", server.order)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield "{}:{}".format(*runner.addresses[0])
    await runner.cleanup()


@asynccontextmanager
async def engine_of(*servers, protocol=SGLangProtocol, model_path="unused", **options):
    options = {"request_timeout_s": 20, "request_retries": 2, **options}
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(server)) for server in servers]
        engine = RemoteEngine(protocol(model_path), addresses, "token", **options)
        yield engine
        await asyncio.to_thread(engine.destroy)


def hang_up(body):
    return None


async def never(body):
    await asyncio.sleep(60)


async def test_lost_requests_are_sent_again_within_a_bound():
    server = ScriptedServer(hang_up, hang_up, lambda body: answer([7]))
    async with engine_of(server) as engine:
        assert (await engine.agenerate(request())).output_tokens == [7]
    assert server.seen[0] == server.seen[2]
    server = ScriptedServer(hang_up)
    async with engine_of(server, request_retries=1) as engine:
        with pytest.raises(ServerError, match="after 2 attempts"):
            await engine.agenerate(request())
    assert len(server.seen) == 2


async def test_a_retry_goes_to_another_server():
    dead, alive = ScriptedServer(hang_up), ScriptedServer(lambda body: answer([7]))
    async with engine_of(dead, alive, request_retries=1) as engine:
        replies = await asyncio.gather(*[engine.agenerate(request([n, 1])) for n in range(6)])
    assert [reply.output_tokens for reply in replies] == [[7]] * 6


async def test_samples_of_a_prompt_go_to_one_server():
    async def slow(body):
        await asyncio.sleep(0.2)
        return answer([1])

    servers = [ScriptedServer(slow), ScriptedServer(slow)]
    async with engine_of(*servers) as engine:
        requests = [request([prompt]) for _ in range(4) for prompt in range(6)]
        await asyncio.gather(*map(engine.agenerate, requests))
    prompts = [{body["input_ids"][0] for body in server.seen} for server in servers]
    assert [len(each) for each in prompts] == [3, 3] and not prompts[0] & prompts[1]


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        (lambda body: web.json_response({"error": {"message": "too long"}}, status=400),
         ValueError, "too long"),
        (lambda body: web.Response(text="<html>proxy", status=502), ServerError, "502: <html>"),
    ],
)  # fmt: skip
async def test_an_error_is_raised_at_once(script, error, message):
    server = ScriptedServer(script)
    async with engine_of(server) as engine:
        with pytest.raises(error, match=message):
            await engine.agenerate(request())
    assert len(server.seen) == 1


def odd(pairs, reason="stop", **more):
    finish = {"finish_reason": {"type": reason}, "output_token_logprobs": pairs}
    return lambda body: web.json_response({"meta_info": finish, **more})


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (lambda body: web.Response(text="nonsense"), "not JSON"),
        (lambda body: web.json_response([1]), "expected a JSON object"),
        (lambda body: web.json_response({"meta_info": None}), "TypeError"),
        (lambda body: web.json_response({"meta_info": {"finish_reason": "stop"}}), "TypeError"),
        (lambda body: answer([1, 2, 3, 4, 5]), "got 5 tokens, 4 were requested"),
        (lambda body: answer([], "abort", status_code=500, message="boom"), "boom"),
        (lambda body: answer([256]), "must lie in 0 .. 255, got 256"),
        (lambda body: answer([-1]), "token ids must lie in 0 .. .*, got -1"),
        (lambda body: answer([1.0]), "expected a list of token ids"),
        (lambda body: answer([True]), "expected a list of token ids"),
        (lambda body: answer([]), "got none, though the request ended with 'stop'"),
        (odd(None), "got none, though the request ended with 'stop'"),
        (odd(None, "length"), "got none, though the request ended with 'length'"),
        (odd(None, "abort", output_ids=[5]), "expected one per token, got none"),
        (odd([[-9999.0, 5, None]]), "of at least -1000, got -9999"),
        (odd([[0.5, 5, None]]), "at or below 0"),
        (odd([[True, 5, None]]), "expected a list of numbers"),
        (odd([[None, 5, None]]), "expected a list of numbers"),
        (odd([["-0.5", 5, None]]), "expected a list of numbers"),
        (odd([[float("nan"), 5, None]]), "not JSON"),
        (odd([[-0.5]]), "IndexError"),
        (lambda body: web.Response(body=b'{"meta_info": ' + b"[" * 9000), "not JSON"),
    ],
)
async def test_a_reply_that_cannot_be_trained_on_is_refused(script, message):
    """Asked for again within the bound, counted, and never data."""
    server = ScriptedServer(script, script, lambda body: answer([7]))
    async with engine_of(server, vocab_size=256) as engine:
        assert (await engine.agenerate(request())).output_tokens == [7]
        stats = await asyncio.to_thread(engine.stats)
        assert stats["replies_refused"] == 2 and stats["requests_resent"] == 2
    server = ScriptedServer(script)
    async with engine_of(server, vocab_size=256) as engine:
        with pytest.raises(
            ServerError, match=f"malformed reply.*{message}.*after 3 attempts"
        ) as caught:
            await engine.agenerate(request())
        assert f"SGLang server {engine.servers[0]}" in str(caught.value)
    assert len(server.seen) == 3


async def test_float_rounding_is_no_fault():
    async with engine_of(ScriptedServer(odd([[1e-4, 5, None]])), vocab_size=256) as engine:
        assert (await engine.agenerate(request())).output_logprobs == [1e-4]


async def test_no_reply_in_time():
    async with engine_of(ScriptedServer(never), request_timeout_s=0.2) as engine:
        with pytest.raises(ServerError, match="no reply within 0.2 s"):
            await engine.agenerate(request())


async def test_aborts_that_nobody_ordered_end_as_an_error():
    server = ScriptedServer(lambda body: answer([], "abort"))
    async with engine_of(server, request_retries=1) as engine:
        with pytest.raises(ServerError, match="aborted the request .after 2 attempts"):
            await engine.agenerate(request())


async def test_what_was_aborted_goes_on_where_it_was():
    server = ScriptedServer(lambda body: answer([7, 8], "abort"), lambda body: answer([9], "stop"))
    async with engine_of(server) as engine:
        reply = await engine.agenerate(request(seed=10, min_new_tokens=3))
    assert reply.output_tokens == [7, 8, 9] and reply.stop_reason == "stop"
    first, second = [body["sampling_params"] for body in server.seen]
    assert server.seen[1]["input_ids"] == [2, 3, 7, 8]
    assert (first["max_new_tokens"], second["max_new_tokens"]) == (4, 2)
    assert (first["min_new_tokens"], second["min_new_tokens"]) == (3, 1)
    assert (first["sampling_seed"], second["sampling_seed"]) == (10, 12)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def publish(engine, root, version):
    meta = root.meta().with_version(version)
    send_weights(engine, meta, tiny_model().named_hf_tensors())


async def test_a_request_that_the_order_missed_is_dropped_and_sent_again(model, tmp_path):
    """It reached the server after the abort: it would come back with tokens of the new weights."""
    server = ScriptedServer(never, lambda body: answer([7]))
    with PublicationRoot("disk", run_name="t", disk_root=tmp_path / "w") as root:
        async with engine_of(server, model_path=model) as engine:
            task = asyncio.create_task(engine.agenerate(request()))
            while not server.seen:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(publish, engine, root, 3)
            reply = await task
    assert reply.output_tokens == [7] and reply.output_versions == [3]
    assert server.orders == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/continue_generation",
    ]


async def test_weights_that_do_not_load_stop_generation_with_the_cause(model, tmp_path):
    server = ScriptedServer(lambda body: answer([7]), fails=["/update_weights_from_disk"])
    with PublicationRoot("disk", run_name="t", disk_root=tmp_path / "w") as root:
        async with engine_of(server, model_path=model) as engine:
            with pytest.raises(RuntimeError, match="no such file"):
                await asyncio.to_thread(publish, engine, root, 3)
            with pytest.raises(RuntimeError, match="no weights serve: version 3 did not load"):
                await engine.agenerate(request())
            server.fails = ()
            await asyncio.to_thread(publish, engine, root, 4)
            assert (await engine.agenerate(request())).output_versions == [4]


async def test_what_does_not_verify_or_does_not_fit_disturbs_nobody(model, tmp_path):
    server = ScriptedServer(lambda body: answer([7]))
    async with engine_of(server, model_path=model) as engine:
        absent = WeightUpdateMeta.from_disk(tmp_path / "absent").with_version(5)
        with pytest.raises(RuntimeError, match="no such publication"):
            await asyncio.to_thread(engine.update_weights, absent)
        with pytest.raises(ValueError, match="weight_update_mode"):
            engine.update_weights(WeightUpdateMeta(type="direct", version=5), iter(()))
        changes = WeightUpdateMeta(type="delta", path=str(tmp_path), version=5)
        with pytest.raises(
            ValueError, match="a SGLang server takes whole models by shm, disk, xccl, got"
        ):
            engine.update_weights(changes, iter(()))
        assert server.orders == []
        assert (await engine.agenerate(request())).output_versions == [0]


async def test_an_update_that_cannot_interrupt_leaves_the_old_weights_serving(model, tmp_path):
    server = ScriptedServer(lambda body: answer([7]), fails=["/pause_generation"])
    with PublicationRoot("disk", run_name="t", disk_root=tmp_path / "w") as root:
        async with engine_of(server, model_path=model) as engine:
            with pytest.raises(RuntimeError, match="pause_generation"):
                await asyncio.to_thread(publish, engine, root, 3)
            assert (await engine.agenerate(request())).output_versions == [0]


async def test_a_server_that_missed_an_update_gets_no_more_requests(model, tmp_path):
    """It would answer with the old weights, and nothing in its replies tells."""
    servers = [ScriptedServer(lambda body, token=token: answer([token])) for token in (7, 8)]
    with PublicationRoot("disk", run_name="t", disk_root=tmp_path / "w") as root:
        async with engine_of(*servers, model_path=model) as engine:
            first, second = engine.servers
            replies = await asyncio.gather(*[engine.agenerate(request([n])) for n in range(6)])
            assert {reply.output_tokens[0] for reply in replies} == {7, 8}
            servers[1].hides = True
            await asyncio.to_thread(publish, engine, root, 3)
            assert engine.servers == [first]
            replies = await asyncio.gather(*[engine.agenerate(request([n])) for n in range(6)])
            assert [reply.output_tokens for reply in replies] == [[7]] * 6
            assert {v for reply in replies for v in reply.output_versions} == {3}

            servers[1].hides = False
            await asyncio.to_thread(engine.join, second)  # with the weights, before any request
            orders = [order for order in servers[1].orders if order != "/health"]
            loading = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
            assert orders == loading
            await asyncio.to_thread(engine.leave, first)
            reply = await engine.agenerate(request())
            assert reply.output_tokens == [8] and reply.output_versions == [3]


async def test_what_a_stock_server_cannot_do_is_said():
    async with engine_of(ScriptedServer(never)) as engine:
        with pytest.raises(NotImplementedError, match="a SGLang server cannot leave its device"):
            engine.offload()
        with pytest.raises(RuntimeError, match="would not learn of weight updates"):
            pickle.dumps(engine)


async def test_destroy_cancels_those_who_wait():
    async with engine_of(ScriptedServer(never)) as engine:
        task = asyncio.create_task(engine.agenerate(request()))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(engine.destroy)
        await asyncio.to_thread(engine.destroy)
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("options", [{"stop": ["x"]}, {"frequency_penalty": 0.5}])
async def test_a_request_whose_meaning_depends_on_its_start_starts_over(options):
    server = ScriptedServer(lambda body: answer([7, 8], "abort"), lambda body: answer([9]))
    async with engine_of(server) as engine:
        reply = await engine.agenerate(request(seed=10, **options))
    assert reply.output_tokens == [9] and reply.stop_reason == "stop"
    assert server.seen[0] == server.seen[1]


async def test_an_abort_at_the_last_token_is_an_end_by_length():
    server = ScriptedServer(lambda body: answer([7, 8], "abort"))
    async with engine_of(server) as engine:
        reply = await engine.agenerate(request(max_new_tokens=2))
    assert reply.output_tokens == [7, 8] and reply.stop_reason == "length"
    assert len(server.seen) == 1


def sglang_event(tokens, reason=None, count=None):
    """All tokens so far, or with their `count` the newest of them."""
    finish = {"finish_reason": reason and {"type": reason}}
    finish |= {} if count is None else {"completion_tokens": count}
    pairs = [[-0.5, token, None] for token in tokens]
    return {"meta_info": {**finish, "output_token_logprobs": pairs}}


def vllm_event(tokens, reason=None):
    logprobs = {"token_logprobs": [-0.5] * len(tokens)} if tokens else None
    return {"choices": [{"token_ids": tokens, "logprobs": logprobs, "finish_reason": reason}]}


EVENTS = {
    "all so far": (
        SGLangProtocol,
        [sglang_event([7]), sglang_event([7, 8]), sglang_event([7, 8, 9], "stop")],
    ),
    "the newest": (
        SGLangProtocol,
        [sglang_event([7], count=1), sglang_event([8], count=2), sglang_event([9], "stop", 3)],
    ),
    "vllm": (
        VLLMProtocol,
        [
            *(vllm_event([]), vllm_event([7]), vllm_event([8]), vllm_event([9], "stop")),
            {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}},
        ],
    ),
}


@pytest.mark.parametrize("kind", EVENTS)
async def test_tokens_are_told_while_the_server_samples(kind):
    protocol, events = EVENTS[kind]

    async def script(body):
        assert body["stream"] is True
        for event in events:
            yield event
            if "usage" not in event and event != vllm_event([]):
                await asyncio.wait_for(told.begun.wait(), 20)  # before the next one is there
                told.begun.clear()
        yield "[DONE]"

    asked = request()
    told = Told(asked)
    async with engine_of(ScriptedServer(script), protocol=protocol) as engine:
        reply = await engine.agenerate(asked)
    assert reply.output_tokens == told.tokens == [7, 8, 9] and told.num_calls == 3
    assert reply.output_logprobs == told.logprobs == [-0.5] * 3
    assert reply.stop_reason == "stop" and reply.output_versions == [0] * 3
    assert reply.cached_tokens == (2 if kind == "vllm" else 0)


@pytest.mark.parametrize("event", [None, "nonsense", {"usage": 3}], ids=["cut", "no JSON", "odd"])
async def test_what_comes_after_the_end_of_a_stream_cannot_spoil_it(event):
    async def script(body):
        assert body["stream_options"] == {"include_usage": True}
        yield vllm_event([7], "stop")
        yield event

    asked = request()
    told = Told(asked)
    server = ScriptedServer(script)
    async with engine_of(server, protocol=VLLMProtocol) as engine:
        reply = await engine.agenerate(asked)
    assert reply.output_tokens == told.tokens == [7] and reply.stop_reason == "stop"
    assert reply.cached_tokens == 0 and len(server.seen) == 1


async def test_who_does_not_listen_is_sent_no_stream():
    server = ScriptedServer(lambda body: answer([7]))
    async with engine_of(server) as engine:
        await engine.agenerate(request())
    assert server.seen[0]["stream"] is False


@pytest.mark.parametrize(
    "event",
    [None, {"meta_info": None}, "nonsense", sglang_event([256]), sglang_event([7, 8], "abort")],
    ids=["cut", "malformed", "no JSON", "no token", "abort"],
)
@pytest.mark.parametrize("options", [{}, {"stop": ["x"]}])
async def test_what_was_told_is_continued_whatever_happens(event, options):
    """Nobody can take it back: also where a request without a listener would start over."""

    async def break_off(body):
        yield sglang_event([7])
        yield sglang_event([7, 8])
        yield event

    async def go_on(body):
        yield sglang_event([9], "stop")

    asked = request(seed=10, **options)
    told = Told(asked)
    server = ScriptedServer(break_off, go_on)
    async with engine_of(server, vocab_size=256) as engine:
        reply = await engine.agenerate(asked)
    assert told.tokens == reply.output_tokens == [7, 8, 9]
    assert server.seen[1]["input_ids"] == [2, 3, 7, 8]
    assert server.seen[1]["sampling_params"]["max_new_tokens"] == 2


async def test_an_error_in_a_stream_is_the_servers():
    async def script(body):
        yield sglang_event([7])
        yield {"error": {"message": "boom"}}

    asked = request()
    Told(asked)
    async with engine_of(ScriptedServer(script)) as engine:
        with pytest.raises(ServerError, match="SGLang server .*: boom"):
            await engine.agenerate(asked)


async def test_a_stream_that_is_refused():
    server = ScriptedServer(lambda body: web.json_response({"error": "too long"}, status=400))
    asked = request()
    told = Told(asked)
    async with engine_of(server) as engine:
        with pytest.raises(ValueError, match="refused the request: too long"):
            await engine.agenerate(asked)
    assert not told.tokens


async def test_a_cancelled_stream_closes_its_connection():
    left = asyncio.Event()

    async def script(body):
        try:
            for count in range(1, 100_000):
                yield sglang_event([7], count=count)
                await asyncio.sleep(0.001)
        finally:
            left.set()

    asked = request(max_new_tokens=100_000, max_tokens=200_000)
    told = Told(asked)
    async with engine_of(ScriptedServer(script)) as engine:
        task = asyncio.create_task(engine.agenerate(asked))
        await told.begun.wait()
        task.cancel()
        await asyncio.wait_for(left.wait(), 20)
        num_told = told.num_calls
        await asyncio.sleep(0.05)
        assert told.num_calls == num_told
