"""Is the native engine right on this GPU? Kernels, log-probabilities, life under load, leaks.

    python benchmark/gpu_check.py [--minutes 10] [--json FILE]

| part    | compared with                                                                          |
|---------|----------------------------------------------------------------------------------------|
| kernels | float64 references on fresh random inputs (the tests of tests/engine/native/cuda)      |
| parity  | the Archon trainer's forward: a mean difference of at most 1.5 times what rounding to  |
|         | bfloat16 makes of the trainer itself, none over 0.1; with batch-invariant numerics     |
|         | none at all                                                                            |
| load    | a float32 forward of the weights of each token's version, across shared prompts,       |
|         | preemption, aborts and weight updates                                                  |
| soak    | itself: `--minutes` of random requests hold no page and no memory at the end           |

Exit code 0 when everything holds. Two rows are no check but say what a difference means:
`parity_*_rounding` is the trainer in bfloat16 against the trainer in float32, `parity_*_sum_order`
a bfloat16 forward against itself when every matrix product adds its terms in another order.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from report import Row, print_table, write_json

from areal.api.config.inference import GenerationHyperparameters
from areal.api.config.train_engine import TrainEngineConfig
from areal.engine.native.cuda import shared_prompts
from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import Finished, GenRequest
from areal.engine.train.archon import ArchonEngine
from areal.models.common.attention import PackedAttention
from areal.models.common.decoder import Decoder, float32_logits
from areal.models.hf_io import build_model, save_hf

ROOT = Path(__file__).resolve().parent.parent
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 0,
}
HEADS_OF_128 = {"model_type": "qwen2", "num_attention_heads": 12, "num_key_value_heads": 2} | {
    "hidden_size": 1536,
    "head_dim": 128,
}

GEMMA = {
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 128,
    "sliding_window_pattern": 4,
}


@dataclass(slots=True)
class Check:
    """A measured number and the bound it must keep; infinity: none."""

    name: str
    value: float
    bound: float
    unit: str

    @property
    def holds(self) -> bool:
        return self.value <= self.bound

    @property
    def row(self) -> Row:
        bound = "" if math.isinf(self.bound) else f", at most {self.bound:.3g}"
        return Row(self.name, self.value, f"{self.unit}{bound}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="length of the soak")
    parser.add_argument("--skip-kernels", action="store_true", help="leave the first part out")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmark/gpu_check.py needs a CUDA device; none was found", file=sys.stderr)
        return 1
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed {seed}")
    rng = random.Random(seed)
    # By its size this load would not make it pay: rows are to read their prompts together here.
    shared_prompts.MIN_SAVED_BYTES = 1
    parts: list[Callable[[], list[Check]]] = [] if args.skip_kernels else [check_kernels]
    parts += [
        lambda: check_parity("heads_64", CONFIG, rng),
        lambda: check_parity("heads_128", CONFIG | HEADS_OF_128, rng),
        lambda: check_parity("gemma3", CONFIG | GEMMA, rng),
        lambda: check_load(rng),
        lambda: check_soak(rng, args.minutes),
    ]
    checks: list[Check] = []
    for part in parts:
        found = part()
        print_table([check.row for check in found])  # one by one: the parts take minutes
        checks += found
    return report(checks, args.json, seed)


def report(checks: list[Check], file: str | None, seed: int) -> int:
    if file:
        write_json(file, [check.row for check in checks], seed=seed)
    broken = [check.name for check in checks if not check.holds]
    print(f"FAILED: {', '.join(broken)}" if broken else "all checks hold")
    return 1 if broken else 0


def check_kernels() -> list[Check]:
    options = ["-q", "-p", "no:cacheprovider", "-m", "gpu or not gpu"]
    command = [sys.executable, "-m", "pytest", *options, "tests/engine/native/cuda"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(answer.stdout[-2000:])
    found = re.findall(r"(\d+) (passed|failed|error)", answer.stdout)
    by_kind = {kind: int(count) for count, kind in found}
    if not by_kind.get("passed"):
        raise RuntimeError(f"the kernel tests did not run: {answer.stdout[-500:]}")
    failures = by_kind.get("failed", 0) + by_kind.get("error", 0)
    return [Check("kernel_comparisons_failed", failures, 0, f"of {by_kind['passed']} passed")]


def random_model(config: dict, seed: int, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    model = build_model(config, device="cuda", dtype=dtype)
    model.init_weights(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0.0, 0.1)
    return model


def random_requests(rng: random.Random, count: int, vocab_size: int, longest: int = 300):
    """Groups of samples, prompts alone, all lengths; every sixth request is greedy."""
    requests, prompt = [], []
    for i in range(count):
        if i % 4 == 0 or not prompt:
            prompt = [rng.randrange(1, vocab_size) for _ in range(rng.randrange(1, longest))]
        options = GenerationHyperparameters(
            max_new_tokens=rng.randrange(1, longest),
            ignore_eos=True,
            greedy=i % 6 == 0,
            seed=rng.randrange(2**62),
        )
        requests.append(GenRequest(f"{rng.randrange(2**62)}", prompt, options))
    return requests


def run(engine: NativeEngine, requests: list[GenRequest]) -> dict[str, Finished]:
    for request in requests:
        engine.add(request)
    done: dict[str, Finished] = {}
    while engine.has_work:
        done |= {finished.rid: finished for finished in engine.step()}
    return done


def check_parity(name: str, config: dict, rng: random.Random) -> list[Check]:
    """Engine and trainer on the same weights, plain and batch-invariant."""
    model = random_model(config, seed=rng.randrange(2**31))
    requests = random_requests(rng, 160, config["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        save_hf(model.named_hf_tensors(), config, folder)
        plain = ParityRun(model, requests, folder, invariant=False)
        trainer = plain.trainer_logprobs()
        rounding = mean_and_max(trainer, plain.trainer_logprobs(dtype="float32"))[0]
        mean, most = mean_and_max(trainer, plain.engine_logprobs())
        sum_order = sum_order_gap(model, rng)  # before the model's products have one order alone
        exact = ParityRun(model, requests, folder, invariant=True)
        exact_mean, exact_most = mean_and_max(exact.trainer_logprobs(), exact.engine_logprobs())
    return [
        Check(f"parity_{name}_rounding", rounding, math.inf, "nats"),
        Check(f"parity_{name}_sum_order", sum_order, math.inf, "nats"),
        Check(f"parity_{name}_plain_mean", mean, 1.5 * rounding, "nats"),
        Check(f"parity_{name}_plain_max", most, 0.1, "nats"),
        Check(f"parity_{name}_invariant_mean", exact_mean, 0.0, "nats"),
        Check(f"parity_{name}_invariant_max", exact_most, 0.0, "nats"),
    ]


class ParityRun:
    """Outputs of the engine, and what engine and trainer say of them."""

    def __init__(self, model: Decoder, requests: list[GenRequest], folder: str, invariant: bool):
        self._folder, self._requests, self._invariant = folder, requests, invariant
        engine = NativeEngine(model, max_running=128, num_pages=8000, batch_invariant=invariant)
        self._done = run(engine, requests)

    def engine_logprobs(self) -> torch.Tensor:
        return torch.tensor(
            [x for request in self._requests for x in self._done[request.rid].output_logprobs]
        )

    def trainer_logprobs(self, dtype: str = "bfloat16") -> torch.Tensor:
        """log p of every output token by ArchonEngine.forward_batch."""
        config = TrainEngineConfig(path=self._folder, dtype=dtype, batch_invariant=self._invariant)
        config.mb_spec.max_tokens_per_mb = 16384
        engine = ArchonEngine(config)
        engine.initialize()
        prompts = [request.input_ids for request in self._requests]
        outputs = [self._done[request.rid].output_tokens for request in self._requests]
        tokens = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
        longest = max(map(len, tokens))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in tokens])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in tokens]).bool()
        logprobs = engine.forward_batch({"input_ids": ids, "attention_mask": mask}).cpu()
        engine.destroy()
        return torch.cat(
            [logprobs[i, len(prompt) - 1 : len(tokens[i]) - 1] for i, prompt in enumerate(prompts)]
        )


def mean_and_max(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    gaps = (a.double() - b.double()).abs()
    return float(gaps.mean()), float(gaps.max())


def sum_order_gap(model: Decoder, rng: random.Random) -> float:
    """Mean difference of log-probabilities that another order of all sums makes."""
    tokens = [rng.randrange(1, model.args.vocab_size) for _ in range(2000)]
    before = next_token_logprobs(model, tokens)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    weights, hooks = [linear.weight.data for linear in linears], []
    for linear in linears:
        order = torch.randperm(linear.in_features, device=linear.weight.device)
        linear.weight.data = linear.weight.data[:, order]
        hooks.append(
            linear.register_forward_pre_hook(lambda _, inputs, order=order: inputs[0][:, order])
        )
    after = next_token_logprobs(model, tokens)
    for linear, weight, hook in zip(linears, weights, hooks, strict=True):
        linear.weight.data = weight
        hook.remove()
    return mean_and_max(before, after)[0]


@torch.no_grad()
def next_token_logprobs(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """[T - 1] float64, by a plain forward."""
    tokens_T = torch.tensor(tokens, device=model.tok_embeddings.weight.device)
    attend = PackedAttention(tokens_T.new_tensor([0, len(tokens)]), len(tokens))
    hidden_TD = model(tokens_T, attend.positions_T, attend)[:-1]
    logprobs_TV = torch.log_softmax(float32_logits(hidden_TD, model.output_weight).double(), -1)
    return logprobs_TV.gather(1, tokens_T[1:, None]).squeeze(1).cpu()


def check_load(rng: random.Random) -> list[Check]:
    """Shared prompts, preemption, aborts and updates of weights, all at once, in float32."""
    seeds = [rng.randrange(2**31) for _ in range(2)]
    models = [random_model(CONFIG, seed, torch.float32) for seed in seeds]
    engine = NativeEngine(
        random_model(CONFIG, seeds[0], torch.float32), num_pages=500, max_running=64
    )
    requests = random_requests(rng, 200, CONFIG["vocab_size"])
    for request in requests:
        engine.add(request)
    done: dict[str, Finished] = {}
    alive = [request.rid for request in requests]
    version = aborted = 0
    while engine.has_work:
        for _ in range(10):
            done |= {finished.rid: finished for finished in engine.step()}
        version += 1
        engine.load_weights(models[version % 2].named_hf_tensors(), version, recompute_kv=True)
        finished = engine.abort(rng.choice(alive))
        if finished is not None:
            done[finished.rid] = finished
            aborted += 1
    worst = max(worst_gap(models, request, done[request.rid]) for request in requests)
    stats = engine.stats()
    if not (stats["preemptions"] and aborted and version > 3):
        raise RuntimeError(f"the load was too light: {stats}, {aborted} aborted, {version} updates")
    lost = len(requests) - len(done)
    return [
        Check("load_max_difference", worst, 2e-3, "nats"),
        Check("load_requests_lost", lost, 0, f"of {len(requests)}"),
    ]


def worst_gap(models: list[Decoder], request: GenRequest, done: Finished) -> float:
    """Against a plain forward with the weights that drew each token."""
    if not done.output_tokens:
        return 0.0
    tokens = request.input_ids + done.output_tokens
    first = len(request.input_ids) - 1
    expected = [next_token_logprobs(model, tokens)[first:].tolist() for model in models]
    return max(
        abs(logprob - expected[version % 2][i])
        for i, (logprob, version) in enumerate(
            zip(done.output_logprobs, done.output_versions, strict=True)
        )
    )


def check_soak(rng: random.Random, minutes: float) -> list[Check]:
    """Requests come, end, are aborted and see new weights; then nothing may be held."""
    model = random_model(CONFIG, seed=0)
    engine = NativeEngine(model, num_pages=6000, max_running=256)
    weights = [(name, tensor.clone()) for name, tensor in model.named_hf_tensors()]
    waiting: set[str] = set()
    begin, end = time.monotonic(), time.monotonic() + 60 * minutes
    settled: tuple[float, float] | None = None
    tokens = 0
    while time.monotonic() < end:
        if len(waiting) < 400:
            for request in random_requests(rng, 40, CONFIG["vocab_size"], longest=500):
                engine.add(request)
                waiting.add(request.rid)
        for finished in engine.step():
            waiting.discard(finished.rid)
            tokens += len(finished.output_tokens)
        if rng.random() < 0.01 and waiting:
            rid = rng.choice(sorted(waiting))
            if engine.abort(rid) is not None:
                waiting.discard(rid)
        if rng.random() < 0.002:
            engine.load_weights(weights, engine.version + 1, recompute_kv=rng.random() < 0.5)
        if settled is None and time.monotonic() - begin > 0.2 * (end - begin):
            settled = memory_in_use()
    before, after = settled or memory_in_use(), memory_in_use()
    while engine.has_work:
        engine.step()
    engine.load_weights(weights, engine.version + 1, recompute_kv=True)
    print(f"soak: {tokens} tokens in {minutes:g} minutes, {engine.stats()}")
    return [
        Check("soak_pages_left", engine.stats()["pages_in_use"], 0, "pages"),
        Check("soak_device_growth", after[0] - before[0], 64, "MiB since a fifth of the time"),
        Check("soak_host_growth", after[1] - before[1], 64, "MiB since a fifth of the time"),
    ]


def memory_in_use() -> tuple[float, float]:
    """MiB held on the device, and the most the process has held on the host."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return torch.cuda.memory_allocated() / 2**20, host


if __name__ == "__main__":
    sys.exit(main())
