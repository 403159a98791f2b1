"""Data types exchanged by workflows, engines and trainers, and the validity rules of replies.

Nothing here imports torch: a process that never loads a model can build, print and check a request,
a reply or a weight update.

Trajectories are plain dicts of tensors, right-padded to `[B, S]`:

| key              | dtype | meaning                                                              |
|------------------|-------|----------------------------------------------------------------------|
| `input_ids`      | int32 | prompt and generated tokens (required)                               |
| `attention_mask` | bool  | True on real tokens (required)                                       |
| `loss_mask`      | int32 | 1 on generated tokens                                                |
| `logprobs`       | f32   | log-probability under the sampling distribution, 0 on prompt tokens  |
| `versions`       | int32 | version of the weights that sampled the token, -1 on prompt tokens   |
| `turn_ids`       | int32 | 0-based turn, -1 on text the model did not write                     |
| `rewards`        | f32   | `[B]`, one outcome reward per row                                    |
| `seq_no_eos`     | bool  | `[B]`, True when generation ended by length, not by a stop token     |
| `episode_ids`    | int32 | `[B]`, index of the row's episode in its group; added by the rollout |

With `gconfig.reward_normalization` there is `original_rewards` too: `rewards` before it.
With `rollout.return_routed_experts` there is `routed_experts` `[B, S, L, K]`, uint8 or int16: the K
experts that computed the token in each of the L layers with experts; the dtype's largest number on
tokens without a record, such as the last.
Rows with images have `multi_modal_input`: a list of B dicts of tensors, {} for a row without.

The `check_*` functions validate generated tokens, for every backend. An invalid reply cannot be
trained on, so it is rejected, never repaired: the client counts it, retries up to its bound, then
raises an error that names the server.

| rule                                      | why                                                  |
|-------------------------------------------|------------------------------------------------------|
| one log-probability per token             | training needs it                                    |
| numbers: no booleans, strings or null     | Python takes JSON's true for 1                       |
| -1000 <= log-probability <= 0.001         | above 0 only by rounding; no sampler draws a token   |
|                                           | of probability e**-1000; vLLM writes -9999 for -inf  |
| token ids of the vocabulary               |                                                      |
| at most as many tokens as requested       |                                                      |
| at least one token, unless aborted        | a stop token is a token too                          |
| versions that were sent, not decreasing   | weights only move forward while one server           |
| within one server's output                | generates                                            |

Errors are ValueErrors that begin with the name of the field.
"""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from areal.api.config.inference import GenerationHyperparameters
from areal.api.json_text import dumps, well_formed

if TYPE_CHECKING:
    from areal.api.alloc_mode import ModelAllocation
    from areal.api.json_text import Json


EPISODE_KEY = "episode_ids"
NO_ROOM = "no room for output"  # in the ValueError for a prompt that fills the context
StopReason = Literal["length", "stop", "tool_calls", "abort"]
OnTokens = Callable[[list[int], list[float]], None]
WeightTransport = Literal["direct", "shm", "ipc", "disk", "delta", "xccl"]


MAX_GRAMMAR_CHARS = 1 << 18


