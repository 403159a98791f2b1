"""Output tokens per second of the native engine on one GPU, beside what the hardware allows.

    python benchmark/generation.py [--only ROW ...] [--json FILE]

Random weights in the shapes of Qwen2.5 1.5B and 7B, of Qwen3 30B-A3B (128 experts), of Gemma 3 1B
and of Qwen3.5 0.8B (whose steps also read and write states), bfloat16 (rows of `_fp8`: weights and
cache in FP8), temperature 1, the log-probability of every sampled token returned, time from the
first request to the last token (prefill included). The limit of a row counts the bytes and
operations its steps cannot avoid, at the copy bandwidth and the matrix rate measured in the same
run; rows choose their experts evenly, and only chosen ones are read. `1.5b_group_tail` also says
which share of the time the device had nothing to do, `1.5b_http_ratio` compares the same work
through the server (its client in a process of its own), `1.5b_update_stall_ms` how long it stands
still for new weights (which FP8 quantizes), `1.5b_turns_128x6` goes through dialogues that begin in
the cache, `1.5b_invariant_ratio` the speed of batch-invariant numerics over the usual ones.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from report import Row, print_table, write_json

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.engine.native.engine import NativeEngine
from areal.engine.native.loop import EngineLoop
from areal.engine.native.sequence import Finished, GenRequest
from areal.engine.native.state_cache import state_bytes
from areal.engine.remote.native import NativeRemoteEngine
from areal.models.common.args import DecoderArgs
from areal.models.common.decoder import Decoder
from areal.models.common.fp8 import FP8
from areal.models.hf_io import build_model

_COMMON = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
SHAPES = {
    "1.5b": _COMMON
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": _COMMON
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "30b_a3b": _COMMON
    | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    # Sliding windows in five of six layers, heads of 256, norms after each part of a block.
    "gemma3_1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    # The gated delta rule in three of four layers, gated attention with heads of 256 in the others.
    "qwen3_5_0.8b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "vocab_size": 248320,
        "max_position_embeddings": 32768,
        "rope_theta": 1e7,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}
FP8_SUFFIX = "_fp8"  # of a shape whose weights and cache are FP8
_TOKEN_VARIABLE = "AREAL_BENCHMARK_TOKEN"
Requests = list[tuple[list[int], int]]  # prompt, and length of the output


@dataclass(frozen=True, slots=True)
class Load:
    """`prompts` distinct prompts of `num_in` tokens, `samples` of each."""

    shape: str
    prompts: int
    num_in: int
    num_out: int
    samples: int = 1
    has_tail: bool = False

    @property
    def num_requests(self) -> int:
        return self.prompts * self.samples

    def lengths(self) -> list[int]:
        if not self.has_tail:
            return [self.num_out] * self.num_requests
        # Log-normal with mean `num_out` and a long tail, cut at eight times the mean.
        rng = random.Random(0)
        drawn = (rng.lognormvariate(-0.5, 1.0) * self.num_out for _ in range(self.num_requests))
        return [max(16, min(int(x), 8 * self.num_out)) for x in drawn]

    def requests(self, num_out: int | None = None) -> Requests:
        """The samples of a prompt stand together."""
        rng = random.Random(1)
        prompts = [
            [rng.randrange(1000, 100_000) for _ in range(self.num_in)] for _ in range(self.prompts)
        ]
        lengths = self.lengths() if num_out is None else [num_out] * self.num_requests
        return [(prompts[i // self.samples], n) for i, n in enumerate(lengths)]


LOADS = {
    "1.5b_512_256_1024": Load("1.5b", 512, 256, 1024),
    "1.5b_64_256_256": Load("1.5b", 64, 256, 256),
    "1.5b_1": Load("1.5b", 1, 256, 1024),
    "1.5b_group_tail": Load("1.5b", 32, 2048, 1024, samples=16, has_tail=True),
    "7b_1024_256_512": Load("7b", 1024, 256, 512),
    "7b_64": Load("7b", 64, 256, 512),
    "7b_1": Load("7b", 1, 256, 512),
    "7b_1024_256_512_fp8": Load("7b_fp8", 1024, 256, 512),
    "7b_64_fp8": Load("7b_fp8", 64, 256, 512),
    "7b_1_fp8": Load("7b_fp8", 1, 256, 512),
    "30b_a3b_512_128_256": Load("30b_a3b", 512, 128, 256),
    "30b_a3b_64": Load("30b_a3b", 64, 256, 256),
    "30b_a3b_1": Load("30b_a3b", 1, 256, 512),
    "gemma3_1b_256_512_512": Load("gemma3_1b", 256, 512, 512),
    "qwen3_5_0.8b_256_512_512": Load("qwen3_5_0.8b", 256, 512, 512),
    "qwen3_5_0.8b_64": Load("qwen3_5_0.8b", 64, 256, 256),
}
# Dialogues of 6 turns in step: a prompt of 1,024 tokens, then 128 sampled and 256 added per turn.
CHATS = Load("1.5b", 128, 1024, 128)
NUM_TURNS, TURN_TOKENS = 6, 256
EXTRA = (
    "1.5b_turns_128x6",
    "1.5b_update_stall_ms",
    "1.5b_http_ratio",
    "1.5b_invariant_ratio",
    "7b_update_stall_ms_fp8",
)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device does at best, measured."""

    bytes_per_s: float
    flop_per_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*LOADS, *EXTRA]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="ROW")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    parser.add_argument("--client", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        print(asyncio.run(_time_client(args.client)))
        return 0
    if not torch.cuda.is_available():
        print("benchmark/generation.py needs a CUDA device; none was found", file=sys.stderr)
        return 1
    rows = measure_apart(__file__, args.only) if len(shapes_of(args.only)) > 1 else _run(args.only)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)
    return 0


