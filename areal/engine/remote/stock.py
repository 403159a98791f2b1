"""What stock servers (vLLM, SGLang) share: one POST per request, and weights from a folder.

A stock server cannot say which weights produced a token. So an update aborts in-flight requests
(the server returns the tokens so far), loads, and lets them continue from these tokens: the prefix
is recomputed with the new weights. A request that depends on where its output began (`stop`
strings, a frequency or presence penalty, a grammar), or whose prompt the server makes from images,
starts over instead.

    first request   prompt                      seed s          -> tokens a b, abort
    continuation    prompt a b, budget less 2   seed s + 2      -> tokens c, stop

A request with `on_tokens` is answered as server-sent events. What its caller was told cannot be
taken back, so it always continues: the penalty then counts anew, and a stop string across the
interruption is not seen by the server.

Where adapters travel alone, each version is an adapter of its own name, which requests name: the
server keeps no cache of another version for them. The former one is unloaded.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import (
    HttpGenerationResult,
    HttpRequest,
    ModelRequest,
    WeightUpdateMeta,
    check_amount,
    check_logprobs,
)
from areal.api.json_text import loads_object
from areal.engine.native.frames import Result
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
    ServerError,
    ServerRefusedError,
    error_text,
)
from areal.models import vision_args
from areal.models.lora_files import write_peft
from areal.utils.device import best_device
from areal.utils.fs import atomic_folder
from areal.utils.hub import model_folder
from areal.utils.images import ImageError, check_encoded, image_bytes
from areal.utils.model_files import CONFIG_FILE, read_hf_config
from areal.weight_sync.hf_folder import find_hf_folder, hf_folder_of
from areal.weight_sync.publication import open_publication

NO_TOP_K = GenerationHyperparameters().top_k  # the default, which means no limit
_SEED_END = 1 << 63
_NEVER = -100.0  # the least bias that servers take: a factor of e**-100
_MAX_REPLY = 256 << 20  # bytes
_PEFT_FOLDER = "peft"  # in the folder of a publication
_SCORED_AT_ONCE = 64  # sequences; the server batches them


class StockProtocol(ServerProtocol):
    """`model_path` is the folder or hub name of the model that the servers started from.

    With `lora_name` an update brings an adapter of that model alone (`meta.use_lora`), which
    serves as `NAME-vVERSION`; version 0 is the model itself.
    """

    stream_options: Mapping[str, Any] = {}  # keys of a request that is streamed

    def __init__(self, model_path: str | Path, *, lora_name: str = "") -> None:
        self._model_path = str(model_path)
        self._lora_name = lora_name
        # Read here: a copy of this object may be on a machine without the folder.
        config = _config(self.model_path)
        # A bias that no token which stands for an image survives: the trainer gives these
        # probability 0, as the native engine does.
        tower = vision_args(config) if config else None
        named = config.get("image_token_id") if "vision_config" in config else None
        self.image_token = named if tower is None else tower.image_token_id
        ids = () if tower is None else tower.placeholder_ids
        self.never_sampled = {str(token): _NEVER for token in ids}

    @property
    def model_path(self) -> Path:
        """Its folder on this machine; a copy of this object may be on another."""
        return model_folder(self._model_path, weights=False)

    @abstractmethod
    def generation(self, request: ModelRequest) -> HttpRequest:
        """The HTTP request that generates. ValueError names an option this server lacks."""

    @abstractmethod
    def read(self, answer: dict[str, Any], num_known: int = 0) -> HttpGenerationResult:
        """The parsed reply, or one event of it: the tokens after the first `num_known`.

        ValueError, KeyError, TypeError or IndexError: a malformed reply.
        """

    @abstractmethod
    def scoring(self, tokens: list[int]) -> HttpRequest:
        """The HTTP request that computes the log-probabilities of given tokens."""

    @abstractmethod
    def read_scores(self, answer: dict[str, Any]) -> list[tuple[float | None, int]]:
        """(log-probability, token) of each token; None for the first. Errors as `read`."""

    @abstractmethod
    def load_model(self, control: ControlClient, folder: str) -> None:
        """Load the weights of a Hugging Face folder; between `interrupt` and `resume`."""

    def check_request(self, request: ModelRequest) -> None:
        if request.image_data and self.image_token not in request.input_ids:
            raise ValueError(
                f"image_data: input_ids has no image token ({self.image_token}, image_token_id in "
                f"the config.json of {self._model_path}): put one for each merged patch of an image"
            )
        for number, source in enumerate(request.image_data):
            try:
                check_encoded(image_bytes(source))
            except ImageError as error:
                raise ValueError(f"image_data[{number}]: {error}") from None

    def check_prompt(self, answer: dict[str, Any], request: ModelRequest) -> None:
        """ValueError if the server has read another prompt than `request.input_ids`, which are
        trained on; of requests with images, whose tokens the server makes itself."""

    def told_cached(self, content: bytes) -> int:
        """Cached tokens of the prompt, by an event after the last token."""
        return 0

    def wants_lm_head(self) -> bool:
        """Whether weight folders must hold a head even if it is tied to the embedding."""
        return False

    async def generate(
        self, session: aiohttp.ClientSession, address: str, drafts: DraftsByRid, version: int
    ) -> Results:
        ((rid, draft),) = drafts.items()
        rest, is_stream = continuation(draft), draft.request.on_tokens is not None
        if self._lora_name and version > 0 and not rest.gconfig.lora_name:
            rest.gconfig = rest.gconfig.new(lora_name=f"{self._lora_name}-v{version}")
        call = self.generation(rest)
        url, payload = f"http://{address}{call.endpoint}", {**call.payload, "stream": is_stream}
        if is_stream:
            payload |= self.stream_options
        num_known, ended = 0, None
        try:
            async with session.request(call.method, url, json=payload) as answer:
                async for content in self._contents(answer, address, is_stream):
                    if ended is not None:  # statistics, and [DONE]
                        ended.cached_tokens = max(ended.cached_tokens, self.told_cached(content))
                        continue
                    found = self._read(content, address, rest, num_known, is_stream)
                    tokens, logprobs = found.output_tokens, found.output_logprobs
                    reason, cached = found.stop_reason, found.cached_tokens
                    num_known += len(tokens)
                    if is_stream and reason is not None:
                        ended = Result.of([], [], [], reason, 0.0, cached)
                        reason = None
                    elif reason == "abort" and depends_on_start(draft.request):
                        tokens, logprobs = [], []
                    runs = [(version, len(tokens))] if tokens else []
                    yield [(rid, Result.of(tokens, logprobs, runs, reason, 0.0, cached))]
        except (aiohttp.ClientError, OSError):
            if ended is None:
                raise
        if ended is not None:
            yield [(rid, ended)]

    async def _contents(
        self, answer: aiohttp.ClientResponse, address: str, is_stream: bool
    ) -> AsyncIterator[bytes]:
        """The JSON of the reply, or of each event."""
        where, rest = f"{self.kind} {address}", bytearray()
        async for chunk in answer.content.iter_any():
            rest += chunk
            if is_stream and answer.status == 200:
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        yield bytes(line[5:])
            if len(rest) > _MAX_REPLY:
                raise bad_reply(self.kind, address, f"more than {_MAX_REPLY} bytes")
        if answer.status in (400, 404, 422):
            raise ValueError(f"{where} refused the request: {error_text(bytes(rest))}")
        if answer.status != 200:
            raise ServerError(f"{where}: {answer.status}: {error_text(bytes(rest))}")
        if not is_stream:
            yield bytes(rest)

    def _read(
        self, content: bytes, address: str, rest: ModelRequest, num_known: int, is_stream: bool
    ) -> HttpGenerationResult:
        try:
            answer = loads_object(content)
            if is_stream and "error" in answer:  # the status had been sent
                raise ServerError(f"{self.kind} {address}: {error_text(content)}")
            found = self.read(answer, num_known)
            if rest.image_data:
                self.check_prompt(answer, rest)
            if found.stop_reason is None and not is_stream:
                raise ValueError("finish_reason: expected stop, length or abort, got None")
            num_tokens, budget = num_known + len(found.output_tokens), rest.gconfig.max_new_tokens
            check_amount(num_tokens, found.stop_reason, max_tokens=budget)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as err:
            raise bad_reply(self.kind, address, f"{type(err).__name__}: {err}") from err
        return found

    def probe(self, control: ControlClient, version: int | None) -> list[tuple[int, float]]:
        """The most likely continuation of a few tokens; by the model itself, where adapters travel
        alone."""
        options = GenerationHyperparameters(max_new_tokens=8, greedy=True, ignore_eos=True)
        call = self.generation(ModelRequest(input_ids=[1, 2, 3], gconfig=options))
        try:
            found = self.read(control.post(call.endpoint, **call.payload, stream=False))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as err:
            raise bad_reply(self.kind, control.address, f"{type(err).__name__}: {err}") from err
        return list(zip(found.output_tokens, found.output_logprobs, strict=True))

    def score(self, control: ControlClient, sequences: list[list[int]]) -> list[list[float]]:
        def score_one(tokens: list[int]) -> list[float]:
            call = self.scoring(tokens)
            answer = control.post(call.endpoint, **call.payload)
            try:
                told = self.read_scores(answer)
                if [token for _, token in told] != tokens:
                    raise ValueError(f"scores of other tokens than the {len(tokens)} sent")
                scores: list[Any] = [logprob for logprob, _ in told[1:]]
                check_logprobs(scores, low=-math.inf)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as err:
                raise bad_reply(self.kind, control.address, f"{type(err).__name__}: {err}") from err
            return [*scores, 0.0]  # each at the token before its own

        with ThreadPoolExecutor(_SCORED_AT_ONCE, thread_name_prefix="score") as threads:
            return list(threads.map(score_one, sequences))

    def weight_order(self, meta: WeightUpdateMeta) -> WeightOrder:
        """The verified publication as a folder of Hugging Face or peft; one that is there already
        was made by whoever sent it, after the same check."""
        if meta.use_lora:
            return {**self._adapter_order(meta), "version": meta.version}
        folder = find_hf_folder(meta.path)
        if folder is None:
            publication = open_publication(meta.path, version=meta.version, key=meta.key)
            folder = hf_folder_of(publication, self.model_path, with_lm_head=self.wants_lm_head())
        return {"folder": str(folder), "version": meta.version}

    def _adapter_order(self, meta: WeightUpdateMeta) -> WeightOrder:
        if meta.version < 1 or meta.lora_name != self._lora_name:
            raise ValueError(
                f"a {self.kind} is sent adapters of {self._lora_name!r} from version 1 on, got "
                f"{meta.lora_name!r}, version {meta.version}"
            )
        target = Path(meta.path).absolute() / _PEFT_FOLDER
        if not target.is_dir():
            publication = open_publication(meta.path, version=meta.version, key=meta.key)
            with atomic_folder(target, durable=False) as folder:
                options = {"alpha": meta.lora_alpha, "base_model": self._model_path}
                write_peft(dict(publication), folder, **options)
        return {"folder": str(target), "adapter": f"{meta.lora_name}-v{meta.version}"}

    def load_weights(self, control: ControlClient, order: WeightOrder) -> None:
        if "adapter" in order:
            self._load_version(control, order["adapter"], order["folder"])
        else:
            self.load_model(control, order["folder"])

    def _load_version(self, control: ControlClient, name: str, folder: str) -> None:
        """Load an adapter of the run, and unload its other versions: no request uses them."""
        with suppress(ServerRefusedError):  # unless an earlier call has loaded it
            self.unload_adapter(control, name)
        of_run = re.compile(rf"{re.escape(self._lora_name)}-v\d+")
        for other in self.load_adapter(control, name, folder):
            if other != name and of_run.fullmatch(other):
                self.unload_adapter(control, other)


def _config(folder: Path) -> dict[str, Any]:
    """The model's config.json; empty where the folder is not on this machine."""
    return read_hf_config(folder) if (folder / CONFIG_FILE).is_file() else {}


