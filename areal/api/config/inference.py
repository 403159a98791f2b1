"""Sections about generation: process limits, agents, sampling, rollout.

`ProcessLimits` bounds processes that run user code: reward functions, and agents in `subproc` mode.

`GenerationHyperparameters` is the `gconfig` section. Its three `to_openai_*` methods return keyword
arguments of the `openai` client's `chat.completions.create` and `responses.create`, and of the
Agents SDK's `ModelSettings`. An option that such an interface does not have goes into `extra_body`
under its name here, if it is set; only the bound on prompt plus output is renamed, because
`max_tokens` is OpenAI's old name for the output bound. What a request cannot express is rejected: a
group where one call returns one reply, and `lora_name`, which the `model` argument selects.
`reward_normalization` and `drop_incomplete_group` apply to a group and are not sent.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.section import (
    config_section,
    expand_path,
    require,
    require_above,
    require_at_least,
    require_fraction,
)
from areal.api.config.train_engine import check_inference_backend
from areal.api.scheduler_api import SchedulingSpec, SchedulingStrategy

KEYS = [
    *("~/.ssh", "~/.gnupg", "~/.aws", "~/.azure", "~/.config/gcloud", "~/.kube", "~/.docker"),
    *("~/.netrc", "~/.git-credentials", "~/.pypirc", "~/.npmrc", "~/.pgpass", "~/.my.cnf"),
]


@config_section
class ProcessLimits:
    """Limits of a process. SECURITY.md says how they are enforced, and what they do not cover."""

    memory_gb: float = 8.0
    """Memory of one process, in GiB; beyond it a MemoryError, or the process is killed."""
    cpu_seconds: float | None = None
    """CPU time of one call over all its threads and processes. Default: four times its time."""
    file_size_mb: int = 1024
    """Largest file it may write, in MiB."""
    disk_mb: int = 4096
    """Size of its $TMPDIR, in MiB; beyond it the process is killed."""
    max_processes: int = 0
    """Processes it may start besides threads."""
    network: bool = True
    """Whether it may open internet sockets. Unix sockets it may never open."""
    writable: list[str] = field(default_factory=list)
    """Folders it may write in, besides a temporary one of its own ($TMPDIR)."""
    unreadable: list[str] = field(default_factory=lambda: [*KEYS])
    """Files and folders it may not read, besides the run's own folder. Default: where credentials
    are stored (~/.ssh, ~/.aws, ~/.netrc and their like)."""
    env: list[str] = field(default_factory=list)
    """Environment variables it gets besides PATH, HOME and the like (JUDGE_API_KEY)."""

    def __post_init__(self) -> None:
        require_above(0, memory_gb=self.memory_gb, cpu_seconds=self.cpu_seconds)
        require_at_least(1, file_size_mb=self.file_size_mb, disk_mb=self.disk_mb)
        require_at_least(0, max_processes=self.max_processes)
        self.writable = [expand_path("writable", path) for path in self.writable]
        self.unreadable = [expand_path("unreadable", path) for path in self.unreadable]


@config_section
class AgentConfig:
    """Where an agent's code runs, and how its completions become samples."""

    mode: Literal["inline", "subproc", "online"] = "inline"
    """Where an agent runs: `inline` in the controller's event loop, `subproc` in processes of its
    own, `online` outside: clients drive the sessions and `workflow` is not used."""
    export_style: Literal["individual", "concat"] = "individual"
    """What a sample is: `individual` every completion, `concat` a whole chat."""
    chat_template_type: Literal["hf", "concat"] = "concat"
    """How the next turn's prompt is made: `concat` from the tokens of the turn before, as they were
    sampled, `hf` by the chat template alone."""
    turn_discount: float = 1.0
    """Share of a completion's reward that the completion before it gets as well."""
    tool_call_parser: str = "auto"
    """How tool calls are read from a reply: the name of a format (`hermes`, `qwen`, `qwen3_coder`,
    `llama3_json`, `pythonic`, `mistral`, `deepseek_v3`, `glm45`, `kimi_k2`, `gpt-oss`), or `auto`:
    that of the model's chat template."""
    reasoning_parser: str = "auto"
    """How reasoning is told apart from a reply's content: by the marks of the tool call format
    (`auto`), by others (`qwen3`, `deepseek-r1`, `mistral`), or not at all (`none`)."""
    drop_retry_orphans: bool = False
    """Leave out completions that were requested again with the same messages."""
    prefix_matcher: str | None = None
    """Import path of a function (prefix, messages) -> bool that says whether messages continue a
    chat. Default: equal roles, texts and tool calls."""
    session_timeout_seconds: float = 3600.0
    """An episode that takes longer has failed."""
    subproc_max_workers: int = 4
    """Processes of `subproc`; each runs one episode at a time."""
    limits: ProcessLimits | None = None
    """Limits of a process of `subproc`. Default: no limits."""
    host: str = "127.0.0.1"
    """Address that the server for agents listens on; `0.0.0.0` for containers and other machines.
    Every request needs a key."""
    port: int = 0
    """Port of the server for agents. 0: a free port."""
    advertise_url: str | None = None
    """Where agents reach that server, as `http://NAME:PORT`. Default: made from `host` and `port`;
    for `0.0.0.0` with this machine's address."""
    max_sessions: int | None = None
    """Most sessions open at a time in one server: further episodes wait, clients of `online` get
    status 429. Default: no limit of its own."""
    max_body_mb: float = 64.0
    """A larger request is refused with status 413."""
    request_timeout_seconds: float = 3600.0
    """A call to the model that takes longer fails with status 504."""
    image_folders: list[str] = field(default_factory=list)
    """Folders below which images are read that an agent names as `file://` URLs. Default: only
    `data:` URLs are taken."""
    max_image_mb: float = 512.0
    """Images that one session may show, each counted once, in MB of their encoded bytes. They are
    kept with the run. One beyond that is refused with status 413."""
    set_reward_finish_timeout: float = 0.0
    """`online`: seconds that a reward may come late. A session that ended without one waits this
    long for it, and one that has its reward ends after this long without a request. 0: rewards come
    before `/rl/end_session`, which alone ends a session."""

    def __post_init__(self) -> None:
        require(
            self.export_style == "individual" or self.chat_template_type == "concat",
            "chat_template_type must be concat for export_style: concat (or leave it out)",
            self.chat_template_type,
        )
        require_fraction(turn_discount=self.turn_discount)
        require_above(0, session_timeout_seconds=self.session_timeout_seconds)
        require_at_least(1, subproc_max_workers=self.subproc_max_workers)
        require(
            self.limits is None or self.limits.network,
            "limits.network must be true: an agent talks to the model over HTTP",
            False,
        )
        require(0 <= self.port < 65536, "port must lie between 0 and 65535", self.port)
        require(bool(self.host), "host must be an address, like 127.0.0.1 or 0.0.0.0", self.host)
        require_at_least(1, max_sessions=self.max_sessions)
        require_above(
            0,
            max_body_mb=self.max_body_mb,
            max_image_mb=self.max_image_mb,
            request_timeout_seconds=self.request_timeout_seconds,
        )
        require_at_least(0, set_reward_finish_timeout=self.set_reward_finish_timeout)
        self._check_advertise_url()

    def _check_advertise_url(self) -> None:
        if self.advertise_url is None:
            return
        try:
            parts = urlsplit(self.advertise_url)
            is_address = parts.port is None or parts.port > 0  # ValueError for no number
        except ValueError:
            parts, is_address = None, False
        require(
            parts is not None
            and is_address
            and parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and not (parts.query or parts.fragment or parts.username),
            "advertise_url must be an address like http://NAME:PORT",
            self.advertise_url,
        )
        self.advertise_url = self.advertise_url.rstrip("/").removesuffix("/v1")


