"""Stock SGLang server: how it is launched, and its protocol adapter.

The server runs in its own environment (`areal env create sglang`). Generation uses /generate with
token ids both ways; images travel beside them, and the prompt that SGLang makes of both must be as
long as that of the request. Its log-probabilities are those of softmax(logits / temperature) before
top-k and top-p, so training samples must be drawn without either: the config of a run refuses
others.

Weights come from a folder, or by the documented routes for a process group that trainer and workers
make with torch.distributed (`xccl`): without checksums, and a worker that lacks a GPU uses gloo.

The token is passed in a file that only this user can read and that is removed once the server
answers, because every user of the machine can read a process's arguments.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal.api.io_struct import HttpGenerationResult, HttpRequest, ModelRequest
from areal.api.scratch import ScratchFolder
from areal.engine.remote.protocol import NamedBucket
from areal.engine.remote.server_control import ControlClient, ServerError
from areal.engine.remote.server_process import launch_server
from areal.engine.remote.stock import NO_TOP_K, StockProtocol, default_dtype, read_metrics
from areal.utils.child_process import ChildProcess
from areal.utils.device import best_device
from areal.utils.fs import atomic_write_text
from areal.utils.hub import model_folder
from areal.weight_sync.collective import GroupPlace

_STATS = {
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:generation_tokens_total": "generated_tokens",
    "sglang:prompt_tokens_total": "prompt_tokens",
    "sglang:token_usage": "kv_cache_usage",
}


class SGLangProtocol(StockProtocol):
    kind = "SGLang server"
    weight_types = ("shm", "disk", "xccl")
    wants_names = True

    def generation(self, request: ModelRequest) -> HttpRequest:
        gconfig = request.gconfig
        sampling: dict[str, Any] = {
            "max_new_tokens": gconfig.max_new_tokens,
            "min_new_tokens": gconfig.min_new_tokens,
            "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
            "top_p": gconfig.top_p,
            "top_k": -1 if gconfig.top_k >= NO_TOP_K else gconfig.top_k,
            "frequency_penalty": gconfig.frequency_penalty,
            # Explicit, because generation_config.json of the model would set them otherwise.
            "presence_penalty": gconfig.presence_penalty,
            "repetition_penalty": gconfig.repetition_penalty,
            "min_p": gconfig.min_p,
            "stop_token_ids": gconfig.stop_token_ids,
            "ignore_eos": gconfig.ignore_eos,
            "skip_special_tokens": gconfig.skip_special_tokens,
        }
        if gconfig.stop:
            sampling |= {"stop": gconfig.stop, "no_stop_trim": True}
        if bias := {**gconfig.logit_bias, **self.never_sampled}:
            sampling["logit_bias"] = bias
        if gconfig.seed is not None:
            sampling["sampling_seed"] = gconfig.seed
        if request.grammar is not None:
            if request.grammar.kind == "lark":
                raise ValueError(
                    f"grammar.lark: a {self.kind} takes no Lark, only json_schema and regex"
                )
            sampling[request.grammar.kind] = request.grammar.text
        payload: dict[str, Any] = {
            "input_ids": request.input_ids,
            "sampling_params": sampling,
            "return_logprob": True,
        }
        if request.image_data:
            payload["input_ids"] = self._one_token_each(request)
            payload["image_data"] = request.image_data
        if gconfig.lora_name:
            payload["lora_path"] = gconfig.lora_name
        return HttpRequest("/generate", payload)

    def read(self, answer: dict[str, Any], num_known: int = 0) -> HttpGenerationResult:
        info = answer["meta_info"]
        finish = info["finish_reason"] or {"type": None}
        if finish["type"] not in (None, "stop", "length", "abort"):
            raise ValueError(f"finish_reason: expected stop, length or abort, got {finish!r}")
        if finish.get("status_code") is not None:  # how SGLang reports a failure
            raise ValueError(f"finish_reason: {finish.get('message')}")
        pairs = info.get("output_token_logprobs") or []
        if not pairs and answer.get("output_ids"):
            raise ValueError("output_token_logprobs: expected one per token, got none")
        if num_known:
            # An event has all pairs so far, or with --incremental-streaming-output the new ones.
            num_new = info.get("completion_tokens", len(pairs)) - num_known
            if not 0 <= num_new <= len(pairs):
                raise ValueError(f"output_token_logprobs: expected {num_new}, got {len(pairs)}")
            pairs = pairs[len(pairs) - num_new :]
        tokens, logprobs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
        cached = info.get("cached_tokens") or 0
        return HttpGenerationResult(tokens, logprobs, finish["type"], cached)

    def scoring(self, tokens: list[int]) -> HttpRequest:
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        payload = {"input_ids": tokens, "sampling_params": sampling}
        return HttpRequest("/generate", payload | {"return_logprob": True, "logprob_start_len": 0})

    def read_scores(self, answer: dict[str, Any]) -> list[tuple[float | None, int]]:
        return [(told[0], told[1]) for told in answer["meta_info"]["input_token_logprobs"]]

    def _one_token_each(self, request: ModelRequest) -> list[int]:
        """The prompt with one image token for each image: SGLang makes the others."""
        ids, image = request.input_ids, self.image_token
        return [t for i, t in enumerate(ids) if t != image or i == 0 or ids[i - 1] != image]

    def check_prompt(self, answer: dict[str, Any], request: ModelRequest) -> None:
        read, sent = answer["meta_info"]["prompt_tokens"], len(request.input_ids)
        if read != sent:
            raise ValueError(
                f"prompt_tokens: the server read {read} tokens of a prompt with images, and "
                f"input_ids has {sent}: expand each image token as the model's processor does"
            )

    def pause(self, control: ControlClient) -> None:
        control.post_text("/pause_generation", mode="in_place")

    def resume(self, control: ControlClient) -> None:
        control.post_text("/continue_generation")

    def interrupt(self, control: ControlClient) -> None:
        control.post_text("/pause_generation", mode="abort")

    def load_model(self, control: ControlClient, folder: str) -> None:
        where = {"model_path": folder, "flush_cache": True}
        answer = control.post("/update_weights_from_disk", **where)
        self._check(answer, control, "update_weights_from_disk")

    def group_devices(self, control: ControlClient) -> list[str]:
        """One worker per tensor-parallel rank. SGLang does not say which GPUs they have."""
        info = control.get("/get_server_info")
        sizes = [info.get(name, 1) for name in ("tp_size", "pp_size", "dp_size")]
        if any(type(size) is not int or size < 1 for size in sizes) or sizes[1:] != [1, 1]:
            raise ServerError(
                f"{self.kind} {control.address}: expected pp_size and dp_size 1 for weights by "
                f"xccl, got tp_size, pp_size, dp_size {sizes}; set actor.weight_update_mode to disk"
            )
        if info.get("device") == "cpu":
            return ["cpu"] * sizes[0]
        return [f"{control.address}/{rank}" for rank in range(sizes[0])]

    def join_group(self, control: ControlClient, place: GroupPlace) -> None:
        answer = control.post(
            "/init_weights_update_group",
            master_address=place.host,
            master_port=place.port,
            rank_offset=place.rank,
            world_size=place.world_size,
            group_name=place.name,
            backend=place.backend,
        )
        self._check(answer, control, "init_weights_update_group")

    def receive_bucket(self, control: ControlClient, bucket: NamedBucket) -> None:
        tensors = bucket.tensors
        answer = control.post(
            "/update_weights_from_distributed",
            names=list(tensors),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
            group_name=bucket.group,
            flush_cache=bucket.is_last,
            weight_version=str(bucket.version),
        )
        self._check(answer, control, "update_weights_from_distributed")

    def identify(self, control: ControlClient) -> str:
        return model_of(control)

    def load_adapter(self, control: ControlClient, name: str, folder: str) -> list[str]:
        answer = control.post("/load_lora_adapter", lora_name=name, lora_path=folder)
        self._check(answer, control, "load_lora_adapter")
        return list(answer.get("loaded_adapters") or [name])

    def unload_adapter(self, control: ControlClient, name: str) -> None:
        answer = control.post("/unload_lora_adapter", lora_name=name)
        self._check(answer, control, "unload_lora_adapter")

    def stats(self, control: ControlClient) -> dict[str, float]:
        return read_metrics(control.get_text("/metrics"), _STATS)

    def _check(self, answer: dict[str, Any], control: ControlClient, what: str) -> None:
        if answer.get("success") is not True:
            reason = answer.get("message") or answer.get("error_message") or answer
            raise ServerError(f"{self.kind} {control.address}: {what}: {reason}")


def model_of(control: ControlClient) -> str:
    """The model that the server was started with."""
    return control.get("/get_model_info")["model_path"]


def launch_sglang_server(
    model_path: str | Path,
    *,
    python: str | Path,
    token: str,
    dtype: str | None = "auto",
    context_length: int | None = None,
    max_running_requests: int | None = None,
    mem_fraction_static: float = 0.9,
    attention_backend: str | None = None,
    device: str | None = None,
    lora_rank: int | None = None,
    lora_target_modules: Sequence[str] = (),
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
    """Starts SGLang with the interpreter `python` of its environment; (the child, its "host:port").

    `gpus` are those it may use, by default the ones this process sees; `dtype` None is bfloat16 on
    a GPU, else float32; `device` None is the best it has. `host` is the address to listen on.
    `lora_rank` is the largest rank of adapters, None: it takes none; they may have the layers
    `lora_target_modules`, by default all that SGLang supports.
    RuntimeError with its last output if it exits or is not ready in time; it is then terminated.
    """
    options = {
        "model-path": model_folder(model_path),
        "dtype": dtype or default_dtype(),
        "context-length": context_length,
        "max-running-requests": max_running_requests,
        "mem-fraction-static": mem_fraction_static,
        "attention-backend": attention_backend,
        "device": device or best_device(),
        "tp-size": tensor_parallel,
        "pp-size": pipeline_parallel,
        "random-seed": seed,
        "max-lora-rank": lora_rank,
        "enable-lora": lora_rank is not None,
        "enable-metrics": True,
    }
    if lora_rank is not None:
        extra_args = ["--lora-target-modules", *(lora_target_modules or ["all"]), *extra_args]
    with ScratchFolder("sglang") as folder:
        file = folder / "key.yaml"
        atomic_write_text(file, json.dumps({"api-key": token}), durable=False)
        return launch_server(
            SGLangProtocol.kind,
            [str(python), "-m", "sglang.launch_server"],
            {"config": str(file), **options},
            extra_args,
            env={"OMP_NUM_THREADS": str(threads)},
            token=token,
            gpus=gpus,
            host=host,
            log_path=log_path,
            setup_timeout_s=setup_timeout_s,
        )