def shape_of(name: str) -> str:
    shape = next(shape for shape in SHAPES if name.startswith(f"{shape}_"))
    return shape + FP8_SUFFIX * name.endswith(FP8_SUFFIX)


def shapes_of(names: list[str]) -> list[str]:
    return list(dict.fromkeys(map(shape_of, names)))


def measure_apart(script: str, names: list[str]) -> list[Row]:
    """Each shape in a process of its own: none finds the memory of another in use."""
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes_of(names):
            file = Path(folder) / f"{shape}.json"
            wanted = [name for name in names if shape_of(name) == shape]
            subprocess.run(
                [sys.executable, script, "--json", str(file), "--only", *wanted], check=True
            )
            for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
                rows[row["name"]] = Row(**row)
    return list(rows.values())


def _run(names: list[str]) -> list[Row]:
    """All rows of one shape."""
    (shape,) = shapes_of(names)
    ceilings = measure_ceilings(fp8=shape.endswith(FP8_SUFFIX))
    rate = f"matrix_rate{FP8_SUFFIX * shape.endswith(FP8_SUFFIX)}"
    rows = [
        Row("copy_bandwidth", ceilings.bytes_per_s / 1e12, "TB/s"),
        Row(rate, ceilings.flop_per_s / 1e12, "TFLOP/s"),
    ]
    engine = NativeEngine(random_model(shape), max_running=1024)
    for name in names:
        extra = _EXTRA_ROWS.get(name)
        rows += extra(engine, ceilings) if extra else _speed(name, engine, ceilings)
    return rows


