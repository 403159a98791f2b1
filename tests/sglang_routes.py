"""What SGLang's documentation says of each route that areal calls: fields, types, defaults, bounds.

From its pages "Sampling Parameters", "SGLang for RL Systems" and "LoRA Serving". A field that they
do not name is refused, and so is a value of another type: a misspelled key of areal would otherwise
be ignored by the server, and nobody would notice.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Penalty = Annotated[float, Field(ge=-2, le=2)]
Model = TypeVar("Model", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SamplingParams(_Body):
    max_new_tokens: Annotated[int, Field(ge=0)] = 128
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    custom_params: list[dict[str, Any] | None] | None = None
    # Not in the table of that page: of "Deterministic Inference", and of the OpenAI routes.
    sampling_seed: int | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    logit_bias: dict[str, float] | None = None

    @model_validator(mode="after")
    def check(self) -> SamplingParams:
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError("top_k must be -1 or at least 1")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError("min_new_tokens must be at most max_new_tokens")
        if sum(rule is not None for rule in (self.json_schema, self.regex, self.ebnf)) > 1:
            raise ValueError("only one of json_schema, regex and ebnf can be specified")
        return self


class Generate(_Body):
    """With one prompt of token ids, as areal sends it."""

    input_ids: Annotated[list[int], Field(min_length=1)]
    sampling_params: SamplingParams
    rid: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    lora_path: str | None = None
    return_hidden_states: bool = False


class Pause(_Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Continue(_Body):
    pass


class UpdateFromDisk(_Body):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    flush_cache: bool = True


class InitGroup(_Body):
    master_address: str
    master_port: Annotated[int, Field(gt=0, lt=65536)]
    rank_offset: Annotated[int, Field(ge=1)]
    world_size: Annotated[int, Field(ge=2)]
    group_name: str = "weight_update_group"
    backend: Literal["nccl", "gloo"] = "nccl"


class UpdateFromDistributed(_Body):
    names: Annotated[list[str], Field(min_length=1)]
    dtypes: list[Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "int64"]]
    shapes: list[list[Annotated[int, Field(ge=0)]]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: Literal["flattened_bucket"] | None = None

    @model_validator(mode="after")
    def check(self) -> UpdateFromDistributed:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError("names, dtypes and shapes must be of one length")
        return self


class LoadAdapter(_Body):
    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1)]
    pinned: bool = False


class UnloadAdapter(_Body):
    lora_name: Annotated[str, Field(min_length=1)]


class BadRequestError(ValueError):
    """Its text is the reply."""


async def read_body(request: Request, model: type[Model]) -> Model:
    """The checked body; BadRequestError names the first field that is wrong."""
    content = await request.body()
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise BadRequestError("expected Content-Type application/json")
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        raise BadRequestError(f"{field}: {first['msg']}") from None
