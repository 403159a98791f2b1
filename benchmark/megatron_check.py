"""Does backend megatron train right on this GPU? Compared with transformers and with Archon.

    python benchmark/megatron_check.py [--json FILE]

Tiny models of every family, in float32 and bfloat16, on one GPU; needs the extra `megatron`.
Pipelines, virtual or not, need a GPU for each rank, as NCCL takes no two ranks on one: their
losses, gradients and checkpoints are compared on CPUs, in
tests/engine/train/test_megatron_pipeline.py.

| row                  | compared with                                                           |
|----------------------|-------------------------------------------------------------------------|
| FAMILY/f32/logprobs  | transformers: the largest difference of a log-probability               |
| FAMILY/f32/gradients | transformers: the difference of all gradients, relative to their length |
| FAMILY/f32/step_*    | Archon: one GRPO step with AdamW; the norm, and where the weights moved |
| FAMILY/f32/cut       | itself: gradients of one micro-batch and of several                     |
| FAMILY/f32/recompute | itself: gradients with `gradient_checkpointing`                         |
| FAMILY/f32/values    | Archon: the values of a critic drawn from the same seed                 |
| FAMILY/bf16/resume   | itself: weights that differ when a step follows `save` and `load`       |
| FAMILY/bf16/step_*   | Archon, as above                                                        |
| FAMILY/bf16/*        | a float32 model of the same weights: the error, in units of that of     |
|                      | transformers' own bfloat16                                              |

Exit code 0 when all hold.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import Row, print_table, write_json
from transformers import AutoModelForCausalLM

from areal.algorithm.loss import LossInputs, ppo_clip_loss
from areal.api.config.train_engine import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.engine_api import TrainEngine
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta
from areal.engine import train_engine_class
from areal.engine.train.micro_batches import split_micro_batches
from areal.models.hf_io import build_model, save_hf

SHARED = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "hidden_act": "silu",
    "initializer_range": 0.05,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "dtype": "float32",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,  # dense layers between those with experts
        "mlp_only_layers": [],
    },
}
LENGTHS = (7, 120, 33, 64, 200, 17, 90, 51)
FT_SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=1)

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class Check:
    """A measured number and the bound it must keep."""

    name: str
    value: float
    bound: float
    unit: str

    @property
    def holds(self) -> bool:
        return self.value <= self.bound  # not so for NaN

    @property
    def row(self) -> Row:
        return Row(self.name, self.value, f"{self.unit}, at most {self.bound:g}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmark/megatron_check.py needs a CUDA device; none was found", file=sys.stderr)
        return 1
    checks: list[Check] = []
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            found = list(check_family(family, folder))
        print_rows(found)
        checks += found
    if args.json:
        write_json(args.json, [check.row for check in checks])
    broken = [check.name for check in checks if not check.holds]
    print(f"FAILED: {', '.join(broken)}" if broken else "all checks hold")
    return 1 if broken else 0


def print_rows(checks: list[Check]) -> None:
    # A table of three decimals says nothing of differences this small.
    print_table([Row(c.name, c.value, f"{c.unit} ({c.value:.2e})") for c in checks])


def check_family(family: str, folder: str) -> Iterator[Check]:
    write_model(family, folder)
    yield from check_float32(family, folder)
    yield from check_bfloat16(family, folder)


def write_model(family: str, folder: str) -> None:
    config = {"model_type": family, **SHARED, **FAMILIES[family]}
    model = build_model(config, device="cpu", dtype=torch.float32)
    model.init_weights(1)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            # What both sides compute with in bfloat16 is exactly this.
            if weight.ndim == 1:  # norms and biases that are not 1 and 0
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
            weight.copy_(weight.bfloat16())
    save_hf(model.named_hf_tensors(), config, folder)


def check_float32(family: str, folder: str) -> Iterator[Check]:
    name = f"{family}/f32"
    batch = grpo_batch()
    engine = open_engine("megatron:d1", folder, "float32")
    theirs = transformers_model(folder, torch.float32, engine.device)
    apart = (masked(engine.forward_batch(batch), batch) - logprobs(theirs, batch)).abs().max()
    yield Check(f"{name}/logprobs", apart.item(), 1e-3, "nats")
    expected = transformers_gradients(theirs, batch)
    found = engine_gradients(engine, batch)
    yield Check(f"{name}/gradients", distance(found, expected), 1e-3, "relative")
    small = MicroBatchSpec(max_tokens_per_mb=256)
    pieces = open_engine("megatron:d1", folder, "float32", mb_spec=small)
    yield Check(f"{name}/cut", distance(engine_gradients(pieces, batch), found), 1e-4, "relative")
    again = open_engine("megatron:d1", folder, "float32", gradient_checkpointing=True)
    apart = distance(engine_gradients(again, batch), found)
    yield Check(f"{name}/recompute", apart, 1e-4, "relative")
    yield from check_step(name, folder, "float32", norm_bound=1e-4, update_bound=2e-2)
    values = [
        open_engine(f"{backend}:d1", folder, "float32", is_critic=True, init_from_scratch=True)
        .forward_batch(batch)
        .to("cpu")
        for backend in ("megatron", "archon")
    ]
    yield Check(f"{name}/values", (values[0] - values[1]).abs().max().item(), 1e-3, "")


def check_bfloat16(family: str, folder: str) -> Iterator[Check]:
    """Both sides round; ours may not be further from the exact numbers than theirs."""
    name = f"{family}/bf16"
    batch = grpo_batch()
    engine = open_engine("megatron:d1", folder, "bfloat16")
    exact = transformers_model(folder, torch.float32, engine.device)
    rounded = transformers_model(folder, torch.bfloat16, engine.device)
    target = logprobs(exact, batch)
    ours = (masked(engine.forward_batch(batch), batch) - target).abs().mean()
    theirs = (logprobs(rounded, batch) - target).abs().mean()
    yield Check(f"{name}/logprobs", (ours / theirs).item(), 1.5, "times theirs")
    expected = transformers_gradients(exact, batch)
    ours = distance(engine_gradients(engine, batch), expected)
    theirs = distance(transformers_gradients(rounded, batch), expected)
    yield Check(f"{name}/gradients", ours / theirs, 1.5, "times theirs")
    yield from check_step(name, folder, "bfloat16", norm_bound=3e-2, update_bound=0.5)
    yield Check(f"{name}/resume", resume_differences(folder), 0, "weights")


def check_step(
    name: str, folder: str, dtype: str, *, norm_bound: float, update_bound: float
) -> Iterator[Check]:
    """One GRPO step here and by Archon, from the same weights."""
    batch, before = grpo_batch(), None
    moved, norms = [], []
    for backend in ("megatron:d1", "archon:d1"):
        engine = open_engine(backend, folder, dtype)
        before = weights_of(engine)
        stats = engine.train_batch(batch, grpo_loss, loss_tokens)
        assert stats["update_successful"] == 1.0, stats
        norms.append(stats["grad_norm"])
        after = weights_of(engine)
        moved.append({key: after[key] - before[key] for key in before})
    yield Check(f"{name}/step_norm", abs(norms[0] / norms[1] - 1), norm_bound, "relative")
    yield Check(f"{name}/step_update", distance(*moved), update_bound, "relative")


def resume_differences(folder: str) -> float:
    """Tensors that differ after a step: straight on, and by way of a checkpoint."""
    batch = grpo_batch()
    engine = open_engine("megatron:d1", folder, "bfloat16")
    engine.train_batch(batch, grpo_loss, loss_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        place = SaveLoadMeta(
            path=str(Path(scratch) / "state"), weight_format="dcp", with_optim=True
        )
        engine.save(place)
        resumed = open_engine("megatron:d1", folder, "bfloat16")
        resumed.load(place)
    for trained in (engine, resumed):
        trained.train_batch(batch, grpo_loss, loss_tokens)
    ours, theirs = weights_of(engine), weights_of(resumed)
    return float(sum(not torch.equal(ours[key], theirs[key]) for key in ours))


def open_engine(backend: str, folder: str, dtype: str, **changes: Any) -> TrainEngine:
    config = TrainEngineConfig(
        path=folder,
        backend=backend,
        dtype=dtype,
        optimizer=OptimizerConfig(lr=1e-3, lr_scheduler_type="constant", warmup_steps=0),
        **changes,
    )
    engine = train_engine_class(backend)(config)
    engine.initialize(FT_SPEC)
    return engine


def grpo_batch() -> dict[str, torch.Tensor]:
    """Rows of prompts and answers, each answer with its advantage."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    tokens = torch.randint(1, SHARED["vocab_size"], mask.shape, generator=generator)
    answer = mask.roll(-1, 1) & (torch.arange(mask.shape[1]) >= 2)
    answer[:, -1] = False
    advantages = torch.randn(len(LENGTHS), 1, generator=generator).expand(mask.shape)
    return {
        "input_ids": (tokens * mask).int(),
        "attention_mask": mask,
        "loss_mask": answer,
        "advantages": advantages * answer,
    }


