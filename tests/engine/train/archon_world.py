"""What parity tests of Archon run: the same work on one rank and on every rank of a layout.

    assert_parity(4, [(folder, "archon:d2t2", {}, out)])        # changes of the engine, a file

Each data-parallel place takes every dp-th row of the whole batch; losses, gradients, weights and
the log-probabilities of all rows must come out the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from areal.algorithm.loss import sft_loss
from areal.api.alloc_mode import ModelAllocation
from areal.api.config.train_engine import (
    ArchonEngineConfig,
    MicroBatchSpec,
    OptimizerConfig,
    TrainEngineConfig,
)
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta
from areal.engine.train.archon import ArchonEngine
from areal.utils.data import select_rows

FT_SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=1)
PLAIN_SGD = OptimizerConfig(
    type="sgd", lr=0.1, beta1=0.0, weight_decay=0.0, gradient_clipping=1e9, warmup_steps=0
)
# Neither these rows nor their tokens divide evenly. Cut at MB_TOKENS most micro-batches of one rank
# have one length: for every other length ranks find out anew how operations are cut.
LENGTHS = (5, 9, 3, 7, 10, 2, 30)
MB_TOKENS = 12


def open_engine(
    folder: str,
    backend: str,
    *,
    optimizer: OptimizerConfig = PLAIN_SGD,
    num_replicas: int = 1,
    pp_schedule: str = "Interleaved1F1B",
    enable_compile: bool = False,
    ac_mode: str = "selective",
    **changes: Any,
) -> ArchonEngine:
    archon = ArchonEngineConfig(
        pp_schedule=pp_schedule,
        num_replicas=num_replicas,
        enable_compile=enable_compile,
        ac_mode=ac_mode,
    )
    options = {"backend": backend, "optimizer": optimizer, "archon": archon, **changes}
    engine = ArchonEngine(TrainEngineConfig(path=str(folder), **options))
    engine.create_process_group(ModelAllocation.from_str(backend).parallel)
    engine.initialize(FT_SPEC)
    return engine


def make_batch(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, 64, mask.shape, generator=gen, dtype=torch.int32) * mask
    learn = mask.roll(-1, 1) & (torch.rand(mask.shape, generator=gen) < 0.7)
    learn[:, 0] = True
    learn[:, -1] = False
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": learn}


def own_rows(engine: ArchonEngine, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    rows = range(len(batch["input_ids"]))
    mine = rows[engine.data_parallel_rank :: engine.data_parallel_world_size]
    return select_rows(batch, list(mine))


def loss_fn(outputs_T: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Of log-probabilities, or of a critic's values, which alone have no bound."""
    *entropy, mb = rest
    return sft_loss(outputs_T if entropy else outputs_T.tanh(), mb["loss_mask"])


def last_output(*args: Any) -> torch.Tensor:
    """The mean entropy, or a critic's mean value."""
    *_, output_T, mb = args
    return output_T[mb["loss_mask"]].mean()


def num_loss_tokens(mb: dict[str, Any]) -> torch.Tensor:
    return mb["loss_mask"].sum()


def train(engine: ArchonEngine, batch: dict[str, torch.Tensor], loss=loss_fn) -> dict[str, float]:
    return engine.train_batch(own_rows(engine, batch), loss, num_loss_tokens)


def weights_of(engine: ArchonEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.hf_weights()}


def work(engine: ArchonEngine) -> dict[str, Any]:
    """One step from the start, one micro-batch by micro-batch, one with a single row."""
    batch = make_batch()
    found: dict[str, Any] = {"start": weights_of(engine)}
    found["last_output"] = engine.eval_batch(
        own_rows(engine, batch), last_output, num_loss_tokens
    ).item()
    found["outputs"] = _all_rows(engine, engine.forward_batch(own_rows(engine, batch)), batch)
    found["step"] = train(engine, batch)
    found["gradients"] = {
        name: (found["start"][name] - weight) / PLAIN_SGD.lr
        for name, weight in weights_of(engine).items()
    }
    engine.mb_spec = MicroBatchSpec(max_tokens_per_mb=MB_TOKENS)
    found["cut_step"] = train(engine, make_batch(1))
    found["row_step"] = train(engine, make_batch(2, lengths=(MB_TOKENS,)))
    found["cut_outputs"] = _all_rows(engine, engine.forward_batch(own_rows(engine, batch)), batch)
    found["end"] = weights_of(engine)
    return found


Job = tuple[str, str, dict[str, Any], str]  # folder, backend, changes of the engine, result file


# What one rank does not look at: its result is that of the plain engine.
OF_SEVERAL_RANKS = ("num_replicas", "enable_compile", "pp_schedule")


def assert_parity(num_ranks: int, jobs: list[Job]) -> None:
    run_ranks(num_ranks, "engine.train.archon_world:rank_works", jobs, timeout_s=1800)
    alone: dict[str, dict[str, Any]] = {}
    for folder, backend, changes, out in jobs:
        plain = {key: change for key, change in changes.items() if key not in OF_SEVERAL_RANKS}
        key = f"{folder} {plain}"
        if key not in alone:
            alone[key] = work(open_engine(folder, "archon:d1", **plain))
        expected, got = alone[key], torch.load(out)
        assert max(g.abs().max() for g in expected["gradients"].values()) > 1e-2
        torch.testing.assert_close(
            got, expected, rtol=1e-5, atol=1e-5, msg=lambda m, b=(backend, key): f"{b}: {m}"
        )


def rank_works(jobs: list[Job]) -> None:
    for folder, backend, changes, out in jobs:
        found = work(open_engine(folder, backend, **changes))
        if dist.get_rank() == 0:
            torch.save(found, out)


def rank_trains_once(folder: str, backend: str, changes: dict[str, Any], out: str) -> None:
    """For work that is too long for `rank_works`."""
    found = train_once(open_engine(folder, backend, **changes))
    if dist.get_rank() == 0:
        torch.save(found, out)


def train_once(engine: ArchonEngine) -> dict[str, Any]:
    return {"step": train(engine, make_batch()), "end": weights_of(engine)}


def rank_saves_adapters(folder: str, scratch: str, backend: str, lora: dict[str, Any]) -> None:
    """Two steps; the merged weights and the adapter alone are left in `scratch`."""
    engine = open_engine(folder, backend, **lora)
    for number in range(2):
        train(engine, make_batch(number))
    weights = weights_of(engine)
    if dist.get_rank() == 0:
        torch.save(weights, f"{scratch}/end.pt")
    engine.save(SaveLoadMeta(path=f"{scratch}/adapter", weight_format="hf"))


def _all_rows(
    engine: ArchonEngine, own: torch.Tensor, batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The rows of all data-parallel places, in the order of the batch."""
    if engine.dp_group is None:
        return own
    parts: list[Any] = [None] * engine.data_parallel_world_size
    dist.all_gather_object(parts, own, group=engine.dp_group)
    whole = torch.zeros(batch["input_ids"].shape)
    for place, part in enumerate(parts):
        whole[place :: len(parts)] = part
    return whole