@config_section
class GenerationHyperparameters:
    """Sampling options of one request, and the group size of a prompt."""

    n_samples: int = 1
    """Samples per prompt: the size of a group."""
    max_new_tokens: int = 16384
    """Most tokens to generate."""
    min_new_tokens: int = 0
    """Stop tokens are not sampled before this many tokens."""
    max_tokens: int = 32768
    """Most tokens of prompt and output together."""
    greedy: bool = False
    """Always take the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities reach this sum."""
    top_k: int = 100_000_000
    """Keep this many most likely tokens."""
    temperature: float = 1.0
    """Divides the logits before sampling."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Generation ends after one of these."""
    ignore_eos: bool = False
    """Continue after the model's end token; `stop_token_ids` still apply."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text of an OpenAI-style reply."""
    stop: list[str] | None = None
    """Generation ends once the text contains one of these."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was generated, between -2 and 2."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that was generated before, between -2 and 2."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens of the prompt and the output; above
    0, at most 2."""
    min_p: float = 0.0
    """Keep the tokens whose probability is at least this share of the largest one."""
    logit_bias: dict[str, float] = field(default_factory=dict)
    """Added to the logits of these tokens, by id, between -100 and 100."""
    seed: int | None = None
    """Seed of this request's samples, whatever else is in the batch."""
    lora_name: str = ""
    """The adapter to generate with. Default: none, the model itself."""
    use_beam_search: bool = False
    """Must stay false: a beam search does not sample, so its log-probabilities cannot be trained
    on."""
    reward_normalization: bool = False
    """Subtract the group's mean from the rewards and divide by its standard deviation, before
    anything else uses them; the raw rewards are kept as `original_rewards`."""
    drop_incomplete_group: bool = False
    """Reject a group of which the workflow rejected a sample. Default: keep the others."""

    def __post_init__(self) -> None:
        require(self.n_samples >= 1, "n_samples must be at least 1", self.n_samples)
        require(self.max_new_tokens >= 1, "max_new_tokens must be at least 1", self.max_new_tokens)
        require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens must lie between 0 and max_new_tokens",
            self.min_new_tokens,
        )
        require(0 < self.top_p <= 1, "top_p must lie in (0, 1]", self.top_p)
        require(self.top_k >= 1, "top_k must be at least 1", self.top_k)
        require(
            0 < self.temperature < float("inf"),
            "temperature must be above 0 (set greedy=true for the most likely token)",
            self.temperature,
        )
        require(
            -2 <= self.frequency_penalty <= 2,
            "frequency_penalty must lie between -2 and 2",
            self.frequency_penalty,
        )
        require(
            -2 <= self.presence_penalty <= 2,
            "presence_penalty must lie between -2 and 2",
            self.presence_penalty,
        )
        require(
            0 < self.repetition_penalty <= 2,
            "repetition_penalty must lie in (0, 2]",
            self.repetition_penalty,
        )
        require(0 <= self.min_p <= 1, "min_p must lie between 0 and 1", self.min_p)
        self.logit_bias = {str(token): value for token, value in self.logit_bias.items()}
        require(
            all(token.isascii() and token.isdecimal() for token in self.logit_bias)
            and all(-100 <= value <= 100 for value in self.logit_bias.values()),
            "logit_bias must map token ids to numbers between -100 and 100",
            self.logit_bias,
        )
        require(
            self.stop is None or all(self.stop),
            "stop must hold texts of at least one character",
            self.stop,
        )
        require(
            not self.use_beam_search,
            "use_beam_search must be false: sampled log-probabilities are undefined under beam "
            "search",
            self.use_beam_search,
        )

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """A copy with `changes`."""
        own = {
            "stop_token_ids": list(self.stop_token_ids),
            "stop": None if self.stop is None else list(self.stop),
            "logit_bias": dict(self.logit_bias),
        }
        return replace(self, **{**own, **changes})

    def with_seed(self, seed: int | None) -> GenerationHyperparameters:
        """A copy with this seed that shares lists and is not checked again: one per sample."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.seed = seed
        return twin

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> GenerationHyperparameters:
        """A copy that also stops at the tokenizer's EOS and PAD."""
        ids = {*self.stop_token_ids, tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}
        return self.new(stop_token_ids=sorted(ids))

    def to_openai_completions_args_dict(self) -> dict[str, Any]:
        """Arguments of `client.chat.completions.create`, besides `model` and `messages`."""
        named = {"n_samples", "frequency_penalty", "presence_penalty", "logit_bias", "stop", "seed"}
        return self._openai_args("max_completion_tokens", named)

    def to_openai_responses_args_dict(self) -> dict[str, Any]:
        """Arguments of `client.responses.create`, besides `model` and `input`."""
        return self._openai_args("max_output_tokens", set())

    def to_openai_agents_model_settings_dict(self) -> dict[str, Any]:
        """Arguments of the Agents SDK's `ModelSettings`."""
        return self._openai_args("max_tokens", {"frequency_penalty", "presence_penalty"})

    def _openai_args(self, max_output: str, named: set[str]) -> dict[str, Any]:
        """`max_output`: the interface's name for the output bound; `named`: its other options."""
        self._check_one_call(may_have_n="n_samples" in named)
        args = {
            max_output: self.max_new_tokens,
            "temperature": 0.0 if self.greedy else self.temperature,
            "top_p": self.top_p,
        }
        if "n_samples" in named:
            args["n"] = self.n_samples
        extra = {}
        defaults = GenerationHyperparameters()
        for option, name in _SENT_WHEN_SET.items():
            value = getattr(self, option)
            if value != getattr(defaults, option):
                (args if option in named else extra)[name] = value
        return {**args, "extra_body": extra} if extra else args

    def _check_one_call(self, *, may_have_n: bool) -> None:
        require(
            self.n_samples == 1 or may_have_n,
            "n_samples must be 1, because one call of this interface returns one reply (the "
            "samples of a group are episodes of their own: use gconfig.new(n_samples=1))",
            self.n_samples,
        )
        require(
            not self.lora_name,
            "lora_name must be empty here: an OpenAI interface chooses the adapter by `model`",
            self.lora_name,
        )