@dataclass(frozen=True, slots=True)
class Grammar:
    """The texts an output may be, by exactly one of the fields.

    Tokens that cannot lead to such a text have probability 0. The output ends where the grammar
    allows it; one that ends by length is the beginning of such a text. Log-probabilities are those
    of the tokens that were allowed, renormalised.

    Grammar(json_schema={"type": "object"})                  # any JSON object
    Grammar(regex=r"yes|no")
    Grammar(lark='start: "<call>" %json {"type": "object"} "</call>"')
    """

    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    lark: str | None = None  # in llguidance's dialect of Lark

    def __post_init__(self) -> None:
        given = [name for name in GRAMMAR_KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            names = ", ".join(GRAMMAR_KINDS)
            found = ", ".join(given) or "none"
            raise ValueError(f"grammar: expected exactly one of {names}, got {found}")
        kind, value = given[0], getattr(self, given[0])
        expected, wanted = (dict, "an object") if kind == "json_schema" else (str, "a text")
        if not isinstance(value, expected):
            raise ValueError(f"grammar.{kind}: expected {wanted}, got {_shown(value)}")
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise ValueError(
                f"grammar.{kind}: expected at most {MAX_GRAMMAR_CHARS} characters, "
                f"got {len(self.text)}"
            )

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in GRAMMAR_KINDS if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """Its value; a schema as JSON."""
        if self.json_schema is None:
            text = self.regex if self.regex is not None else self.lark
            assert text is not None, "one of them is given"
            if well_formed(text) is not text:
                raise ValueError(f"grammar.{self.kind}: a lone surrogate is not text")
            return text
        try:
            return dumps(self.json_schema)
        except (TypeError, ValueError, RecursionError) as err:
            raise ValueError(f"grammar.json_schema: not JSON ({err})") from None


GRAMMAR_KINDS = ("json_schema", "regex", "lark")

# A private generator: a workflow that seeds `random` would repeat ids. Reseeded in forked
# processes. A uuid4 reads the kernel's entropy each time.
_rids = random.Random()
os.register_at_fork(after_in_child=_rids.seed)


def new_rid() -> str:
    return f"{_rids.getrandbits(128):032x}"


@dataclass(slots=True)
class ModelRequest:
    """One generation request. `rid` identifies it in every log line and retry.

    An engine that cannot honour a field rejects the request with a ValueError; it never ignores it.

    `on_tokens(tokens, logprobs)` is told new output as it is sampled, on the event loop that awaits
    `agenerate`: in order, and no token twice, whatever is sent again. It must not raise. The tokens
    it was not told by the end, of some engines all, are in the response. It belongs to one call in
    this process: copies and pickles of the request are without it.
    """

    input_ids: list[int]
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = field(default_factory=new_rid)
    metadata: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    image_data: list[str] = field(default_factory=list)  # base64, in prompt order
    processor: Any = None  # the processor that made the prompt's image tokens
    vision_msg_vllm: list[dict[str, Any]] | None = None  # the chat, for servers that take images so
    grammar: Grammar | None = None  # what the output must look like
    on_tokens: OnTokens | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.input_ids and isinstance(self.input_ids[0], str):
            raise ValueError(
                f"input_ids: expected token ids, got the text {self.input_ids[0]!r:.40}; "
                "apply_chat_template of transformers 5 returns a dict of them unless it is given "
                "return_dict=False"
            )

    def copy(self) -> ModelRequest:
        return replace(
            self,
            input_ids=list(self.input_ids),
            gconfig=self.gconfig.new(),
            metadata=dict(self.metadata),
            image_data=list(self.image_data),
            vision_msg_vllm=copy.deepcopy(self.vision_msg_vllm),
            on_tokens=None,
        )

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        slots = {slot.name: getattr(self, slot.name) for slot in fields(self)}
        return None, {**slots, "on_tokens": None}


@dataclass(slots=True)
class ModelResponse:
    """One finished generation: a log-probability and a weight version per output token."""

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: StopReason
    tokenizer: Any = None
    latency: float = 0.0  # seconds from request to last token
    ttft: float = 0.0  # seconds to the first token
    processor: Any = None  # the request's
    cached_tokens: int = 0  # of the prompt, found in the server's cache; 0 if it does not tell
    # With rollout.return_routed_experts: the experts of each token but the last, uint8 or int16
    # [input_len + output_len - 1, layers with experts, experts per token].
    routed_experts: np.ndarray | None = None

    def __post_init__(self) -> None:
        lengths = len(self.output_tokens), len(self.output_logprobs), len(self.output_versions)
        if len(set(lengths)) != 1:
            raise ValueError(
                "output_tokens, output_logprobs and output_versions must have one length, "
                f"got {lengths}"
            )

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)

    @property
    def end_with_stop(self) -> bool:
        """Whether the last token is the tokenizer's EOS or PAD."""
        return bool(self.output_tokens) and self.output_tokens[-1] in self._stop_tokens()

    @property
    def output_tokens_without_stop(self) -> list[int]:
        """The output less its trailing EOS/PAD tokens."""
        stops = self._stop_tokens()
        if self.stop_reason == "stop" and not self.end_with_stop:
            raise ValueError("stop_reason is 'stop' but the output does not end with EOS or PAD")
        end = self.output_len
        while end and self.output_tokens[end - 1] in stops:
            end -= 1
        if not end and self.output_tokens:
            raise ValueError("the output holds nothing but stop tokens")
        return self.output_tokens[:end]

    def _stop_tokens(self) -> set[int]:
        if self.tokenizer is None:
            raise ValueError("this response carries no tokenizer, so its stop tokens are unknown")
        return {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id} - {None}


