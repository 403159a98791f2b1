"""The HTTP server of a native engine.

| route                    | body or query                       | answer                          |
|--------------------------|-------------------------------------|---------------------------------|
| POST /generate           | see wire.py                         | JSON lines of progress, results;|
|                          |                                     | frames.py if the client accepts |
| POST /score              | sequences: lists of token ids       | logprobs of them, version       |
| POST /layer_trace        | tokens: ids of one sequence         | what each layer computes        |
| GET /weight_checksums    |                                     | dtype and checksum by name      |
| /v1/..., /inference/...  | see openai_routes.py                | as the APIs of OpenAI,          |
|                          |                                     | Anthropic and vLLM              |
| POST /pause              |                                     | when no step runs any more      |
| POST /continue           |                                     |                                 |
| POST /abort              | rid, or all=true                    | the number of requests ended    |
| POST /offload            | tags: weights, kv_cache; or all     | when their memory is free       |
| POST /onload             | likewise                            | when they are back              |
| GET /health              |                                     | status, version, model, paused, |
|                          |                                     | device                          |
| GET /stats               |                                     | the engine's counters           |
| GET /busy_intervals      | ?since=UNIX_TIME                    | when steps ran, for traces      |
| POST /init_weights_group | name, host, port, rank, world_size, | when all joined                 |
|                          | backend, timeout_s                  |                                 |
| POST /update_weights     | kind=folder or delta: path, key=""; | when they are live              |
|                          | kind=xccl: group; version,          |                                 |
|                          | recompute_kv=true, adapter: name,   |                                 |
|                          | alpha, where it is one              |                                 |
| POST /v1/load_lora_adapter| lora_name, lora_path: a PEFT folder| when requests can name it       |
| POST /v1/unload_lora_adapter | lora_name                       | when it is gone                 |
| GET /openapi.json        |                                     | all of this, with body schemas  |

Every route requires `Authorization: Bearer TOKEN` or `x-api-key: TOKEN`. Errors are
`{"error": "..."}` (under /v1 the object of OpenAI or Anthropic instead of the text): 400 invalid
request, 401 no or a wrong token, 409 the base of a delta or the group is missing, 502 the group
broke, 503 the engine has ended. The engine never waits for the network: results are passed to this
event loop (`loop.Receiver`), and a client disconnect discards its requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field, model_validator
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Scope

from areal.engine.native import inspection
from areal.engine.native.frames import FRAMES, encode_frames
from areal.engine.native.loop import EngineEndedError, EngineLoop, Receiver, Result
from areal.engine.native.openai_routes import add_openai_routes
from areal.engine.native.sequence import GenRequest, Progress
from areal.engine.native.tokenizer import ModelText
from areal.engine.native.weight_loader import (
    Kind,
    LoraUpdate,
    WeightLoader,
    WeightUpdate,
    WrongGroupError,
)
from areal.engine.native.wire import GenerateBody, Refusal, TokenId, decode_requests, encode_lines
from areal.engine.remote.token_gate import WRONG_TOKEN, TokenGate
from areal.openai.apis import error_for
from areal.openai.errors import WireError
from areal.utils.chat_template import TemplateLimitError
from areal.utils.device import device_identity
from areal.utils.http_body import (
    Body,
    ClosedBody,
    Expect,
    Integer,
    Items,
    Text,
    json_body,
    parse_json,
    wrong,
)
from areal.utils.http_server import (
    SILENCE_S,
    JsonReply,
    OneV1,
    new_app,
    read_body,
    trust,
)
from areal.weight_sync.collective import GroupError, GroupPlace
from areal.weight_sync.delta import WrongBaseError
from areal.weight_sync.publication import PublicationError

_Form = tuple[str, Callable[[Iterable[Result]], bytes]]  # of a reply: content type, encoder
_FORMS: dict[bool, _Form] = {  # by whether the client accepts frames
    False: ("application/x-ndjson", encode_lines),
    True: (FRAMES, encode_frames),
}
_STATUS_OF_ERROR = {
    ValueError: 400,
    PublicationError: 400,
    WrongBaseError: 409,
    WrongGroupError: 409,
    GroupError: 502,
    EngineEndedError: 503,
    TemplateLimitError: 500,
    Exception: 500,
}


_MAX_TRACED = 1024  # tokens: a trace has two numbers for each in every layer
_MAX_SCORED = 65_536  # sequences; more take long to read, and hold up other requests
_MAX_TEXT = 4096  # characters: the longest path of Linux
_MAX_WORLD = 1 << 16
_MAX_VERSION = (1 << 31) - 1  # trajectories store versions as int32
_MAX_TIMEOUT_S = 86_400
_PLACE = f"1 to {_MAX_TEXT} characters, none of them NUL"
Place = Annotated[
    str, Field(min_length=1, max_length=_MAX_TEXT, pattern=r"^[^\x00]*$"), Expect(_PLACE)
]


class ScoreBody(Body):
    sequences: Annotated[Items[Items[TokenId]], Field(min_length=1, max_length=_MAX_SCORED)]


class TraceBody(Body):
    tokens: Annotated[Items[TokenId], Field(min_length=1, max_length=_MAX_TRACED)]


class AbortBody(Body):
    rid: Text = ""
    all: bool = False

    @model_validator(mode="after")
    def _names_requests(self) -> AbortBody:
        if not self.all and "rid" not in self.model_fields_set:
            raise wrong("rid", "a text, or all=true instead")
        return self


class PartsBody(Body):
    tags: Items[Literal["weights", "kv_cache"]] | None = None  # None: all


class GroupBody(Body):
    name: Place
    host: Place
    port: Annotated[int, Integer(1, 65535)]
    world_size: Annotated[int, Integer(2, _MAX_WORLD)]
    rank: Annotated[int, Integer(1)]  # 0 sends
    backend: Literal["nccl", "gloo"]
    timeout_s: Annotated[
        float,
        Field(gt=0, le=_MAX_TIMEOUT_S),
        Expect(f"seconds, above 0 and at most {_MAX_TIMEOUT_S}"),
    ]

    @model_validator(mode="after")
    def _has_rank(self) -> GroupBody:
        if self.rank >= self.world_size:
            raise wrong("rank", f"an integer from 1 to {self.world_size - 1}")
        return self


class LoraBody(ClosedBody):
    name: Place
    alpha: Annotated[float, Field(gt=0), Expect("a number above 0")]


class AdapterBody(Body):
    lora_name: Place
    lora_path: Place


class AdapterName(Body):
    lora_name: Place


class UpdateBody(Body):
    """`path` for folder and delta, `group` for xccl."""

    kind: Kind = "folder"
    path: Place = ""
    group: Place = ""
    key: Annotated[str, Field(max_length=_MAX_TEXT), Expect(f"at most {_MAX_TEXT} characters")] = ""
    version: Annotated[int, Integer(0, _MAX_VERSION)]
    recompute_kv: bool = True
    adapter: LoraBody | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_place(cls, content: Any) -> Any:
        kind = content.get("kind", "folder")
        place = "group" if kind == "xccl" else "path"
        if place not in content and kind in get_args(Kind):
            raise wrong(place, _PLACE)
        return content


def create_app(
    loop: EngineLoop,
    token: str,
    *,
    model: str,
    folder: str | Path | None = None,
    silence_s: float = SILENCE_S,
    image_folders: Sequence[str | Path] = (),
) -> FastAPI:
    """`model` is its name in /health and /v1/models; `folder` (default: `model`) has its files.

    A stream of events without news gets a keep-alive every `silence_s`. `image_folders`: `file:`
    URLs of images below these are read.
    """
    app = new_app(title="areal native server")
    app.add_middleware(_TokenGate, token=token)
    app.add_middleware(OneV1)
    app.exception_handler(HTTPException)(_answer_no_route)
    for kind, status in _STATUS_OF_ERROR.items():
        app.add_exception_handler(kind, _answer_error(status))
    text = ModelText(folder or model, image_folders=image_folders)
    add_openai_routes(app, loop, text, model=model, silence_s=silence_s)
    app.state.weights = WeightLoader(loop)  # to be closed with the app
    add_weight_routes(app, app.state.weights)
    add_adapter_routes(app, loop)
    add_control_routes(app, loop)
    add_watch_routes(app, loop, model=model)

    @app.post("/generate", openapi_extra=json_body(GenerateBody))
    async def generate(request: Request) -> Response:
        items = decode_requests(await read_body(request))
        form = _FORMS[request.headers.get("accept") == FRAMES]
        return _ResultStream(loop, await _prepared(items, text), form)

    @app.post("/score", openapi_extra=json_body(ScoreBody))
    async def score(request: Request) -> dict[str, Any]:
        sequences = parse_json(ScoreBody, await read_body(request), check_numbers=False).sequences
        scored, version = await asyncio.wrap_future(
            loop.call(lambda engine: (engine.score(sequences), engine.version))
        )
        return {"logprobs": [one.logprobs for one in scored], "version": version}

    @app.post("/layer_trace", openapi_extra=json_body(TraceBody))
    async def layer_trace(request: Request) -> dict[str, Any]:
        tokens = parse_json(TraceBody, await read_body(request), check_numbers=False).tokens
        return await asyncio.wrap_future(loop.call(partial(inspection.layer_trace, tokens=tokens)))

    @app.get("/weight_checksums")
    async def weight_checksums() -> dict[str, Any]:
        found = loop.call(inspection.weight_checksums)
        return {"weights": await asyncio.wrap_future(found)}

    return app


async def _prepared(
    items: list[GenRequest | Refusal], text: ModelText
) -> list[GenRequest | Refusal]:
    """Requests ready for the engine; those with unusable stop strings, grammars or images are
    refused."""

    def has_to_prepare(item: GenRequest | Refusal) -> bool:
        return isinstance(item, GenRequest) and text.has_to_prepare(item)

    def prepared(item: GenRequest | Refusal) -> GenRequest | Refusal:
        if isinstance(item, Refusal):
            return item
        try:
            return text.prepare(item)
        except ValueError as err:
            return Refusal(item.rid, "request", str(err))

    if not any(map(has_to_prepare, items)):
        return items
    # In a thread: loading the tokenizer takes seconds, and so may a grammar or an image.
    return await asyncio.to_thread(lambda: [prepared(item) for item in items])


class _TokenGate(TokenGate):
    async def admit(self, scope, receive, send) -> None:
        trust(scope)
        await super().admit(scope, receive, send)

    async def refuse(self, scope, receive, send) -> None:
        await _error(scope, 401, WRONG_TOKEN)(scope, receive, send)


class _ResultStream(Response):
    """Submits requests and streams their results; a client disconnect discards them.

    The first results decide the status: 400 or 503 if they are nothing but refusals.
    """

    def __init__(self, loop: EngineLoop, items: list[GenRequest | Refusal], form: _Form) -> None:
        super().__init__()
        self._engine = loop
        self._form = form
        self._requests = [item for item in items if isinstance(item, GenRequest)]
        self._refused = [item for item in items if isinstance(item, Refusal)]

    async def __call__(self, scope, receive, send) -> None:
        async with Receiver(self._engine, receive) as receiver:
            receiver.submit(self._requests, self._refused)
            results = await receiver.next()
            if results is None:
                return
            if not receiver.unfinished and (fault := _common_fault(results)):
                status = 400 if fault.kind == "request" else 503
                await JsonReply({"error": fault.message}, status)(scope, receive, send)
                return
            content_type, encode = self._form
            headers = [(b"content-type", content_type.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            hold = _GroupHold(self._requests)
            while results is not None:
                more = bool(receiver.unfinished)
                body = encode(hold.release(results))
                if body or not more:
                    await send({"type": "http.response.body", "body": body, "more_body": more})
                results = await receiver.next() if more else None


class _GroupHold:
    """Keeps the results of a group until its last one: one message instead of one per sample."""

    def __init__(self, requests: list[GenRequest]) -> None:
        self._group_of = {one.rid: one.group for one in requests if one.group}
        self._num_missing = Counter(self._group_of.values())
        self._held: dict[str, list[Result]] = {group: [] for group in self._num_missing}

    def release(self, results: list[Result]) -> list[Result]:
        """The results that may be sent now."""
        released: list[Result] = []
        for result in results:
            group = self._group_of.get(result.rid)
            if isinstance(result, Progress):
                if not result.is_broken:
                    released.append(result)
            elif group is None:
                released.append(result)
            else:
                self._held[group].append(result)
                self._num_missing[group] -= 1
                if self._num_missing[group] == 0:
                    released += self._held.pop(group)
        return released


def _common_fault(results: list[Result]) -> Refusal | None:
    """The first refusal, if there is nothing else."""
    refusals = [result for result in results if isinstance(result, Refusal)]
    return refusals[0] if len(refusals) == len(results) else None


def _answer_error(status: int):
    async def answer(request: Request, err: Exception) -> Response:
        return _error(request.scope, status, str(err))

    return answer


async def _answer_no_route(request: Request, err: HTTPException) -> Response:
    message = f"{request.method} {request.scope['path']}: {err.detail}"
    return _error(request.scope, err.status_code, message)


def _error(scope: Scope, status: int, message: str) -> Response:
    """An error in the shape that clients of this route expect."""
    path, content = scope["path"], {"error": message}
    if path.startswith(("/v1/", "/inference/")):
        content = error_for(path, Headers(scope=scope), WireError(status, message))
    return JsonReply(content, status_code=status)


def add_control_routes(app: FastAPI, loop: EngineLoop) -> None:
    @app.post("/pause")
    async def pause() -> dict[str, bool]:
        await asyncio.to_thread(loop.pause)
        return {"paused": True}

    @app.post("/continue")
    async def resume() -> dict[str, bool]:
        await asyncio.to_thread(loop.resume)
        return {"paused": False}

    @app.post("/abort", openapi_extra=json_body(AbortBody))
    async def abort(request: Request) -> dict[str, int]:
        body = parse_json(AbortBody, await read_body(request))
        return {"aborted": await asyncio.wrap_future(loop.abort(None if body.all else [body.rid]))}

    @app.post("/offload", openapi_extra=json_body(PartsBody, required=False))
    async def offload(request: Request) -> dict[str, bool]:
        tags = parse_json(PartsBody, await read_body(request) or b"{}").tags
        await asyncio.wrap_future(loop.call(lambda engine: engine.offload(tags)))
        return {"offloaded": True}

    @app.post("/onload", openapi_extra=json_body(PartsBody, required=False))
    async def onload(request: Request) -> dict[str, bool]:
        tags = parse_json(PartsBody, await read_body(request) or b"{}").tags
        await asyncio.wrap_future(loop.call(lambda engine: engine.onload(tags)))
        return {"offloaded": False}


def add_watch_routes(app: FastAPI, loop: EngineLoop, *, model: str) -> None:
    @app.get("/health")
    async def health() -> Response:
        content = {
            "version": loop.version,
            "model": model,
            "paused": loop.paused,
            "device": device_identity(loop.device),
        }
        if loop.failure is not None:
            cause = f"{type(loop.failure).__name__}: {loop.failure}"
            return JsonReply({"status": "failed", "error": cause, **content}, status_code=503)
        return JsonReply({"status": "ok", **content})

    @app.get("/stats")
    async def stats() -> dict[str, float]:
        return loop.stats()

    @app.get("/busy_intervals")
    async def busy_intervals(since: str = "0") -> dict[str, Any]:
        return {"intervals": loop.busy.since(_unix_time(since))}


def _unix_time(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"since: expected seconds, got {text[:60]!r}") from None


def add_weight_routes(app: FastAPI, loader: WeightLoader) -> None:
    @app.post("/init_weights_group", openapi_extra=json_body(GroupBody))
    async def init_weights_group(request: Request) -> dict[str, str]:
        body = parse_json(GroupBody, await read_body(request))
        await asyncio.to_thread(loader.join, GroupPlace(**body.model_dump()))
        return {"group": body.name}

    @app.post("/update_weights", openapi_extra=json_body(UpdateBody))
    async def update_weights(request: Request) -> dict[str, int]:
        body = parse_json(UpdateBody, await read_body(request))
        fields = body.model_dump(exclude={"adapter"})
        adapter = body.adapter and LoraUpdate(body.adapter.name, body.adapter.alpha)
        await asyncio.to_thread(loader.take, WeightUpdate(**fields, adapter=adapter))
        return {"version": body.version}


def add_adapter_routes(app: FastAPI, loop: EngineLoop) -> None:
    @app.post("/v1/load_lora_adapter", openapi_extra=json_body(AdapterBody))
    async def load_lora_adapter(request: Request) -> dict[str, str]:
        body = parse_json(AdapterBody, await read_body(request))
        folder = Path(body.lora_path)
        try:
            await asyncio.wrap_future(
                loop.call(lambda engine: engine.add_adapter(body.lora_name, folder))
            )
        except OSError as err:  # a bad path
            raise ValueError(f"lora_path: {err}") from err
        return {"lora_name": body.lora_name}

    @app.post("/v1/unload_lora_adapter", openapi_extra=json_body(AdapterName))
    async def unload_lora_adapter(request: Request) -> dict[str, str]:
        name = parse_json(AdapterName, await read_body(request)).lora_name
        await asyncio.wrap_future(loop.call(lambda engine: engine.remove_adapter(name)))
        return {"lora_name": name}
