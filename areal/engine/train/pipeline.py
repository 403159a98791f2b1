"""Micro-batches through the pipeline stages that the ranks of the axis pp hold.

    pipeline = Pipeline(model, mesh, config, dtype, device)      # `model` is on the meta device
    outputs = pipeline.train(mbs, output_fn); outputs = pipeline.forward(mbs, output_fn)

All ranks of a pipeline get the same micro-batches, so only hidden states and their gradients are
sent: every stage has tokens, positions and labels. The last stage computes the heads and
`output_fn`, and broadcasts the results.

Training runs a schedule of torch.distributed.pipelining, whose shapes are fixed within a step:
micro-batches are padded to the longest, and filled up with repeated ones (results unused) to a
number that the schedule accepts. FSDP gathers a stage's weights once per step and reduces its
gradients once, after the last micro-batch; in between both are unsharded. A pass without backward
needs no equal lengths (`forward_waves`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)
from torch.distributed.tensor import DTensor

from areal.api.config.train_engine import TrainEngineConfig
from areal.engine.train.fit import stage_layout
from areal.engine.train.micro_batches import MicroBatch, OutputFn
from areal.engine.train.packing import LaidOut, outputs_of, pack_micro_batch
from areal.models.common.decoder import Decoder
from areal.models.parallel_dims import ParallelMesh
from areal.models.parallelize import parallelize, write_own_part
from areal.models.pipeline import TiedHead, cut_stage
from areal.models.stage_layout import StageLayout

Unit = tuple[int, int]  # (stage, micro-batch)


class Stage(nn.Module):
    """One stage as schedules call it.

    During a step it holds `compute` and a count of micro-batches, which reach a stage in order. (As
    an argument the number would be a GPU tensor, and reading it would synchronise.)
    """

    def __init__(self, part: Decoder) -> None:
        super().__init__()
        self.part = part
        self.compute: Callable[[Decoder, torch.Tensor | None, int], torch.Tensor] | None = None
        self.numbers: Iterator[int] = iter(())

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:
        assert self.compute is not None, "it is called while a step runs"
        return self.compute(self.part, x, next(self.numbers))


class Pipeline:
    """This rank's stages of `model`, materialised; the rest stays on the meta device."""

    def __init__(
        self,
        model: Decoder,
        mesh: ParallelMesh,
        config: TrainEngineConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._mesh, self._config, self._dtype, self._device = mesh, config, dtype, device
        self._group = mesh.get_group("pp")
        self._dim = model.args.dim
        self.layout = stage_layout(config, model.args, self._group.size())
        own = self.layout.stages_of(self._group.rank())
        self._stages = {index: self._build(index, model) for index in own}
        model.write = write_own_part
        self._tied = self._find_tied_head(model)

    def _build(self, index: int, model: Decoder) -> Stage:
        last = self.layout.num_stages - 1
        layers = self.layout.layers[index]
        part = cut_stage(model, layers, is_first=index == 0, is_last=index == last)
        reduce_dtype = getattr(torch, self._config.grad_reduce_dtype)
        parallelize(part, self._mesh, self._dtype, reduce_dtype=reduce_dtype, keep_gathered=True)
        part.to_empty(device=self._device)
        # An FSDP root without own weights, so that the part stays unsharded until the heads ran.
        stage = Stage(part)
        fully_shard(stage, mesh=self._mesh.in_replicas("fsdp"))
        return stage

    def _find_tied_head(self, model: Decoder) -> TiedHead | None:
        if not model.args.tie_word_embeddings or model.args.is_critic:
            return None
        first, last = (self._stages.get(i) for i in (0, self.layout.num_stages - 1))
        embedding = None if first is None else first.part.embedding_weight
        copy = None if last is None else last.part.output_weight
        assert isinstance(embedding, DTensor | None) and isinstance(copy, DTensor | None)
        return TiedHead(embedding, copy, self.layout, self._group)

    @property
    def parts(self) -> list[Decoder]:
        return [stage.part for stage in self._stages.values()]

    def refresh(self) -> None:
        """Call after weights were loaded or updated."""
        if self._tied is not None:
            self._tied.refresh()

    def train(self, mbs: list[MicroBatch], output_fn: OutputFn) -> list[torch.Tensor]:
        """`output_fn`, a scalar, of each micro-batch; gradients of their sum."""
        longest = max(len(mb.data["input_ids"]) for mb in mbs)
        laid = [
            pack_micro_batch(mb.data, self._config, self._mesh, min_tokens=longest) for mb in mbs
        ]
        num_mbs = num_micro_batches(len(mbs), self._config.archon.pp_schedule, self.layout)
        laid += laid[:1] * (num_mbs - len(mbs))

        def filled_output_fn(index: int, *outputs: torch.Tensor) -> torch.Tensor:
            return output_fn(index, *outputs) if index < len(mbs) else outputs[0].sum() * 0.0

        schedule = self._schedule(num_mbs, self._hidden_shape(laid[0]))
        # Schedules need an input and a target to split; the stages look up their own.
        unused = torch.zeros(num_mbs, device=self._device)
        with self._computing(laid, filled_output_fn) as outputs:
            schedule.step(unused, target=unused)
        if self._tied is not None and not self._config.use_lora:  # else the embedding is frozen
            self._tied.collect_gradient()
        return self._to_all(outputs, len(mbs))

    def _schedule(
        self, num_mbs: int, shape: tuple[int, int]
    ) -> PipelineScheduleSingle | PipelineScheduleMulti:
        schedule_class = get_schedule_class(self._config.archon.pp_schedule)
        hidden = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)
        unused = torch.empty(1, device="meta")
        loss = torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)
        last = self.layout.num_stages - 1
        stages = [
            PipelineStage(
                stage,
                index,
                self.layout.num_stages,
                self._device,
                input_args=unused if index == 0 else hidden,
                output_args=loss if index == last else hidden,
                group=self._group,
            )
            for index, stage in self._stages.items()
        ]
        is_single = issubclass(schedule_class, PipelineScheduleSingle)
        return schedule_class(
            stages[0] if is_single else stages,
            num_mbs,
            loss_fn=lambda loss, unused: loss,  # already computed by the last stage
            scale_grads=False,
        )

    @torch.no_grad()
    def forward(self, mbs: list[MicroBatch], output_fn: OutputFn) -> list[torch.Tensor]:
        """`output_fn` of each micro-batch."""
        laid = [pack_micro_batch(mb.data, self._config, self._mesh) for mb in mbs]
        inbox: dict[Unit, torch.Tensor] = {}
        with self._computing(laid, output_fn) as outputs:
            for wave in forward_waves(self.layout, len(mbs)):
                exchange = [op for unit in wave for op in self._advance(unit, inbox, laid)]
                for work in dist.batch_isend_irecv(exchange) if exchange else ():
                    work.wait()
        self._reshard()
        return self._to_all(outputs, len(mbs))

    def _advance(
        self, unit: Unit, inbox: dict[Unit, torch.Tensor], laid: list[LaidOut]
    ) -> Iterator[dist.P2POp]:
        """Compute `unit` if it is this rank's, and send the result on or receive it."""
        (index, mb), rank = unit, self._group.rank()
        after = (index + 1, mb)
        is_last = index == self.layout.num_stages - 1
        target = None if is_last else self.layout.rank_of(index + 1)
        exchange = partial(dist.P2POp, group=self._group)
        if index in self._stages:
            result = self._stages[index](inbox.pop(unit, None))  # none for the first stage
            if target == rank:
                inbox[after] = result
            elif target is not None:
                yield exchange(dist.isend, result.contiguous(), group_peer=target)
        elif target == rank:
            inbox[after] = torch.empty(
                self._hidden_shape(laid[mb]), dtype=self._dtype, device=self._device
            )
            source = self.layout.rank_of(index)
            yield exchange(dist.irecv, inbox[after], group_peer=source)

    @contextmanager
    def _computing(
        self, laid: list[LaidOut], output_fn: OutputFn
    ) -> Iterator[dict[int, torch.Tensor]]:
        """Set `compute` of the stages. The rank with the last stage fills the dict with outputs."""
        outputs: dict[int, torch.Tensor] = {}

        def compute(part: Decoder, x: torch.Tensor | None, mb: int) -> torch.Tensor:
            tokens = laid[mb]
            given = tokens.tokens_t if part.tok_embeddings is not None else x
            hidden = part(given, tokens.positions_t, tokens.attend)
            if part.norm is None:
                return hidden
            output = output_fn(mb, *outputs_of(part, hidden, tokens, self._config, self._mesh))
            outputs[mb] = output.detach()
            # Not a view: schedules detach in place what a stage returns.
            return torch.stack([output])

        for stage in self._stages.values():
            stage.compute, stage.numbers = compute, iter(range(len(laid)))
        yield outputs
        for stage in self._stages.values():
            stage.compute = None  # frees the batch

    def _hidden_shape(self, laid: LaidOut) -> tuple[int, int]:
        """Shape of exchanged hidden states: tokens are sharded over tp between blocks."""
        return len(laid.tokens_t) // self._mesh["tp"].size(), self._dim

    def _to_all(self, computed: dict[int, torch.Tensor], num_mbs: int) -> list[torch.Tensor]:
        """The last stage's outputs of the first `num_mbs` micro-batches, on every rank."""
        source = self.layout.rank_of(self.layout.num_stages - 1)
        outputs = [computed[mb] for mb in range(num_mbs)] if self._group.rank() == source else []
        header = [[(output.shape, output.dtype) for output in outputs]]
        dist.broadcast_object_list(header, group=self._group, group_src=source, device=self._device)
        if not outputs:
            outputs = [torch.empty(s, dtype=d, device=self._device) for s, d in header[0]]
        flat = torch.cat([output.flatten() for output in outputs])
        dist.broadcast(flat, group=self._group, group_src=source)
        parts = flat.split([output.numel() for output in outputs])
        return [part.view_as(output) for part, output in zip(parts, outputs, strict=True)]

    def _reshard(self) -> None:
        for stage in self._stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def num_micro_batches(given: int, schedule: str, layout: StageLayout) -> int:
    """The smallest number >= `given` that the schedule accepts; for interleaved schedules a
    multiple of the ranks."""
    if schedule.startswith("Interleaved"):
        return -(-given // layout.num_ranks) * layout.num_ranks
    return max(given, layout.num_ranks)


def forward_waves(layout: StageLayout, num_mbs: int) -> list[list[Unit]]:
    """Waves of units, at most one per rank, that run concurrently.

    Results are sent between two waves, all at once, so that no two ranks deadlock. The deepest
    ready unit goes first, which keeps few hidden states waiting.
    """
    waves: list[list[Unit]] = []
    next_mb = [0] * layout.num_stages  # of each stage, which takes them in order
    while next_mb[-1] < num_mbs:
        wave = []
        for rank in range(layout.num_ranks):
            for stage in reversed(layout.stages_of(rank)):
                num_ready = num_mbs if stage == 0 else next_mb[stage - 1]
                if next_mb[stage] < num_ready:
                    wave.append((stage, next_mb[stage]))
                    break
        for stage, _ in wave:
            next_mb[stage] += 1
        waves.append(wave)
    return waves
