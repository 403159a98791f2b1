"""Stock vLLM server: how it is launched, and its protocol adapter.

The server runs in its own environment (`areal env create vllm`). Generation uses /v1/completions
with token ids both ways; pausing, weights and adapters use routes of vLLM's development mode. vLLM
checks the key under /v1 only; token_gate.py checks it on every route. Log-probabilities are those
of the distribution a token was drawn from (`--logprobs-mode processed_logprobs`).

A prompt with images goes to /v1/chat/completions, as the messages of `vision_msg_vllm`: the reply
has the tokens that vLLM made of them, which must be those of the request.

Weights come from a folder, or by vLLM's weight-transfer API through a process group that the
workers join: vllm_worker.py is the backend (`--weight-transfer-config`).

A head tied to the embedding is sent to vLLM as a separate weight: its `reload_weights` does not
update a tied head on the CPU, which would keep stale weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal.api.config.inference import GenerationHyperparameters
from areal.api.config.inference_servers import MAX_VLLM_LORA_RANK
from areal.api.io_struct import (
    HttpGenerationResult,
    HttpRequest,
    ModelRequest,
    WeightUpdateMeta,
)
from areal.api.json_text import loads_object
from areal.engine.remote.protocol import WeightOrder
from areal.engine.remote.server_control import ControlClient, ServerError, ServerRefusedError
from areal.engine.remote.server_process import launch_server
from areal.engine.remote.stock import NO_TOP_K, StockProtocol, default_dtype, read_metrics
from areal.models.hf_io import read_hf_config
from areal.utils.child_process import ChildProcess
from areal.utils.fs import atomic_folder
from areal.utils.hub import model_folder
from areal.weight_sync.collective import GroupPlace
from areal.weight_sync.hf_folder import folder_with_lm_head

MODEL_NAME = "areal"  # the served model name, whatever the folder
_PACKAGE = Path(__file__).absolute().parents[2]  # areal
_EXTENSION = "areal.engine.remote.vllm_worker.WorkerDevice"
_TRANSFER = json.dumps({"backend": "areal"})  # which the extension's module registers
_GATE = "areal.engine.remote.token_gate.VLLMTokenGate"
_FIRST_VERSION = "default"  # vLLM's value before any update
_MAX_STOPS = 4
# Beyond them the least used one is read from its folder again when it is needed.
_KEPT_ADAPTERS = 8
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, MAX_VLLM_LORA_RANK)
_GRAMMAR_NAMES = {"json_schema": "json", "regex": "regex", "lark": "grammar"}  # ours -> theirs
_STATS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:generation_tokens_total": "generated_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
}


class VLLMProtocol(StockProtocol):
    kind = "vLLM server"
    weight_types = ("shm", "disk", "xccl")
    stream_options = {"stream_options": {"include_usage": True}}

    def generation(self, request: ModelRequest) -> HttpRequest:
        gconfig = request.gconfig
        stop = gconfig.stop or []
        if len(stop) > _MAX_STOPS:
            raise ValueError(
                f"gconfig.stop: a {self.kind} takes at most {_MAX_STOPS} texts, got {len(stop)}"
            )
        payload: dict[str, Any] = {
            "model": gconfig.lora_name or MODEL_NAME,
            "prompt": request.input_ids,
            "max_tokens": gconfig.max_new_tokens,
            "min_tokens": gconfig.min_new_tokens,
            "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
            "top_p": gconfig.top_p,
            "top_k": 0 if gconfig.top_k >= NO_TOP_K else gconfig.top_k,
            "frequency_penalty": gconfig.frequency_penalty,
            # Explicit, because generation_config.json of the model would set them otherwise.
            "presence_penalty": gconfig.presence_penalty,
            "repetition_penalty": gconfig.repetition_penalty,
            "min_p": gconfig.min_p,
            "stop_token_ids": gconfig.stop_token_ids,
            "stop": stop,
            "include_stop_str_in_output": True,
            "ignore_eos": gconfig.ignore_eos,
            "skip_special_tokens": gconfig.skip_special_tokens,
            "logprobs": 0,
            "return_token_ids": True,
        }
        if bias := {**gconfig.logit_bias, **self.never_sampled}:
            payload["logit_bias"] = bias
        if gconfig.seed is not None:
            payload["seed"] = gconfig.seed
        if request.grammar is not None:
            kind = _GRAMMAR_NAMES[request.grammar.kind]
            payload["structured_outputs"] = {kind: getattr(request.grammar, request.grammar.kind)}
        if request.image_data:
            del payload["prompt"]
            chat = {"messages": chat_with_images(request), "logprobs": True, "top_logprobs": 0}
            return HttpRequest("/v1/chat/completions", payload | chat)
        return HttpRequest("/v1/completions", payload)

    def check_request(self, request: ModelRequest) -> None:
        super().check_request(request)
        if request.image_data:
            chat_with_images(request)
            if request.on_tokens is not None:
                raise ValueError(f"image_data: a {self.kind} streams no reply to images")

    def check_prompt(self, answer: dict[str, Any], request: ModelRequest) -> None:
        if answer["prompt_token_ids"] != request.input_ids:
            raise ValueError(
                f"prompt_token_ids: the server made {len(answer['prompt_token_ids'])} tokens of "
                f"vision_msg_vllm, and input_ids has {len(request.input_ids)} or others: make both "
                "from one chat, by the model's template and processor"
            )

    def read(self, answer: dict[str, Any], num_known: int = 0) -> HttpGenerationResult:
        choice = answer["choices"][0]
        reason = choice["finish_reason"]
        if reason not in (None, "stop", "length", "abort"):
            raise ValueError(f"finish_reason: expected stop, length or abort, got {reason!r}")
        told = choice["logprobs"] or {"token_logprobs": []}
        if "message" in choice:  # of a chat
            logprobs = [one["logprob"] for one in told.get("content") or ()]
        else:
            logprobs = told["token_logprobs"]
        return HttpGenerationResult(
            choice["token_ids"] or [], logprobs, reason, _cached_tokens(answer)
        )

    def scoring(self, tokens: list[int]) -> HttpRequest:
        payload = {"model": MODEL_NAME, "prompt": tokens, "max_tokens": 0, "echo": True}
        # Of the token itself, no others; a reply without text.
        return HttpRequest(
            "/v1/completions", payload | {"prompt_logprobs": 0, "return_token_ids": True}
        )

    def read_scores(self, answer: dict[str, Any]) -> list[tuple[float | None, int]]:
        choice = answer["choices"][0]
        tokens = choice["prompt_token_ids"]
        rows = zip(choice["prompt_logprobs"], tokens, strict=True)
        return [(row and row[str(token)]["logprob"], token) for row, token in rows]

    def told_cached(self, content: bytes) -> int:
        try:
            return max(_cached_tokens(loads_object(content)), 0)
        except (ValueError, TypeError, AttributeError):  # [DONE]
            return 0

    def pause(self, control: ControlClient) -> None:
        control.post("/pause?mode=keep&clear_cache=false")

    def resume(self, control: ControlClient) -> None:
        control.post("/resume")

    def interrupt(self, control: ControlClient) -> None:
        control.post("/pause?mode=abort&clear_cache=true")

    def wants_lm_head(self) -> bool:
        return _has_head(self.model_path)

    def load_weights(self, control: ControlClient, order: WeightOrder) -> None:
        super().load_weights(control, order)
        _note_version(control, order["version"])

    def load_model(self, control: ControlClient, folder: str) -> None:
        _on_workers(control, "reload_weights", weights_path=folder)

    def group_devices(self, control: ControlClient) -> list[str]:
        """Every worker of a server is in the group, and loads its shard of the weights."""
        return _on_workers(control, "areal_device")

    def join_group(self, control: ControlClient, place: GroupPlace) -> None:
        control.post("/init_weight_transfer_engine", init_info=asdict(place))

    def receive(self, control: ControlClient, group: str, meta: WeightUpdateMeta) -> None:
        order = {"version": meta.version, "with_lm_head": self.wants_lm_head()}
        _start_update(control)
        control.post("/update_weights", update_info={"group": group, **order})
        control.post("/finish_weight_update", weight_version=str(meta.version))
        _on_workers(control, "reset_encoder_cache")  # what the old weights made of images

    def served_version(self, control: ControlClient) -> int | None:
        noted = control.get("/weight_info").get("weight_version")
        if noted == _FIRST_VERSION:
            return 0
        if not isinstance(noted, str) or not noted.isdecimal():
            raise ServerError(
                f"{control.kind} {control.address}: expected a version, got {noted!r:.60}"
            )
        return int(noted)

    def identify(self, control: ControlClient) -> str:
        model = model_of(control)
        if MODEL_NAME not in (entry["id"] for entry in control.get("/v1/models")["data"]):
            raise ServerError(f"start it with --served-model-name {MODEL_NAME}")
        try:
            self.served_version(control)
        except ServerRefusedError as error:
            raise ServerError(f"start it with VLLM_SERVER_DEV_MODE=1 ({error})") from error
        only_choice = GenerationHyperparameters(max_new_tokens=1, top_k=1, ignore_eos=True)
        call = self.generation(ModelRequest(input_ids=[0], gconfig=only_choice))
        (logprob,) = self.read(control.post(call.endpoint, **call.payload)).output_logprobs
        if abs(logprob) > 1e-3:  # of all tokens, not of those that the token was drawn from
            raise ServerError("start it with --logprobs-mode processed_logprobs")
        return model

    def load_adapter(self, control: ControlClient, name: str, folder: str) -> list[str]:
        control.post_text("/v1/load_lora_adapter", lora_name=name, lora_path=folder)
        return [entry["id"] for entry in control.get("/v1/models")["data"]]

    def unload_adapter(self, control: ControlClient, name: str) -> None:
        control.post_text("/v1/unload_lora_adapter", lora_name=name)

    def stats(self, control: ControlClient) -> dict[str, float]:
        return read_metrics(control.get_text("/metrics"), _STATS)


def chat_with_images(request: ModelRequest) -> list[dict[str, Any]]:
    """`vision_msg_vllm` with each image in its place. ValueError if they do not fit together."""
    left, chat = list(request.image_data), []
    for message in request.vision_msg_vllm or ():
        content = message.get("content")
        if isinstance(content, list):
            content = [_with_image(part, left) for part in content]
        chat.append({**message, "content": content})
    if not chat or left:
        raise ValueError(
            "image_data: a vLLM server takes images in a chat, and vision_msg_vllm lacks room for "
            f"{len(left)} of {len(request.image_data)}: give it the messages of input_ids, with a "
            'part {"type": "image_url"} where each image stands'
        )
    return chat


def _with_image(part: Any, left: list[str]) -> Any:
    """An image part with the next of `left`."""
    if not isinstance(part, dict) or part.get("type") not in ("image", "image_url"):
        return part
    if not left:
        raise ValueError("vision_msg_vllm: has more image parts than image_data has images")
    source = left.pop(0)
    url = source if source.startswith("data:") else f"data:image/png;base64,{source}"
    return {"type": "image_url", "image_url": {"url": url}}


def model_of(control: ControlClient) -> str:
    """The model that the server was started with."""
    return control.get("/v1/models")["data"][0]["root"]


def _cached_tokens(answer: dict[str, Any]) -> int:
    """Told with --enable-prompt-tokens-details, of a stream by an event after its last token."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0