def random_model(shape: str) -> Decoder:
    dtype = FP8 if shape.endswith(FP8_SUFFIX) else torch.bfloat16
    model = build_model(SHAPES[shape.removesuffix(FP8_SUFFIX)], device="cuda", dtype=dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    norm = 0.0 if model.args.zero_centered_norms else 1.0
    for name, size in model.hf_shapes().items():
        weight = torch.empty(size, dtype=torch.bfloat16, device="cuda")
        if "norm" in name:
            is_gated = name.endswith("linear_attn.norm.weight")  # never zero-centered
            model.load_hf_tensor(name, weight.fill_(1.0 if is_gated else norm))
        else:
            model.load_hf_tensor(name, weight.normal_(0.0, 0.02, generator=generator))
    return model


def _speed(name: str, engine: NativeEngine, ceilings: Ceilings) -> list[Row]:
    load = LOADS[name]
    warm_up(engine, load)
    with device_clock(engine) as idle_share:
        seconds = generate(engine, load.requests())
    assert not engine.stats()["preemptions"], "the cache is too small for this load"
    tokens = sum(load.lengths())
    limit = tokens / least_seconds(engine.model, load, ceilings)
    return [
        Row(name, tokens / seconds, "tokens/s"),
        Row(f"{name}_limit", limit, "tokens/s"),
        Row(f"{name}_device_idle", idle_share(), "share of the time"),
    ]


def warm_up(engine: NativeEngine, load: Load) -> None:
    """Capture the graphs the load will meet, and compile its prefill."""
    if load.has_tail:
        # From all rows down to one; the few that are left at the end go one by one.
        lengths = [8 + 4 * (i % 64 + i // 64 * (i % 64 == 63)) for i in range(load.num_requests)]
        prompts = [prompt for prompt, _ in load.requests(8)]
        # The short ones are not worth sharing: rows read them alone.
        for of_prompt in (slice(64), slice(None)):
            generate(engine, list(zip((p[of_prompt] for p in prompts), lengths, strict=True)))
    generate(engine, load.requests(num_out=12))
    engine.load_weights(engine.model.named_hf_tensors(), engine.version + 1, recompute_kv=True)


def generate(engine: NativeEngine, requests: Requests, adapters: Sequence[str] = ("",)) -> float:
    """Seconds until all have their tokens."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(engine, requests, adapters)
    return time.perf_counter() - start


def run(
    engine: NativeEngine, requests: Requests, adapters: Sequence[str] = ("",)
) -> list[Finished]:
    """In the order they ended; `rid` is the index of the request, which has the next adapter."""
    for i, (prompt, length) in enumerate(requests):
        options = request_options(length).new(lora_name=adapters[i % len(adapters)])
        engine.add(GenRequest(str(i), prompt, options))
    results = []
    while engine.has_work:
        for done in engine.step():
            assert isinstance(done, Finished)
            assert len(done.output_tokens) == len(done.output_logprobs)
            assert len(done.output_tokens) == requests[int(done.rid)][1]
            results.append(done)
    assert len(results) == len(requests)
    return results


def request_options(length: int) -> GenerationHyperparameters:
    return GenerationHyperparameters(max_new_tokens=length, ignore_eos=True)


@contextmanager
def device_clock(engine: NativeEngine):
    """Times every launch on the device; afterwards the share of time between launches."""
    runner, marks = engine._runner, []

    def timed(method: Callable) -> Callable:
        def call(*args):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record(runner.stream)
            result = method(*args)
            events[1].record(runner.stream)
            marks.append(events)
            return result

        return call

    names = ("prefill", "draw", "decode")
    for name in names:
        setattr(runner, name, timed(getattr(runner, name)))

    def idle_share() -> float:
        torch.cuda.synchronize()
        total = marks[0][0].elapsed_time(marks[-1][1])
        gaps = (
            end.elapsed_time(start) for (_, end), (start, _) in zip(marks, marks[1:], strict=False)
        )
        return sum(max(gap, 0.0) for gap in gaps) / total

    yield idle_share
    for name in names:
        delattr(runner, name)


def least_seconds(model: Decoder, load: Load, ceilings: Ceilings, num_cached: int = 0) -> float:
    """Each decode step reads the weights and the cache once, of layers with a window what is in it,
    and reads and writes the states of its rows; all arithmetic at the matrix rate. `num_cached`
    tokens of each prompt need no prefill."""
    args = model.args
    head = args.vocab_size * args.dim
    num_bytes = 1 if model.has_fp8_cache else 2  # of a number in the blocks and in the cache
    layer_bytes = num_bytes * 2 * args.n_kv_heads * args.head_dim
    windows = [args.window(layer) or sys.maxsize for layer in args.attention_layers]
    row_bytes = 0 if args.delta is None else 2 * state_bytes(args, num_bytes)
    _, used = body_weights(args, 1)
    seconds = 2 * used * load.prompts * (load.num_in - num_cached) / ceilings.flop_per_s
    lengths = sorted(load.lengths())
    done = 0
    for step in range(lengths[-1]):
        while lengths[done] <= step:
            done += 1
        running = len(lengths) - done
        # The samples of a prompt could read its part of the cache once.
        cached = sum(
            running * min(step, window)
            + min(running, load.prompts) * min(load.num_in, max(window - step, 0))
            for window in windows
        )
        read, _ = body_weights(args, running)
        moved = num_bytes * read + 2 * head + cached * layer_bytes + running * row_bytes
        flop = 2 * (used + head) * running
        seconds += max(moved / ceilings.bytes_per_s, flop / ceilings.flop_per_s)
    return seconds


def body_weights(args: DecoderArgs, num_rows: int) -> tuple[float, float]:
    """Numbers in the blocks' matrices that `num_rows` rows read together, and that one row uses.

    Rows choose their experts independently and evenly.
    """
    attention = args.dim * args.head_dim * (2 * args.n_heads + 2 * args.n_kv_heads)
    read = float(len(args.attention_layers) * attention)
    if args.delta is not None:
        sizes = args.delta
        read += len(args.attention_layers) * args.dim * args.head_dim * args.n_heads  # gates
        columns = sum(sizes.widths) + 2 * sizes.widths[2] + 2 * sizes.num_value_heads
        read += len(sizes.layers) * args.dim * columns
    used = read
    for layer in range(args.n_layers):
        if not args.is_sparse(layer):
            read += 3 * args.dim * args.hidden_dim
            used += 3 * args.dim * args.hidden_dim
            continue
        moe = args.expert_args
        chosen = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** num_rows)
        router, expert = moe.num_experts * args.dim, 3 * args.dim * moe.hidden_dim
        read += router + chosen * expert
        used += router + moe.top_k * expert
    return read, used


def measure_ceilings(fp8: bool = False) -> Ceilings:
    source = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = _median_seconds(lambda: target.copy_(source))
    return Ceilings(2 * source.nbytes / copy, 2 * 8192**3 / _median_seconds(square_product(fp8)))


def square_product(fp8: bool) -> Callable[[], torch.Tensor]:
    """Of matrices with 8192 rows and columns."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if not fp8:
        return lambda: a @ b
    x, y, one = a.to(FP8), b.to(FP8).t(), torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _median_seconds(work: Callable[[], object], repeats: int = 20) -> float:
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[repeats // 2]


def _turns(engine: NativeEngine, ceilings: Ceilings) -> list[Row]:
    """The next turn of a dialogue finds its beginning in the cache."""
    said = [prompt for prompt, _ in CHATS.requests()], _turn_tokens()  # drawn before time counts
    _chat(engine, *said)  # captures graphs, compiles
    engine.load_weights(engine.model.named_hf_tensors(), engine.version + 1, recompute_kv=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    num_cached = _chat(engine, *said)
    speed = NUM_TURNS * CHATS.num_requests * CHATS.num_out / (time.perf_counter() - start)
    num_new, least = CHATS.num_out + TURN_TOKENS, 0.0
    for turn in range(NUM_TURNS):
        load = dataclasses.replace(CHATS, num_in=CHATS.num_in + turn * num_new)
        num_kept = load.num_in - num_new if turn else 0
        least += least_seconds(engine.model, load, ceilings, num_kept)
    limit = NUM_TURNS * CHATS.num_requests * CHATS.num_out / least
    return [
        Row("1.5b_turns_128x6", speed, "tokens/s"),
        Row("1.5b_turns_128x6_limit", limit, "tokens/s"),
        Row("1.5b_turns_128x6_cached", num_cached, "of the tokens of later turns' prompts"),
    ]


def _turn_tokens() -> list[list[list[int]]]:
    """What the other side says, by turn and dialogue."""
    rng = random.Random(2)
    return [
        [[rng.randrange(1000, 100_000) for _ in range(TURN_TOKENS)] for _ in range(CHATS.prompts)]
        for _ in range(NUM_TURNS)
    ]


def _chat(engine: NativeEngine, first: list[list[int]], added: list[list[list[int]]]) -> float:
    """All turns of all dialogues; the share of their later prompts that was in the cache."""
    chats = [list(prompt) for prompt in first]
    num_cached = num_prompt = 0
    for turn in range(NUM_TURNS):
        for done in run(engine, [(chat, CHATS.num_out) for chat in chats]):
            chat = chats[int(done.rid)]
            if turn:
                num_cached += done.cached_tokens
                num_prompt += len(chat)
            chat += done.output_tokens
            chat += added[turn][int(done.rid)]
    return num_cached / num_prompt


def _update_stall(engine: NativeEngine, _: Ceilings) -> list[Row]:
    """How long generation stands still for an update under load: the copy, or the quantization."""
    shape, suffix = ("7b", FP8_SUFFIX) if engine.model.has_fp8_cache else ("1.5b", "")
    load = LOADS["1.5b_512_256_1024"]
    weights = [(name, tensor.clone()) for name, tensor in engine.model.named_hf_tensors()]
    for i, (prompt, length) in enumerate(load.requests(num_out=256)):
        engine.add(GenRequest(str(i), prompt, request_options(length)))
    while engine.stats()["tokens_generated"] < 64 * load.num_requests:
        engine.step()
    stalls = []
    for version in range(1, 6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.load_weights(weights, engine.version + version, recompute_kv=False)
        torch.cuda.synchronize()
        stalls.append(time.perf_counter() - start)
        for _ in range(3):
            engine.step()
    while engine.has_work:
        engine.step()
    return [Row(f"{shape}_update_stall_ms{suffix}", 1e3 * sorted(stalls)[2], "ms")]


def _http_ratio(engine: NativeEngine, _: Ceilings) -> list[Row]:
    load = LOADS["1.5b_512_256_1024"]
    warm_up(engine, load)
    alone = generate(engine, load.requests())
    engine.load_weights(engine.model.named_hf_tensors(), engine.version + 1, recompute_kv=True)
    with _served(engine) as address:
        command = [sys.executable, __file__, "--client", address]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    over_http = float(answer.stdout.strip().splitlines()[-1])
    return [Row("1.5b_http_ratio", alone / over_http, "of the speed in process")]


@contextmanager
def _served(engine: NativeEngine):
    """The engine behind its HTTP server, in this process."""
    import uvicorn

    from areal.engine.native.server import bind, create_app

    token = os.environ.setdefault(_TOKEN_VARIABLE, os.urandom(16).hex())
    loop, listener = EngineLoop(engine), bind("127.0.0.1", 0)
    config = uvicorn.Config(create_app(loop, token, model="benchmark"), log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        loop.close()


async def _time_client(address: str) -> float:
    """Seconds for the load of the first row, sent to a server."""
    remote = NativeRemoteEngine([address], os.environ[_TOKEN_VARIABLE])
    remote.initialize()
    requests = LOADS["1.5b_512_256_1024"].requests()
    start = time.perf_counter()
    replies = await asyncio.gather(
        *(
            remote.agenerate(ModelRequest(input_ids=p, gconfig=request_options(n)))
            for p, n in requests
        )
    )
    seconds = time.perf_counter() - start
    assert all(len(r.output_tokens) == n for r, (_, n) in zip(replies, requests, strict=True))
    remote.destroy()
    return seconds


def _invariant_ratio(engine: NativeEngine, _: Ceilings) -> list[Row]:
    load = LOADS["1.5b_64_256_256"]
    warm_up(engine, load)
    usual = generate(engine, load.requests())
    invariant = NativeEngine(engine.model, max_running=64, batch_invariant=True)
    warm_up(invariant, load)
    seconds = generate(invariant, load.requests())
    return [Row("1.5b_invariant_ratio", usual / seconds, "of the usual speed, 64 requests")]


_EXTRA_ROWS = {
    "1.5b_turns_128x6": _turns,
    "1.5b_update_stall_ms": _update_stall,
    "1.5b_http_ratio": _http_ratio,
    "1.5b_invariant_ratio": _invariant_ratio,
    "7b_update_stall_ms_fp8": _update_stall,
}

if __name__ == "__main__":
    sys.exit(main())