def grpo_loss(logprobs_T: torch.Tensor, entropy_T: torch.Tensor, mb: dict) -> torch.Tensor:
    """Of samples as fresh as can be: the ratio is 1, its gradient is not."""
    inputs = LossInputs(logprobs_T, logprobs_T.detach(), mb["advantages"], mb["loss_mask"])
    return ppo_clip_loss(inputs, eps_clip=0.2)[0]


def loss_tokens(mb: dict[str, Any]) -> torch.Tensor:
    return mb["loss_mask"].sum()


def masked(logprobs_BS: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Without the junk at the end of each row."""
    return logprobs_BS.cpu()[batch["loss_mask"]]


def transformers_model(folder: str, dtype: torch.dtype, device: torch.device):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.to(device).eval()


def row_logprobs(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """log p of the next token, one sequence alone: [T - 1] in float32."""
    logits = model(tokens[None]).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)


def rows_of(batch: dict[str, torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    for tokens, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        yield tokens[mask].long().to(device)


@torch.no_grad()
def logprobs(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    out = torch.zeros(batch["input_ids"].shape)
    for number, tokens in enumerate(rows_of(batch, model.device)):
        out[number, : len(tokens) - 1] = row_logprobs(model, tokens).cpu()
    return masked(out, batch)


def transformers_gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Tensors:
    """Of the mean negative log-probability of the answers."""
    model.zero_grad()
    total = batch["loss_mask"].sum().item()
    masks = batch["loss_mask"].to(model.device)
    for number, tokens in enumerate(rows_of(batch, model.device)):
        mask = masks[number, : len(tokens) - 1]
        (-(row_logprobs(model, tokens) * mask).sum() / total).backward()
    return dict(per_expert((n, p.grad.float().cpu()) for n, p in model.named_parameters()))


def engine_gradients(engine: TrainEngine, batch: dict[str, torch.Tensor]) -> Tensors:
    """The same of the engine, under the checkpoint's names; it forgets them again."""
    from areal.engine.train.megatron.weights import stream

    total = batch["loss_mask"].sum().item()
    mbs = split_micro_batches(batch, engine.mb_spec, engine.device)

    def mean_loss(index: int, logprobs_T: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return -(logprobs_T * mbs[index].data["loss_mask"]).sum() / total

    engine.forward_backward_batch(mbs, mean_loss, forward_only=False)
    found = stream(engine.stages, lambda weight: weight.main_grad)
    gradients = {name: gradient.float().cpu().clone() for name, gradient in found}
    engine.optimizer.forget_gradients()
    return gradients


def per_expert(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers stacks experts, gate over up, but writes them one by one."""
    for name, tensor in named:
        stem, _, leaf = name.rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj") or not stem.endswith(".experts"):
            yield name, tensor
            continue
        for number, one in enumerate(tensor):
            if leaf == "down_proj":
                yield f"{stem}.{number}.down_proj.weight", one
            else:
                gate, up = one.chunk(2)
                yield f"{stem}.{number}.gate_proj.weight", gate
                yield f"{stem}.{number}.up_proj.weight", up


def weights_of(engine: TrainEngine) -> Tensors:
    return {name: tensor.float().cpu().clone() for name, tensor in engine.hf_weights()}


def distance(found: Tensors, expected: Tensors) -> float:
    """The length of the difference over all tensors, relative to the expected one's."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    apart = length(found[name] - expected[name] for name in expected)
    return apart / length(expected.values())


def length(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


if __name__ == "__main__":
    sys.exit(main())
