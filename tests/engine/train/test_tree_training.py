"""Common prefixes computed once against Archon without: the same training, in every layout.

Sums are taken in another order, so bits differ; float32 results agree to 1e-5 (here to 2e-6).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine.train.archon_world import (
    FT_SPEC,
    PLAIN_SGD,
    last_output,
    loss_fn,
    num_loss_tokens,
    open_engine,
    own_rows,
    weights_of,
)
from gloo_ranks import run_ranks
from tiny import write_tiny_model

from areal.algorithm.loss import LossInputs, ppo_clip_loss
from areal.api.config.train_engine import MicroBatchSpec, TrainEngineConfig
from areal.engine import train_engine_class
from areal.engine.train.archon import ArchonEngine
from areal.engine.train.base import BaseTrainEngine
from areal.engine.train.micro_batches import split_micro_batches

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def draw(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1, 64) for _ in range(length)]


def group(rng: random.Random, prompt: int, answers: tuple[int, ...]) -> list[list[int]]:
    start = draw(rng, prompt)
    return [start + draw(rng, length) for length in answers]


def turns(rng: random.Random, lengths: tuple[int, ...]) -> list[list[int]]:
    """Each turn sees those before it; the third forgets part of the second."""
    history: list[list[int]] = [draw(rng, lengths[0])]
    for number, length in enumerate(lengths[1:], 1):
        kept = history[-1][:-2] if number == 2 else history[-1]
        history.append(kept + draw(rng, length))
    return history


def forks(rng: random.Random, count: int) -> list[list[int]]:
    sequences = [draw(rng, 9)]
    while len(sequences) < count:
        old = rng.choice(sequences[-4:])
        sequences.append(old[: rng.randrange(1, len(old) + 1)] + draw(rng, rng.randrange(0, 6)))
    return sequences


BATCHES = {
    "groups": lambda rng: group(rng, 12, (5, 3, 7, 1)) + group(rng, 6, (9, 9)),
    "turns": lambda rng: turns(rng, (5, 4, 6, 3)) + turns(rng, (3, 7)),
    "forks": lambda rng: forks(rng, 24),
    "mixed": lambda rng: group(rng, 8, (4, 0, 6)) + [draw(rng, n) for n in (1, 7, 11)] * 2,
}


def make_batch(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every row has its own advantages and old log-probabilities, also of tokens it shares."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    sequences = BATCHES[name](rng)
    rng.shuffle(sequences)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.int32)
    ids[mask] = torch.tensor([t for sequence in sequences for t in sequence], dtype=torch.int32)
    learn = mask.roll(-1, 1) & (torch.rand(mask.shape, generator=gen) < 0.8)
    learn[:, -1] = False
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "loss_mask": learn,
        "advantages": torch.randn(mask.shape, generator=gen),
        "old": -4 + torch.randn(mask.shape, generator=gen) * 0.3,
    }


def grpo_loss(logprobs_T, entropy_T, mb):
    inputs = LossInputs(logprobs_T, mb["old"], mb["advantages"], mb["loss_mask"])
    return ppo_clip_loss(inputs, eps_clip=0.2)[0]


def critic_loss(values_T, mb):
    return (values_T - mb["advantages"])[mb["loss_mask"]].square().mean()


def work(engine: ArchonEngine, name: str, loss=grpo_loss) -> dict[str, Any]:
    """What two steps leave: evaluations, outputs, gradients of the first and weights of both."""
    batch = own_rows(engine, make_batch(name))
    found: dict[str, Any] = {"outputs": engine.forward_batch(batch)}
    found["eval"] = engine.eval_batch(batch, loss, num_loss_tokens)
    found["last_output"] = engine.eval_batch(batch, last_output, num_loss_tokens)
    start = weights_of(engine)
    found["losses"] = [engine.train_batch(batch, loss, num_loss_tokens)["loss"]]
    found["gradients"] = {
        key: (start[key] - weight) / PLAIN_SGD.lr for key, weight in weights_of(engine).items()
    }
    second = own_rows(engine, make_batch(name, seed=1))
    stats = engine.train_batch(second, loss, num_loss_tokens)
    found["losses"].append(stats["loss"])
    found["weights"] = weights_of(engine)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3"))


@pytest.mark.parametrize("spec", [MicroBatchSpec(), MicroBatchSpec(max_tokens_per_mb=30)])
@pytest.mark.parametrize("name", BATCHES)
def test_two_steps_equal_those_of_packed_sequences(folder, name: str, spec: MicroBatchSpec):
    packed = work(open_engine(folder, "archon:d1"), name)
    tree = work(open_engine(folder, "archon:d1", enable_tree_training=True, mb_spec=spec), name)
    torch.testing.assert_close(tree, packed, **TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text", "qwen2", "deepseek_v2"])
def test_every_family(tmp_path, family: str):
    folder = str(write_tiny_model(tmp_path, family))
    packed = work(open_engine(folder, "archon:d1"), "forks")
    tree = work(open_engine(folder, "archon:d1", enable_tree_training=True), "forks")
    torch.testing.assert_close(tree, packed, **TOLERANCE)


def test_a_critic(folder):
    options = {"is_critic": True, "init_from_scratch": True}
    packed = work(open_engine(folder, "archon:d1", **options), "forks", critic_loss)
    tree = open_engine(folder, "archon:d1", enable_tree_training=True, **options)
    torch.testing.assert_close(work(tree, "forks", critic_loss), packed, **TOLERANCE)


def test_the_budget_counts_computed_tokens_and_the_step_says_how_many(folder):
    batch = make_batch("groups")
    prefixes = {
        tuple(row[: i + 1].tolist())
        for row, length in zip(batch["input_ids"], batch["attention_mask"].sum(1), strict=True)
        for i in range(length)
    }
    engine = open_engine(folder, "archon:d1", enable_tree_training=True)
    stats = engine.train_batch(batch, loss_fn, num_loss_tokens)
    num_tokens = int(batch["attention_mask"].sum())
    assert stats["tree_token_ratio"] == pytest.approx(len(prefixes) / num_tokens)
    assert num_tokens > 80 and len(prefixes) == 28 + 24
    for max_tokens, sizes in {52: [52], 28: [28, 24]}.items():
        spec = MicroBatchSpec(max_tokens_per_mb=max_tokens)
        mbs = split_micro_batches(batch, spec, engine.device, shares_prefixes=True)
        assert sorted((len(mb.tree) for mb in mbs), reverse=True) == sizes


def test_pairs_stay_neighbours(folder):
    """Rows 2i and 2i + 1, chosen and rejected, are compared within a micro-batch."""

    def pair_loss(logprobs_T, entropy_T, mb):
        firsts, ends = mb["cu_seqlens"][:-1].tolist(), mb["cu_seqlens"][1:].tolist()
        sums = [logprobs_T[a : b - 1].sum() for a, b in zip(firsts, ends, strict=True)]
        margin = torch.stack(sums[::2]) - torch.stack(sums[1::2])
        return -torch.nn.functional.logsigmoid(margin).mean()

    def num_pairs(mb):
        return torch.tensor(len(mb["cu_seqlens"]) // 2)

    batch = make_batch("forks")
    found = []
    for shares in (False, True):
        spec = MicroBatchSpec(max_tokens_per_mb=30)
        engine = open_engine(folder, "archon:d1", enable_tree_training=shares, mb_spec=spec)
        found.append(engine.eval_batch(batch, pair_loss, num_pairs, rows_per_unit=2))
        engine.train_batch(batch, pair_loss, num_pairs, rows_per_unit=2)
        found.append(engine.forward_batch(batch))
    torch.testing.assert_close(found[2:], found[:2], **TOLERANCE)


def test_two_ranks_each_with_their_own_trees(folder, tmp_path):
    outs = {shares: str(tmp_path / f"{shares}.pt") for shares in (False, True)}
    run_ranks(
        2, "engine.train.test_tree_training:rank_works", folder, list(outs.items()), timeout_s=900
    )
    packed, tree = (torch.load(out) for out in outs.values())
    torch.testing.assert_close(tree, packed, **TOLERANCE)


def rank_works(folder: str, outs: list[tuple[bool, str]]) -> None:
    for shares, out in outs:
        # The ranks' trees make different numbers of micro-batches: one of them adds fillers.
        spec = MicroBatchSpec(max_tokens_per_mb=20)
        engine = open_engine(folder, "archon:d2", enable_tree_training=shares, mb_spec=spec)
        found = work(engine, "groups")
        if dist.get_rank() == 0:
            torch.save(found, out)


@pytest.mark.parametrize("name", BATCHES)
def test_models_of_transformers(folder, name: str):
    packed = work(open_engine(folder, "archon:d1"), name)
    tree = work(open_any(folder, "fsdp:d1", enable_tree_training=True), name)
    torch.testing.assert_close(tree, packed, **TOLERANCE)


SPREAD = ("archon:t2", "archon:c2", "fsdp:t2", "fsdp:c2")


@pytest.mark.slow
def test_two_ranks_share_a_tree(folder, tmp_path):
    """Neither its tokens nor the rows of its head divide evenly."""
    outs = [(backend, str(tmp_path / f"{backend}.pt")) for backend in SPREAD]
    run_ranks(2, "engine.train.test_tree_training:rank_shares", folder, outs, timeout_s=900)
    packed = work(open_engine(folder, "archon:d1"), "forks")
    for backend, out in outs:
        torch.testing.assert_close(
            torch.load(out), packed, **TOLERANCE, msg=lambda m, b=backend: f"{b}: {m}"
        )


def test_two_ranks_share_the_trees_of_a_critic(folder, tmp_path):
    outs = [(backend, str(tmp_path / f"{backend}.pt")) for backend in ("archon:t2", "archon:c2")]
    run_ranks(2, "engine.train.test_tree_training:rank_values", folder, outs, timeout_s=900)
    critic = open_engine(folder, "archon:d1", is_critic=True)
    packed = work(critic, "forks", critic_loss)
    for _, out in outs:
        torch.testing.assert_close(torch.load(out), packed, **TOLERANCE)


def rank_shares(folder: str, outs: list[tuple[str, str]], loss=grpo_loss, **options) -> None:
    for backend, out in outs:
        engine = open_any(folder, backend, enable_tree_training=True, **options)
        found = work(engine, "forks", loss)
        if dist.get_rank() == 0:
            torch.save(found, out)


def rank_values(folder: str, outs: list[tuple[str, str]]) -> None:
    rank_shares(folder, outs, critic_loss, is_critic=True)


def open_any(folder: str, backend: str, **options: Any) -> BaseTrainEngine:
    config = TrainEngineConfig(path=folder, backend=backend, optimizer=PLAIN_SGD, **options)
    engine = train_engine_class(backend)(config)
    engine.create_process_group(config.allocation.parallel)
    engine.initialize(FT_SPEC)
    return engine


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_on_cuda(folder, dtype: str):
    """bfloat16 rounds other sums, so there gradients only point the same way."""
    found = []
    for shares in (False, True):
        engine = open_engine(folder, "archon:d1", enable_tree_training=shares, dtype=dtype)
        assert engine.device.type == "cuda"
        found.append(one_step(engine, "forks"))
    (packed_BS, packed), (tree_BS, tree) = found
    cosine = torch.nn.functional.cosine_similarity(packed, tree, dim=0)
    if dtype == "float32":
        torch.testing.assert_close(tree_BS, packed_BS, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(tree, packed, rtol=1e-3, atol=1e-5)
    assert cosine > 0.99 and (tree_BS - packed_BS).abs().mean() < 0.05


def one_step(engine: ArchonEngine, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities, and all gradients as one row, from how far SGD moved the masters."""
    batch = make_batch(name)
    logprobs_BS = engine.forward_batch(batch)
    masters = engine.optimizer.masters()
    before = {key: master.detach().clone() for key, master in masters.items()}
    engine.train_batch(batch, grpo_loss, num_loss_tokens)
    moved = [(before[key] - master.detach()).flatten() for key, master in masters.items()]
    return logprobs_BS, torch.cat(moved) / PLAIN_SGD.lr