def continuation(draft: Draft) -> ModelRequest:
    """The rest of the generation as a new request."""
    gconfig, done = draft.gconfig, len(draft.tokens)
    seed = gconfig.seed
    if seed is not None and done:
        seed = (seed + done) % _SEED_END  # the same seed would repeat the first draws
    rest = gconfig.new(
        max_new_tokens=draft.budget - done,
        min_new_tokens=min(max(0, gconfig.min_new_tokens - done), draft.budget - done),
        seed=seed,
    )
    input_ids = draft.request.input_ids + draft.tokens.tolist()
    request = draft.request
    return ModelRequest(
        input_ids=input_ids,
        gconfig=rest,
        rid=request.rid,
        grammar=request.grammar,
        image_data=request.image_data,
        vision_msg_vllm=request.vision_msg_vllm,
    )


def depends_on_start(request: ModelRequest) -> bool:
    gconfig = request.gconfig
    penalties = gconfig.frequency_penalty or gconfig.presence_penalty
    return bool(gconfig.stop or penalties or request.grammar or request.image_data)


def default_dtype() -> str:
    """Of a server on this machine."""
    return "bfloat16" if best_device() == "cuda" else "float32"


def read_metrics(text: str, names: dict[str, str]) -> dict[str, float]:
    """{our name: sum over all labels} of a Prometheus page; `names` maps theirs to ours."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        series, _, value = line.rpartition(" ")
        ours = names.get(series.partition("{")[0])
        if ours is not None:
            found[ours] = found.get(ours, 0.0) + float(value)
    return found
