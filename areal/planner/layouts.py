"""Which layout of so many GPUs trains fastest? A search over splits and layouts that fit.

    best = best_split(setup, load, gpus=64)      # a `Split`, or None

Tried are, for every split in eighths (of few GPUs every one): of the servers each tensor
parallelism, of the actor tensor, pipeline, context and expert parallelism by powers of two, as they
are and with full checkpointing. Only runs whose models share the actor's devices are searched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from areal.models.common.args import share_of
from areal.models.parallel_dims import ParallelDims, check_layout
from areal.planner.engines import Servers, Trainer
from areal.planner.plan import Plan, Setup, plan_setup
from areal.planner.speed import Layout
from areal.planner.workload import Workload

_SPLITS = 8
_CUTS = (1, 2, 4, 8)
_LONG = 32768  # tokens of a sequence from which on ranks of c share it
_MIN_RUNNING = 8  # sequences that a server's cache should have room for


@dataclass(frozen=True, slots=True)
class Split:
    plan: Plan
    actor: Layout
    servers: int
    server_tp: int
    checkpointing: str  # what the actor keeps: none, selective, compiled, full

    @property
    def allocation(self) -> str:
        """As allocation_mode spells it."""
        tensor = f"t{self.server_tp}" if self.server_tp > 1 else ""
        return f"native:d{self.servers}{tensor}+archon:{layout_name(self.actor)}"


def layout_name(cut: Layout) -> str:
    """As in a backend: `d4t2`."""
    sizes = zip("tpce", (cut.tp, cut.pp, cut.cp, cut.ep), strict=True)
    return f"d{cut.dp}" + "".join(f"{letter}{size}" for letter, size in sizes if size > 1)


def best_split(setup: Setup, load: Workload, gpus: int) -> Split | None:
    """The fastest that fits; None if none does, or if devices are shared otherwise."""
    rest, gpus = setup.teacher_devices, gpus - setup.teacher_devices
    if setup.takes_turns or len(setup.groups) != 1 or gpus < 2:
        return None
    best: Split | None = None
    unit = max(1, gpus // _SPLITS)
    for training in range(unit, gpus, unit):
        servers = _best_servers(setup.servers, load, gpus - training)
        trainer = best_trainer(setup.trainers["actor"], load, training)
        if servers is None or trainer is None:
            continue
        trainers = {
            role: trainer if role == "actor" else _laid_out(other, trainer)
            for role, other in setup.trainers.items()
        }
        plan = plan_setup(
            replace(setup, trainers=trainers, servers=servers), load, gpus=gpus + rest
        )
        if not plan.too_large() and (best is None or plan.tokens_per_s > best.plan.tokens_per_s):
            best = Split(
                plan, trainer.layout, servers.count, servers.generation.tp, trainer.rank.mode
            )
    return best


def _best_servers(template: Servers, load: Workload, devices: int) -> Servers | None:
    found = []
    for tp in _CUTS:
        if devices % tp or not _divides(template, tp):
            continue
        servers = replace(
            template,
            generation=replace(template.generation, tp=tp),
            rank=replace(template.rank, tp=tp),
            count=devices // tp,
        )
        rank = servers.rank
        has_room = rank.cache_tokens >= _MIN_RUNNING * (load.prompt + load.max_output)
        if rank.memory("").peak <= rank.device.memory_bytes and has_room:
            seconds = servers.steady_s(load) if load.staleness else servers.whole_s(load)
            found.append((seconds, tp, servers))
    return min(found)[2] if found else None


def _divides(servers: Servers, tp: int) -> bool:
    if tp > 1 and servers.generation.is_fp8:
        return False
    try:
        share_of(servers.generation.shape.args, tp)
    except ValueError:
        return False
    return True


def best_trainer(template: Trainer, load: Workload, devices: int) -> Trainer | None:
    """The fastest layout of a trained model that fits; None if none does."""
    found = []
    for layout in _layouts(template, load, devices):
        for mode in dict.fromkeys((template.rank.mode, "full")):
            trainer = _with_layout(template, layout, mode)
            if trainer.memory(load, "").peak <= template.rank.device.memory_bytes:
                found.append((trainer.train_s(load), len(found), trainer))
    return min(found)[2] if found else None


def _with_layout(template: Trainer, layout: Layout, mode: str) -> Trainer:
    recompute = mode if mode in ("full", "selective") else "none"
    return replace(
        template,
        training=replace(template.training, layout=layout, recompute=recompute),
        rank=replace(template.rank, layout=layout, mode=mode),
    )


def _laid_out(other: Trainer, actor: Trainer) -> Trainer:
    """A model that shares the actor's devices, laid out like it."""
    return _with_layout(other, actor.layout, other.rank.mode)


def _layouts(template: Trainer, load: Workload, devices: int) -> Iterator[Layout]:
    args = template.training.shape.args
    contexts = _CUTS if load.prompt + load.max_output > _LONG else (1,)
    for tp in _CUTS if args.moe is None else (1,):  # experts are spread instead
        for pp in _CUTS:
            for cp in contexts:
                cut = tp * pp * cp
                if devices % cut or devices // cut > load.num_samples:
                    continue
                for ep in _expert_cuts(template, devices // pp):
                    layout = Layout(
                        dp=devices // cut, tp=tp, cp=cp, pp=pp, ep=ep, stages_per_rank=2
                    )
                    if _fits_model(layout, template):
                        yield layout


def _expert_cuts(template: Trainer, ranks: int) -> list[int]:
    moe = template.training.shape.args.moe
    if moe is None:
        return [1]
    return [ep for ep in (1, 8, 16, 32) if moe.num_experts % ep == 0 and ranks % ep == 0]


def _fits_model(layout: Layout, template: Trainer) -> bool:
    shape = template.training.shape
    if layout.pp > 1 and shape.num_layers < 2 * layout.pp + 2:
        return False
    dims = ParallelDims(
        pp=layout.pp, dp_shard=layout.dp, cp=layout.cp, tp=layout.tp, ep=layout.ep, etp=layout.etp
    )
    try:
        check_layout(shape.args, dims)
    except ValueError:
        return False
    return True
