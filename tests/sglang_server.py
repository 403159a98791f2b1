"""A server that speaks SGLang's protocol over real HTTP, with the native engine behind it.

    python sglang_server.py --model-path DIR --port 8000 --config FILE ...

For tests of the adapter where SGLang itself cannot be installed. It takes what SGLang documents and
nothing else (sglang_routes.py), and answers as SGLang 0.5 was seen to: "abort" ends what runs with
the tokens it has and holds what comes later, "in_place" holds it where it is. Weights are updated
only while nothing runs, from a folder or through process groups of torch.distributed. With
--enable-lora it serves adapters, each under a name that is not in use. Started by a script in place
of `python -m sglang.launch_server` (see sglang_python).
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import sglang_routes as routes
import torch
import torch.distributed as dist
import yaml
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from safetensors import safe_open
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from areal.api.config.inference import GenerationHyperparameters
from areal.engine.native.engine import NativeEngine
from areal.engine.native.loop import EngineLoop, Receiver
from areal.engine.native.sequence import Finished, GenRequest, Progress
from areal.engine.native.wire import Refusal
from areal.models.hf_io import weight_files
from areal.utils.addresses import bind
from areal.utils.http_server import serve

SAMPLING = (
    "max_new_tokens",
    "min_new_tokens",
    "top_p",
    "frequency_penalty",
    "stop_token_ids",
    "ignore_eos",
)
GROUP_TIMEOUT = timedelta(seconds=900)
PYTHON = sys.executable


def sglang_python(folder: Path) -> Path:
    """A program to be called like a python with sglang in it; forked in a test that has the
    fixture `forked_children`."""
    script = folder / "python"
    root = Path(__file__).resolve().parents[1]
    client = Path(__file__).with_name("docs_client.py")
    script.write_text(
        "#!/bin/sh\n"
        '[ "$1 $2" = "-m sglang.launch_server" ] || exit 2\n'
        "shift 2\n"
        f'[ "$AREAL_FORKED_CHILDREN" ] && exec "{PYTHON}" -I -S "{client}" "{__file__}" "$@"\n'
        f'PYTHONPATH="{root}" exec "{PYTHON}" "{__file__}" "$@"\n'
    )
    script.chmod(0o755)
    return script


def create_app(loop: EngineLoop, token: str, model_path: str, *, max_lora_rank: int) -> FastAPI:
    app = FastAPI(openapi_url=None)
    numbers = itertools.count()
    adapters: dict[str, str] = {}  # path by name

    @app.middleware("http")
    async def check_key(request: Request, call_next):
        given = request.headers.get("authorization", "")
        if request.url.path != "/health" and not hmac.compare_digest(given, f"Bearer {token}"):
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        return await call_next(request)

    @app.exception_handler(routes.BadRequestError)
    async def refuse(request: Request, error: Exception):
        return JSONResponse({"error": {"message": str(error)}}, status_code=400)

    @app.get("/health")
    async def health():
        return PlainTextResponse("")

    @app.get("/get_model_info")
    async def get_model_info():
        return {"model_path": model_path, "is_generation": True}

    @app.get("/get_server_info")
    async def get_server_info():
        sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 1}
        return {"model_path": model_path, "device": "cpu", "version": "0.5.9", **sizes}

    @app.post("/generate")
    async def generate(request: Request):
        body = await routes.read_body(request, routes.Generate)
        assert body.return_logprob
        if body.sampling_params.max_new_tokens == 0:
            assert body.logprob_start_len == 0, "areal asks for all tokens of the prompt"
            scored = await asyncio.to_thread(loop.call(lambda e: e.score([body.input_ids])).result)
            return prompt_answer(body.input_ids, scored[0].logprobs)
        options = gconfig(body.sampling_params).new(lora_name=body.lora_path or "")
        work = GenRequest(str(next(numbers)), body.input_ids, options)
        if body.stream:
            return _Events(loop, replace(work, progress_tokens=1))
        async with Receiver(loop, request._receive) as receiver:
            receiver.submit([work])
            results = await receiver.next()
        if results is None:
            return PlainTextResponse("the client has left", status_code=499)
        if isinstance(results[0], Refusal):
            return JSONResponse({"error": {"message": results[0].message}}, status_code=400)
        return answer(results[0].finished)

    @app.post("/pause_generation")
    async def pause(request: Request):
        body = await routes.read_body(request, routes.Pause)
        assert body.mode != "retract", "areal does not use it"
        await asyncio.to_thread(loop.pause)
        if body.mode == "abort":
            await asyncio.wrap_future(loop.abort())
        return PlainTextResponse("Generation paused successfully.")

    @app.post("/continue_generation")
    async def resume(request: Request):
        await routes.read_body(request, routes.Continue)
        await asyncio.to_thread(loop.resume)
        return PlainTextResponse("Generation continued successfully.")

    add_weight_routes(app, loop)

    async def change_adapters(change) -> JSONResponse:
        try:
            if not max_lora_rank:
                raise ValueError("LoRA is not enabled.")
            await asyncio.wrap_future(loop.call(change))
        except (OSError, ValueError) as error:
            return JSONResponse({"success": False, "error_message": str(error)}, status_code=400)
        return JSONResponse({"success": True, "loaded_adapters": adapters})

    @app.post("/load_lora_adapter")
    async def load_lora_adapter(request: Request):
        order = await routes.read_body(request, routes.LoadAdapter)
        name, path = order.lora_name, Path(order.lora_path)

        def load(engine: NativeEngine) -> None:
            if json.loads((path / "adapter_config.json").read_text())["r"] > max_lora_rank:
                raise ValueError("its rank is above --max-lora-rank")
            engine.add_adapter(name, path)
            adapters[name] = str(path)

        return await change_adapters(load)

    @app.post("/unload_lora_adapter")
    async def unload_lora_adapter(request: Request):
        name = (await routes.read_body(request, routes.UnloadAdapter)).lora_name

        def unload(engine: NativeEngine) -> None:
            if name not in adapters:
                raise ValueError(f"LoRA adapter {name} is not loaded.")
            engine.remove_adapter(name)
            del adapters[name]

        return await change_adapters(unload)

    @app.get("/metrics")
    async def metrics():
        stats = loop.stats()
        return PlainTextResponse(
            "# HELP sglang:num_running_reqs The number of running requests.\n"
            f'sglang:num_running_reqs{{engine_type="unified"}} {stats["running"]}\n'
            f'sglang:num_queue_reqs{{engine_type="unified"}} {stats["waiting"]}\n'
        )

    return app


def add_weight_routes(app: FastAPI, loop: EngineLoop) -> None:
    groups: dict[str, dist.ProcessGroup] = {}
    staged: dict[str, torch.Tensor] = {}  # of a version that comes in several buckets

    async def load(read: Callable[[], dict[str, torch.Tensor] | None], *, flush: bool):
        """`read` returns the weights to load, or None if more of them follow."""
        if loop.stats()["running"]:
            message = "weights can only be updated while no request runs"
            return JSONResponse({"success": False, "message": message}, status_code=400)
        try:
            weights = await asyncio.to_thread(read)
            if weights is not None:
                await asyncio.wrap_future(
                    loop.call(
                        lambda engine: engine.load_weights(
                            weights.items(), engine.version + 1, recompute_kv=flush
                        )
                    )
                )
        except (OSError, ValueError, RuntimeError) as error:
            return JSONResponse({"success": False, "message": str(error)}, status_code=400)
        return {"success": True, "message": "Succeeded to update model weights."}

    @app.post("/update_weights_from_disk")
    async def from_disk(request: Request):
        order = await routes.read_body(request, routes.UpdateFromDisk)
        folder = Path(order.model_path)
        return await load(lambda: dict(read_weights(folder)), flush=order.flush_cache)

    @app.post("/init_weights_update_group")
    async def init_group(request: Request):
        order = await routes.read_body(request, routes.InitGroup)
        try:
            if order.group_name in groups:
                raise ValueError(f"the group {order.group_name} exists")
            groups[order.group_name] = await asyncio.to_thread(join_group, order)
        except (ValueError, RuntimeError) as error:
            return JSONResponse({"success": False, "message": str(error)}, status_code=400)
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    @app.post("/update_weights_from_distributed")
    async def from_distributed(request: Request):
        order = await routes.read_body(request, routes.UpdateFromDistributed)

        def receive() -> dict[str, torch.Tensor] | None:
            staged.update(receive_weights(groups[order.group_name], order))
            if not order.flush_cache:
                return None
            weights = dict(staged)
            staged.clear()
            return weights

        if order.group_name not in groups:
            message = f"the group {order.group_name} does not exist"
            return JSONResponse({"success": False, "message": message}, status_code=400)
        return await load(receive, flush=True)


def join_group(order: routes.InitGroup) -> dist.ProcessGroup:
    """As any process joins a group of torch.distributed that is not its default one."""
    url = f"tcp://{order.master_address}:{order.master_port}"
    rank, size = order.rank_offset, order.world_size
    store, *_ = next(iter(rendezvous(url, rank, size, timeout=GROUP_TIMEOUT)))
    group, _ = distributed_c10d._new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend(order.backend),
        dist.PrefixStore(order.group_name, store),
        group_name=order.group_name,
        timeout=GROUP_TIMEOUT,
    )
    distributed_c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group


def receive_weights(group: dist.ProcessGroup, order: routes.UpdateFromDistributed):
    for name, dtype, shape in zip(order.names, order.dtypes, order.shapes, strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(tensor, src=0, group=group)
        yield name, tensor


class _Events(Response):
    """An event per step, each with all tokens so far."""

    def __init__(self, loop: EngineLoop, work: GenRequest) -> None:
        super().__init__()
        self._loop = loop
        self._work = work

    async def __call__(self, scope, receive, send) -> None:
        tokens, logprobs, begun = [], [], False
        async with Receiver(self._loop, receive) as receiver:
            receiver.submit([self._work])
            while receiver.unfinished and (results := await receiver.next()) is not None:
                content = None
                for one in results:
                    if isinstance(one, Refusal):
                        error = {"error": {"message": one.message}}
                        return await JSONResponse(error, status_code=400)(scope, receive, send)
                    if isinstance(one, Progress):
                        tokens, logprobs = tokens + one.tokens, logprobs + one.logprobs
                        content = answer(Finished(one.rid, tokens, logprobs, [], None))
                    else:
                        content = answer(one.finished)
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": []})
                    begun = True
                body = f"data: {json.dumps(content)}\n\n".encode()
                await send({"type": "http.response.body", "body": body, "more_body": True})
        if begun:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def gconfig(sampling: routes.SamplingParams) -> GenerationHyperparameters:
    options = {name: getattr(sampling, name) for name in SAMPLING}
    if sampling.temperature == 0:
        options["greedy"] = True
    else:
        options["temperature"] = sampling.temperature
    if sampling.top_k != -1:
        options["top_k"] = sampling.top_k
    return GenerationHyperparameters(**options, seed=sampling.sampling_seed)


def answer(finished) -> dict:
    pairs = zip(finished.output_logprobs, finished.output_tokens, strict=True)
    return {
        "text": "",
        "output_ids": finished.output_tokens,
        "meta_info": {
            "finish_reason": finished.stop_reason and {"type": finished.stop_reason},
            "completion_tokens": len(finished.output_tokens),
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
        },
    }


def prompt_answer(tokens: list[int], logprobs: list[float]) -> dict:
    """Of a request that generates nothing; nothing precedes the first token."""
    told = [[None, tokens[0], None]]
    told += [[p, token, None] for p, token in zip(logprobs, tokens[1:], strict=False)]
    info = {"finish_reason": {"type": "length", "length": 0}, "completion_tokens": 0}
    info |= {"input_token_logprobs": told, "output_token_logprobs": []}
    return {"text": "", "output_ids": [], "meta_info": info}


def read_weights(folder: Path):
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                yield name, tensors.get_tensor(name)


def read_private(file: Path) -> dict:
    """Options in a YAML file, as SGLang's `--config` takes them."""
    assert file.suffix == ".yaml" and file.stat().st_mode & 0o077 == 0
    return yaml.safe_load(file.read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model-path", "host", "config", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-lora-rank", type=int)
    parser.add_argument("--lora-target-modules", nargs="+")
    args, _ = parser.parse_known_args()
    assert args.enable_lora == bool(args.max_lora_rank and args.lora_target_modules)
    api_key = read_private(Path(args.config))["api-key"]
    torch.set_num_threads(1)
    with bind(args.host, args.port) as listener:
        engine = NativeEngine.from_pretrained(args.model_path, dtype=torch.float32)
        loop = EngineLoop(engine)
        app = create_app(loop, api_key, args.model_path, max_lora_rank=args.max_lora_rank or 0)
        serve(app, listener, on_ready=lambda: None)
        loop.close()


if __name__ == "__main__":
    main()