@dataclass(slots=True)
class Sample:
    """One sample of a group: a `ModelResponse` in arrays, as long as its output."""

    tokens: np.ndarray  # [T] integers
    logprobs: np.ndarray  # [T] floats
    versions: np.ndarray  # [T] integers
    stop_reason: StopReason
    routed_experts: np.ndarray | None = None  # as in ModelResponse

    @classmethod
    def of(cls, response: ModelResponse) -> Sample:
        return cls(
            np.array(response.output_tokens, np.int32),
            np.array(response.output_logprobs, np.float32),
            np.array(response.output_versions, np.int32),
            response.stop_reason,
            response.routed_experts,
        )


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Name, shape and dtype of one weight in its transport format."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's short name: "float32", "bfloat16"

    @property
    def size(self) -> int:
        """Bytes."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}[self.dtype]


@dataclass(frozen=True, slots=True)
class WeightUpdateMeta:
    """Request to move weights of `version` from a training to an inference engine.

    `direct` passes tensors within one process; `shm` and `disk` publish a folder of buckets with a
    checksum manifest, in memory or on disk, that the receiver verifies before loading;
    `delta` publishes on disk what changed since the previous version;
    `ipc` publishes their addresses on a GPU that both processes use;
    `xccl` sends them from device to device through a process group that both engines join.
    """

    type: WeightTransport
    version: int = 0
    path: str = ""  # folder of this publication; empty for `direct` and `xccl`
    weight_chunked_mem_mb: int = 1024
    recompute_kv: bool = True  # False keeps KV-cache entries of older weights
    clear_checkpoint_after_load: bool = True
    gen_allocation: ModelAllocation | None = None  # the receiver: its ranks join the group
    nccl_master_address: str = "127.0.0.1"
    nccl_master_port: int | None = None  # None: chosen when the group is opened
    nccl_group_name: str = "update_weight_group"
    # Adapters alone travel, to a receiver that has the weights they were made for, as
    # `{lora_name}-v{version}`; the factor on their product is lora_alpha / rank.
    use_lora: bool = False
    lora_name: str = "policy"
    lora_alpha: float = 16.0
    key: str = field(default="", repr=False)  # authenticates a publication

    def __post_init__(self) -> None:
        known = get_args(WeightTransport)
        if self.type not in known:
            raise ValueError(
                f"type: unknown weight transport {self.type!r}, expected one of {known}"
            )
        if self.type == "xccl" and self.gen_allocation is None:
            raise ValueError("gen_allocation: xccl needs to know the layout of the receiver")
        if self.use_lora and (not self.lora_name or not self.lora_alpha > 0):
            raise ValueError(
                "use_lora: adapters travel with a lora_name and a lora_alpha above 0, got "
                f"{self.lora_name!r} and {self.lora_alpha!r}"
            )

    @classmethod
    def from_disk(cls, root: str | Path, **options: Any) -> WeightUpdateMeta:
        return cls(type="disk", path=str(root), **options)

    @classmethod
    def from_fsdp_xccl(cls, gen_allocation: ModelAllocation, **options: Any) -> WeightUpdateMeta:
        return cls(type="xccl", gen_allocation=gen_allocation, **options)

    # The engines differ in how they gather a tensor, not in the update they are asked for.
    from_megatron_xccl = from_fsdp_xccl

    @classmethod
    def from_awex(cls, *args: Any, **options: Any) -> WeightUpdateMeta:
        raise ValueError(
            "awex is not part of areal: use from_fsdp_xccl between devices, from_disk between "
            "machines, or weight_update_mode direct or shm on one machine"
        )

    def with_version(self, version: int) -> WeightUpdateMeta:
        """The same update for `version`, in a sibling folder `weight_update_v{version}`."""
        if self.type in ("direct", "xccl"):
            return replace(self, version=version)
        folder = Path(self.path)
        root = folder.parent if folder.name.startswith("weight_update_v") else folder
        return replace(self, version=version, path=str(root / f"weight_update_v{version}"))


@dataclass(frozen=True, slots=True)
class SaveLoadMeta:
    """Where and how an engine saves or loads. `hf` is for export, `dcp` resumes a run."""

    path: str
    weight_format: Literal["hf", "dcp"]
    with_optim: bool = False
    tokenizer: Any = None  # saved beside the weights (`hf`)
    processor: Any = None  # saved beside the weights (`hf`)
    base_model_path: str | None = None  # files beside the weights come from here; None: the model's


@dataclass(frozen=True, slots=True)
class FinetuneSpec:
    """How long the training is, for the learning-rate schedule."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int
    max_train_steps: int | None = None  # of the config, if shorter

    @property
    def steps_per_epoch(self) -> int:
        return self.dataset_size // self.train_batch_size

    @property
    def total_train_steps(self) -> int:
        steps = self.total_train_epochs * self.steps_per_epoch
        return steps if self.max_train_steps is None else min(steps, self.max_train_steps)


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Position of a step in the run. `global_step` counts from 0."""

    epoch: int
    epoch_step: int
    global_step: int
    steps_per_epoch: int

    def next(self) -> StepInfo:
        last = self.epoch_step == self.steps_per_epoch - 1
        return StepInfo(
            epoch=self.epoch + int(last),
            epoch_step=0 if last else self.epoch_step + 1,
            global_step=self.global_step + 1,
            steps_per_epoch=self.steps_per_epoch,
        )


@dataclass(frozen=True, slots=True)
class RolloutStat:
    """Counters of the staleness manager, in groups."""

    enqueued: int = 0  # ever admitted
    running: int = 0
    accepted: int = 0  # finished and either trained on or waiting to be
    rejected: int = 0  # filtered, failed or stale: their slots are free again


@dataclass(frozen=True, slots=True)
class LocalInfServerInfo:
    """A server this process started and must end."""

    host: str
    port: int
    process: Any  # `process.terminate()` ends it


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One call of an inference server, in the format of its adapter."""

    endpoint: str  # "/generate"
    payload: dict[str, Any]
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class HttpGenerationResult:
    """An adapter's reading of a server's reply. An untrainable reply is rejected."""

    output_tokens: list[int]
    output_logprobs: list[float]
    stop_reason: StopReason | None  # None: more follows
    cached_tokens: int = 0  # of the prompt, if the reply tells

    def __post_init__(self) -> None:
        check_tokens(self.output_tokens)
        check_logprobs(self.output_logprobs)
        check_lengths(self.output_tokens, self.output_logprobs)
        if type(self.cached_tokens) is not int or self.cached_tokens < 0:
            raise ValueError(f"cached_tokens: expected a count, got {self.cached_tokens!r:.40}")