# Options without effect at their default -> their name in a request.
_SENT_WHEN_SET = {
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_p": "min_p",
    "logit_bias": "logit_bias",
    "stop": "stop",
    "seed": "seed",
    "top_k": "top_k",
    "min_new_tokens": "min_new_tokens",
    "max_tokens": "max_total_tokens",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
}


@config_section
class InferenceEngineConfig:
    """How many episodes run at once, how old their weights may be, what a failure costs."""

    backend: str = "native:d1"
    """Engine and parallel layout, like `native:d1`; `native:d2` starts two servers, `native:d1t2`
    shards the model over two processes, one device each. `vllm` and `sglang` are stock servers,
    which also take pipeline stages: `vllm:d2t2p2` starts two servers of four devices."""
    api_url: list[str] = field(default_factory=list)
    """Addresses of running servers, like `http://host:8000`, one for each of the d servers of
    `backend`: they are used instead of new ones, and neither started nor ended by the run. Their
    token is read from the variable AREAL_SERVER_TOKEN."""
    max_concurrent_rollouts: int | None = None
    """Most prompts in flight. Default: as many as staleness allows, (max_head_offpolicyness + 1)
    times consumer_batch_size."""
    consumer_batch_size: int | None = None
    """Prompts one training step takes. Default: train_dataset.batch_size."""
    max_head_offpolicyness: int = 0
    """A token sampled by weights more than this many versions old is never trained on. 0 is
    synchronous training."""
    max_failure_ratio: float = 0.1
    """The run stops when a larger share of episodes fails."""
    request_timeout: float = 3600.0
    """Timeout of a generation in seconds, not counting phases of training on a shared device; also
    the longest time without a finished group."""
    request_retries: int = 3
    """Times a failed episode or request is tried again."""
    setup_timeout: float = 300.0
    """Timeout of the server's start, in seconds."""
    dump_to_file: bool = False
    """Write every trajectory as text under the run's logs, and keep agents' episodes there for
    `areal export`."""
    workers: int = 0
    """Processes that run the episodes, each with an event loop of its own: beside the controller,
    with Ray on whatever machines have a CPU for them. 0: the controller's event loop runs them,
    which handles more than a thousand samples a second."""
    recompute_kv: bool = True
    """After a weight update, recompute the cache of running requests with the new weights."""
    use_lora: bool = False
    """With actor.use_lora, send servers the adapters alone, each version under a name of its own,
    instead of merged weights. Native servers on the CPU of this machine get them in any case."""
    lora_name: str = "policy"
    """The run's adapter on its servers; version 7 of it is called `policy-v7`."""
    return_routed_experts: bool = False
    """Router replay: the native engine returns the experts of each token, and the actor trains with
    them instead of those its own routers choose. For a mixture of experts with actor.backend
    archon."""
    scheduling_spec: list[SchedulingSpec] = field(default_factory=list)
    """With Ray, what each server needs of its machine: one entry for all servers, or one for each.
    Default: a CPU for each of its threads, and a GPU for each of its processes."""
    scheduling_strategy: SchedulingStrategy = field(default_factory=SchedulingStrategy)
    """Its own devices, or those of a model, time-shared: `{type: colocation, target: actor}`. While
    one uses the devices, the other is offloaded to host memory."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """How agents run that talk to the model over HTTP."""

    def __post_init__(self) -> None:
        require_at_least(
            1,
            max_concurrent_rollouts=self.max_concurrent_rollouts,
            consumer_batch_size=self.consumer_batch_size,
        )
        require_at_least(
            0,
            max_head_offpolicyness=self.max_head_offpolicyness,
            workers=self.workers,
            request_retries=self.request_retries,
        )
        require_fraction(max_failure_ratio=self.max_failure_ratio)
        require_above(0, request_timeout=self.request_timeout, setup_timeout=self.setup_timeout)
        require(bool(self.lora_name), "lora_name must not be empty", self.lora_name)
        check_inference_backend(self.backend)
        layout, count = (self.num_servers, self.ranks_per_server), len(set(self.addresses))
        require(
            count == 0 or layout == (count, 1),
            f"backend must be '{self.engine}:d{count}' for the servers of api_url",
            self.backend,
        )

    @property
    def takes_adapters(self) -> bool:
        """Whether the servers get adapters alone, of an actor that trains some; native ones where
        they can."""
        return self.use_lora or self.engine == "native"

    @property
    def addresses(self) -> list[str]:
        """Of the servers of `api_url`, as host:port."""
        return [_host_and_port(url) for url in self.api_url]

    @property
    def engine(self) -> str:
        """native, vllm or sglang."""
        return ModelAllocation.from_str(self.backend).backend

    @property
    def num_servers(self) -> int:
        return ModelAllocation.from_str(self.backend).parallel.data_parallel_size

    @property
    def tensor_parallel(self) -> int:
        """Ranks that one server shards each layer over."""
        return ModelAllocation.from_str(self.backend).parallel.tensor_parallel_size

    @property
    def pipeline_parallel(self) -> int:
        """Stages of one server's model; 1 unless it is a stock server."""
        return ModelAllocation.from_str(self.backend).parallel.pipeline_parallel_size

    @property
    def ranks_per_server(self) -> int:
        """Processes that share one server's model, one device each."""
        return self.tensor_parallel * self.pipeline_parallel


def _host_and_port(url: str) -> str:
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        port = parts.port  # ValueError for no number
    except ValueError:
        parts, port = urlsplit(""), None
    require(
        parts.scheme == "http"
        and bool(parts.hostname and port)
        and parts.path.strip("/") in ("", "v1")
        and not (parts.query or parts.fragment or parts.username),
        "api_url must hold addresses like http://host:8000",
        url,
    )
    return f"{parts.hostname}:{port}"
