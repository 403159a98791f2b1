"""Native servers: their protocol, and how to start one.

    child, address = launch_native_server(path, token=token)
    engine = NativeRemoteEngine([address], token)
    engine.initialize()
    reply = await engine.agenerate(ModelRequest(input_ids=[5, 7]))
    engine.destroy()
    child.terminate()

One exchange carries hundreds of requests, and its reply is a stream of frames (native/frames.py).
The samples of a group are one entry of the request (native/wire.py), and answered together. The
server reports the tokens of long outputs at intervals, so that a request that loses its server
continues elsewhere with them; with a seed it gets the same tokens. With `on_tokens` it reports each
token. Weights are loaded between two
steps of the server, and each token carries the version that sampled it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from areal.api.io_struct import ModelRequest, WeightUpdateMeta, check_logprobs
from areal.engine.native.frames import (
    FRAMES,
    FrameReader,
    LineReader,
    Named,
    Result,
    runs_of,
    versions_of,
)
from areal.engine.native.sequence import GenRequest, Progress
from areal.engine.native.wire import (
    BadLineError,
    Entry,
    Refusal,
    check_supported,
    encode_entries,
    entry_of,
)
from areal.engine.remote.engine import RemoteEngine
from areal.engine.remote.native_process import launch_native_server as launch_native_server
from areal.engine.remote.protocol import (
    Draft,
    DraftsByRid,
    Results,
    ServerProtocol,
    WeightOrder,
    bad_reply,
)
from areal.engine.remote.server_control import (
    ControlClient,
    ServerEndedError,
    ServerError,
    ServerRefusedError,
    error_text,
)
from areal.weight_sync.collective import GroupPlace

if TYPE_CHECKING:
    import aiohttp

    from areal.weight_sync.bucket import Checksums

_PROBE_TOKENS = range(9)  # every vocabulary has them
PROGRESS_TOKENS = 64  # most tokens of a request that are lost with its server


class NativeProtocol(ServerProtocol):
    kind = "native server"
    batches = True
    versions_tokens = True
    weight_types = ("shm", "disk", "ipc", "delta", "xccl")
    offloads = True

    def __init__(self, *, return_routed_experts: bool = False) -> None:
        """`return_routed_experts`: replies have the experts of their tokens (router replay)."""
        self._return_routed_experts = return_routed_experts

    def check_request(self, request: ModelRequest) -> None:
        check_supported(request)

    async def generate(
        self, session: aiohttp.ClientSession, address: str, drafts: DraftsByRid, version: int
    ) -> Results:
        body = encode_entries(self._entries(drafts))
        url = f"http://{address}/generate"
        async with session.post(url, data=body, headers={"Accept": FRAMES}) as answer:
            if answer.status != 200:
                raise self._error(address, answer.status, await answer.text())
            reader = FrameReader() if answer.content_type == FRAMES else LineReader()
            async for chunk in answer.content.iter_any():
                yield self._results(address, drafts, reader.feed(chunk))

    async def abort(self, session: aiohttp.ClientSession, address: str, rid: str) -> None:
        async with session.post(f"http://{address}/abort", json={"rid": rid}):
            pass

    def pause(self, control: ControlClient) -> None:
        control.post("/pause")

    def resume(self, control: ControlClient) -> None:
        control.post("/continue")

    def weight_order(self, meta: WeightUpdateMeta) -> WeightOrder:
        place = {"path": meta.path, "key": meta.key}
        return {**place, **_update_of(meta)}

    def load_weights(self, control: ControlClient, order: WeightOrder) -> None:
        control.post("/update_weights", **order)

    def load_delta(self, control: ControlClient, meta: WeightUpdateMeta) -> bool:
        if self.served_version(control) == meta.version:  # already loaded from the delta
            return True
        try:
            control.post("/update_weights", kind="delta", **self.weight_order(meta))
        except ServerRefusedError as err:
            if err.status != 409:
                raise
            return False
        return True

    def group_devices(self, control: ControlClient) -> list[str]:
        """One process of a server is in the group, and passes the weights to its other ranks."""
        return [control.get("/health")["device"]]

    def join_group(self, control: ControlClient, place: GroupPlace) -> None:
        control.post("/init_weights_group", **asdict(place))

    def receive(self, control: ControlClient, group: str, meta: WeightUpdateMeta) -> None:
        control.post("/update_weights", kind="xccl", group=group, **_update_of(meta))

    def load_adapter(self, control: ControlClient, name: str, folder: str) -> list[str]:
        control.post("/v1/load_lora_adapter", lora_name=name, lora_path=folder)
        return [name]

    def unload_adapter(self, control: ControlClient, name: str) -> None:
        control.post("/v1/unload_lora_adapter", lora_name=name)

    def served_version(self, control: ControlClient) -> int:
        version = control.get("/health").get("version")
        if type(version) is not int or version < 0:
            raise ServerError(f"{self.kind} {control.address}: no version is {version!r:.60}")
        return version

    def served_model(self, control: ControlClient) -> str | None:
        return control.get("/health").get("model")

    def identify(self, control: ControlClient) -> str:
        self.served_version(control)
        return control.get("/health")["model"]

    def score(self, control: ControlClient, sequences: list[list[int]]) -> list[list[float]]:
        scores = control.post("/score", sequences=sequences).get("logprobs")
        try:
            if not isinstance(scores, list) or len(scores) != len(sequences):
                raise ValueError(f"logprobs: expected {len(sequences)} lists, got {scores!r:.60}")
            for sequence, its_scores in zip(sequences, scores, strict=True):
                check_logprobs(its_scores, low=-math.inf)
                if len(its_scores) != len(sequence):
                    raise ValueError(f"logprobs: {len(its_scores)} came for {len(sequence)} tokens")
        except ValueError as err:
            raise bad_reply(self.kind, control.address, err) from err
        return scores

    def weight_checksums(self, control: ControlClient) -> Checksums:
        found = control.get("/weight_checksums").get("weights")
        try:
            if not isinstance(found, dict):
                raise ValueError(f"expected an object, got {found!r:.60}")
            return {name: (str(dtype), int(number)) for name, (dtype, number) in found.items()}
        except (ValueError, TypeError) as err:
            raise bad_reply(self.kind, control.address, f"weights: {err}") from err

    def probe(self, control: ControlClient, version: int | None) -> list[tuple[int, float]]:
        (scores,) = self.score(control, [list(_PROBE_TOKENS)])
        return list(zip(_PROBE_TOKENS[1:], scores[1:], strict=True))

    def layer_trace(self, control: ControlClient, tokens: list[int]) -> dict[str, Any]:
        trace = control.post("/layer_trace", tokens=tokens)
        for key in ("layers", "experts", "args"):
            if not isinstance(trace.get(key), dict):
                raise bad_reply(self.kind, control.address, f"{key}: expected an object")
        return trace

    def offload(self, control: ControlClient, tags: Sequence[str] | None) -> None:
        control.post("/offload", **_tags(tags))

    def onload(self, control: ControlClient, tags: Sequence[str] | None) -> None:
        control.post("/onload", **_tags(tags))

    def stats(self, control: ControlClient) -> dict[str, float]:
        return control.get("/stats")

    def busy_intervals(self, control: ControlClient, since: float) -> list[tuple[float, float]]:
        answer = control.get("/busy_intervals", since=since)
        return [(start, end) for start, end in answer["intervals"]]

    def _results(
        self, address: str, drafts: DraftsByRid, found: Iterator[Named]
    ) -> Iterator[tuple[str, Result | Exception]]:
        try:
            for rid, one in found:
                yield rid, self._read(address, drafts.get(rid), one)
        except ValueError as err:  # not attributable to one request
            raise bad_reply(self.kind, address, err) from err

    def _read(
        self, address: str, draft: Draft | None, found: Result | Refusal | BadLineError
    ) -> Result | Exception:
        """What was said of a request, whose draft is None if nobody sent it."""
        if isinstance(found, BadLineError):
            return bad_reply(self.kind, address, found)
        if isinstance(found, Refusal):
            if found.kind == "request":
                return ValueError(found.message)
            return ServerError(f"{self.kind} {address}: {found.message}")
        if found.stop_reason is None:
            return found
        if draft is None:
            return bad_reply(self.kind, address, "nobody sent this request")
        if self._return_routed_experts and (fault := _fault_of_experts(draft, found)):
            return bad_reply(self.kind, address, fault)
        if not len(draft.tokens):
            return found
        fault = "output_tokens: expected those told before, at the beginning"
        return _rest_of(draft, found) or bad_reply(self.kind, address, fault)

    def _entries(self, drafts: DraftsByRid) -> Iterator[Entry]:
        """One for all samples of a group that have no tokens yet."""
        for _, ((rid, first), *others) in groupby(drafts.items(), key=_group_of):
            further = [(rid, draft.seed) for rid, draft in others]
            yield entry_of(self._wire_request(rid, first), further)

    def _wire_request(self, rid: str, draft: Draft) -> GenRequest:
        so_far = None
        if len(draft.tokens):
            output = draft.tokens.tolist(), draft.logprobs.tolist(), draft.versions.tolist()
            so_far = Progress(rid, *output)
        request = draft.request
        interval = PROGRESS_TOKENS if request.on_tokens is None else 1
        return GenRequest(
            rid,
            request.input_ids,
            draft.gconfig,
            progress_tokens=interval,
            so_far=so_far,
            grammar=request.grammar,
            return_routed_experts=self._return_routed_experts,
            image_data=request.image_data,
        )

    def _error(self, address: str, status: int, body: str) -> Exception:
        message = error_text(body)
        if status == 400:
            return ValueError(message)
        fault = f"{self.kind} {address}: {status}: {message}"
        return ServerEndedError(fault, status) if status == 503 else ServerError(fault)


def _group_of(sample: tuple[str, Draft]) -> str:
    rid, draft = sample
    return rid if len(draft.tokens) else draft.group or rid


def _fault_of_experts(draft: Draft, found: Result) -> str:
    """Each token but the last has its experts."""
    if found.stop_reason == "abort":
        return ""
    count = 0 if found.routed_experts is None else len(found.routed_experts)
    expected = len(draft.request.input_ids) + len(found.tokens) - 1
    if count == expected:
        return ""
    return f"routed_experts: expected those of {expected} tokens, got {count}"


def _rest_of(draft: Draft, found: Result) -> Result | None:
    """What a final reply, which has the whole output, adds to a draft; None if it is another."""
    versions, known = versions_of(found.runs), len(draft.tokens)
    if not (
        np.array_equal(found.tokens[:known], draft.tokens)
        and np.array_equal(versions[:known], draft.versions)
    ):
        return None
    runs = runs_of(versions[known:].tolist())
    return replace(found, tokens=found.tokens[known:], logprobs=found.logprobs[known:], runs=runs)


def _update_of(meta: WeightUpdateMeta) -> WeightOrder:
    order: WeightOrder = {"version": meta.version, "recompute_kv": meta.recompute_kv}
    if meta.use_lora:
        order["adapter"] = {"name": meta.lora_name, "alpha": meta.lora_alpha}
    return order


def _tags(tags: Sequence[str] | None) -> dict[str, list[str]]:
    return {} if tags is None else {"tags": list(tags)}


class NativeRemoteEngine(RemoteEngine):
    """A client of native servers; further `options` are those of `RemoteEngine`."""

    def __init__(
        self, addrs: list[str], token: str, *, return_routed_experts: bool = False, **options: Any
    ) -> None:
        protocol = NativeProtocol(return_routed_experts=return_routed_experts)
        super().__init__(protocol, addrs, token, **options)