_SERVER_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",  # opens /pause, /resume, /collective_rpc
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # whose last lines are kept for error messages
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",  # longer than our client keeps idle connections
    # Pinned to cores, it would compete with the trainer for them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def launch_vllm_server(
    model_path: str | Path,
    *,
    python: str | Path,
    token: str,
    scratch: str | Path,
    dtype: str | None = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    gpu_memory_utilization: float = 0.9,
    cpu_cache_gb: int = 4,
    enforce_eager: bool = False,
    lora_rank: int | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    seed: int = 0,
    threads: int = 1,
    gpus: Sequence[str] | None = None,
    host: str = "127.0.0.1",
    extra_args: Sequence[str] = (),
    log_path: str | Path | None = None,
    setup_timeout_s: float = 300.0,
) -> tuple[ChildProcess, str]:
    """Starts vLLM with the interpreter `python` of its environment; (the child, its "host:port").

    `gpus` are those it may use, by default the ones this process sees; `dtype` None is bfloat16 on
    a GPU, else float32. `host` is the address to listen on. `lora_rank` is the largest rank of
    adapters, None: it takes none.
    `scratch` is a writable folder that must exist as long as the server.
    RuntimeError with its last output if it exits or is not ready in time; it is then terminated.
    """
    folder, overrides, scratch = model_folder(model_path), None, Path(scratch).absolute()
    if _has_head(folder):
        folder = folder_with_lm_head(folder, scratch / "model")
        overrides = json.dumps({"tie_word_embeddings": False})
    options = {
        "model": folder,
        "hf-overrides": overrides,
        "served-model-name": MODEL_NAME,
        "dtype": dtype or default_dtype(),
        "max-model-len": max_model_len,
        "max-num-seqs": max_num_seqs,
        "gpu-memory-utilization": gpu_memory_utilization,
        "tensor-parallel-size": tensor_parallel,
        "pipeline-parallel-size": pipeline_parallel,
        "seed": seed,
        "max-lora-rank": None if lora_rank is None else _rank_of_slots(lora_rank),
        "max-cpu-loras": None if lora_rank is None else _KEPT_ADAPTERS,
        "logprobs-mode": "processed_logprobs",
        "worker-extension-cls": _EXTENSION,
        "weight-transfer-config": _TRANSFER,
        "middleware": _GATE,
        "enforce-eager": enforce_eager,
        "enable-lora": lora_rank is not None,
        "disable-uvicorn-access-log": True,
        "enable-prompt-tokens-details": True,
    }
    env = {
        **_SERVER_ENV,
        "PYTHONPATH": str(_folder_of_areal(scratch / "packages")),
        "VLLM_API_KEY": token,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0" if lora_rank is None else "1",
        "VLLM_CPU_KVCACHE_SPACE": str(cpu_cache_gb),
        "OMP_NUM_THREADS": str(threads),
    }
    return launch_server(
        VLLMProtocol.kind,
        [str(python), "-m", "vllm.entrypoints.openai.api_server"],
        options,
        extra_args,
        env=env,
        token=token,
        gpus=gpus,
        host=host,
        log_path=log_path,
        setup_timeout_s=setup_timeout_s,
    )


