"""Where a rank stands in megatron-core's layout, which is one per process.

    layout = enter_layout(ModelAllocation.from_str("megatron:d2t2").parallel, device)

megatron-core keeps its process groups in globals (`megatron.core.parallel_state`). The first engine
of a process makes them; further ones (a reference model beside the actor) must have the same
layout. From the fastest to the slowest: tensor, context, data, pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from areal.api.alloc_mode import ParallelStrategy
from areal.engine.train.process_group import join_alone


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes are of the whole layout, groups are this rank's."""

    strategy: ParallelStrategy
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup  # ranks with other rows of the batch
    pp: dist.ProcessGroup
    ep: dist.ProcessGroup
    expert_tp: dist.ProcessGroup

    @property
    def has_first_stage(self) -> bool:
        return self.pp.rank() == 0

    @property
    def has_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def token_multiple(self) -> int:
        """Ranks among which the tokens of a micro-batch are cut."""
        return self.cp.size() * self.tp.size()

    @property
    def is_head(self) -> bool:
        """Whether this is the first of those ranks of the last stage that have the same rows."""
        return self.has_last_stage and self.tp.rank() == self.cp.rank() == 0


def enter_layout(strategy: ParallelStrategy, device: torch.device) -> Layout:
    """Every rank of torch.distributed calls this; a process that knows no others is one rank."""
    join_alone(device)
    if dist.get_world_size() != strategy.world_size:
        raise ValueError(
            f"the layout megatron:{strategy} needs {strategy.world_size} ranks, but "
            f"{dist.get_world_size()} processes were started: start as many, or change the "
            "backend string"
        )
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": strategy.tensor_parallel_size,
        "pipeline_model_parallel_size": strategy.pipeline_parallel_size,
        "context_parallel_size": strategy.context_parallel_size,
        "expert_model_parallel_size": strategy.expert_parallel_size,
        "expert_tensor_parallel_size": strategy.expert_tensor_parallel_size,
    }
    if parallel_state.model_parallel_is_initialized():
        _check_same(strategy, sizes)
    else:
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        if device.type == "cuda":
            # Its modules ask for these generators even where nothing is drawn.
            model_parallel_cuda_manual_seed(1)
    groups: dict[str, Any] = {  # all are there: this rank is in one of each kind
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "expert_tp": parallel_state.get_expert_tensor_parallel_group(),
    }
    return Layout(strategy, **groups)


def _check_same(strategy: ParallelStrategy, sizes: Mapping[str, int]) -> None:
    found = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }
    if found != sizes:
        others = ", ".join(f"{key}={size}" for key, size in found.items())
        raise ValueError(
            f"megatron-core has one layout per process, and another engine has chosen {others}: "
            f"give every megatron engine of the process the same backend, not megatron:{strategy}"
        )