Trajectory = Mapping[str, Any]


MAX_LOGPROB = 1e-3  # float rounding of a probability of 1
MIN_SAMPLED_LOGPROB = -1000.0
_VERSION_END = 1 << 31  # trajectories store int32
_TOKEN_END = 1 << 63


def check_tokens(tokens: Any, *, vocab_size: int | None = None) -> None:
    """Any length. Checked by type and extremes, not one by one: outputs are long."""
    end = _TOKEN_END if vocab_size is None else vocab_size
    if not _is_list_of(tokens, {int}):
        raise ValueError(f"output_tokens: expected a list of token ids, got {_shown(tokens)}")
    if tokens and not (min(tokens) >= 0 and max(tokens) < end):
        raise ValueError(
            f"output_tokens: token ids must lie in 0 .. {end - 1}, got {_shown(min(tokens))} .. "
            f"{_shown(max(tokens))}"
        )


def check_token(token: int, *, vocab_size: int) -> None:
    """The largest of an output whose tokens are token ids."""
    if token >= vocab_size:
        raise ValueError(
            f"output_tokens: token ids must lie in 0 .. {vocab_size - 1}, got {_shown(token)}"
        )


def check_logprobs(logprobs: Any, *, low: float = MIN_SAMPLED_LOGPROB) -> None:
    if not _is_list_of(logprobs, {int, float}):
        raise ValueError(f"output_logprobs: expected a list of numbers, got {_shown(logprobs)}")
    # Comparisons with NaN are false, so minimum and maximum do not reveal it.
    if logprobs and not (_has_finite_sum(logprobs) and low <= min(logprobs)):
        wrong = next((p for p in logprobs if not low <= p < math.inf), None)
        if wrong is not None:
            raise ValueError(
                f"output_logprobs: expected finite numbers of at least {low:g}, got {_shown(wrong)}"
            )
    if logprobs and max(logprobs) > MAX_LOGPROB:
        raise ValueError(
            f"output_logprobs: a log-probability lies at or below 0 (rounding: {MAX_LOGPROB:g}), "
            f"got {_shown(max(logprobs))}"
        )