def _rank_of_slots(rank: int) -> int:
    """The smallest that vLLM offers for adapters of this rank."""
    return next(size for size in _LORA_RANKS if size >= rank)


def _has_head(model_path: str | Path) -> bool:
    """Whether vLLM's model has a separate head. Gemma models have none."""
    return not read_hf_config(model_path)["model_type"].startswith("gemma")


def _on_workers(control: ControlClient, method: str, **kwargs: Any) -> list[Any]:
    """Results of the method on each worker, in rank order."""
    answer = control.post("/collective_rpc", method=method, kwargs=kwargs)
    if "results" not in answer:
        raise ServerError(f"{control.kind} {control.address}: {method} answered {answer}")
    return answer["results"]


def _start_update(control: ControlClient) -> None:
    try:
        control.post("/start_weight_update")
    except ServerRefusedError:
        # A sender that was killed between two routes leaves its update open; nothing of it is
        # loaded. Of any other refusal the second start tells.
        with suppress(ServerRefusedError):
            control.post("/finish_weight_update")
        control.post("/start_weight_update")


def _note_version(control: ControlClient, version: int) -> None:
    control.post("/update_weight_version", new_version=str(version))


def _folder_of_areal(target: Path) -> Path:
    """A folder for PYTHONPATH with `areal` alone, without other packages of this environment."""
    with atomic_folder(target, durable=False) as folder:
        (folder / "areal").symlink_to(_PACKAGE)
    return target