def check_lengths(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    if len(tokens) != len(logprobs):
        raise ValueError(
            f"output_logprobs: expected one per output token, got {len(logprobs)} for {len(tokens)}"
        )


def check_amount(num_tokens: int, stop_reason: str | None, *, max_tokens: int) -> None:
    """`stop_reason` None: the reply is not complete yet."""
    if num_tokens > max_tokens:
        raise ValueError(f"output_tokens: got {num_tokens} tokens, {max_tokens} were requested")
    if num_tokens == 0 and stop_reason in ("stop", "length"):
        raise ValueError(f"output_tokens: got none, though the request ended with {stop_reason!r}")


def check_versions(versions: Any, *, newest: int | None = None, first: int = 0) -> None:
    """For consecutive tokens of one server; `newest` is the version sent last, `first` that of the
    preceding token."""
    if not _is_list_of(versions, {int}):
        raise ValueError(f"output_versions: expected a list of integers, got {_shown(versions)}")
    end = _VERSION_END if newest is None else newest + 1
    if len(versions) == 1 and 0 <= first <= versions[0] < end:
        return
    if versions and not (min(versions) >= 0 and max(versions) < end):
        raise ValueError(
            f"output_versions: versions 0 .. {end - 1} exist, got {_shown(min(versions))} .. "
            f"{_shown(max(versions))}"
        )
    if versions and (versions[0] < first or sorted(versions) != versions):
        raise ValueError("output_versions: versions must not decrease")


def _is_list_of(value: Json, kinds: set[type]) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= kinds


def _has_finite_sum(values: Sequence[float]) -> bool:
    """True implies that all values are finite; the converse does not hold."""
    try:
        return math.isfinite(sum(values))
    except OverflowError:  # an integer larger than any float
        return False


def _shown(value: Json) -> str:
    if isinstance(value, int) and abs(value) >= _TOKEN_END:
        return "an integer beyond 64 bits"
    text = repr(value[:8] if isinstance(value, list | str) else value)
    return f"{text[:60]}..." if len(text) > 60 else text
