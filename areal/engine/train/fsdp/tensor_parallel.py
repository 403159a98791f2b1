"""Tensor parallelism of a Hugging Face model by DTensor, after the plan in its own config.

`base_model_tp_plan` says which matrices are cut by columns and which by rows; each rank then has
some heads and some feed-forward columns, and the residual stream is whole on all of them. Rows of
the vocabulary are cut too, in the embedding and in the LM head, so that each rank has the logits of
its own part (engine/train/logprobs.py). What the plan does not name is whole on every rank.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from areal.models.parallel_dims import ParallelDims, check_heads


def check_layout(hf: PreTrainedModel, dims: ParallelDims) -> None:
    """ValueError, before it has any memory, when this model cannot be cut like that."""
    config = hf.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    check_heads(heads, kv_heads, dims)


def cut_over_tp(hf: PreTrainedModel, tp: DeviceMesh) -> None:
    """Make the weights of the plan DTensors over `tp`, in place, on the meta device."""
    plan = hf.config.get_text_config().base_model_tp_plan or {}
    if not plan:
        raise ValueError(
            f"{type(hf).__name__} has no base_model_tp_plan, so t{tp.size()} cannot cut it: use "
            "d or c instead"
        )
    parallelize_module(hf.base_model, tp, {name: _style(hf, plan[name]) for name in plan})
    _cut_vocabulary(hf, tp)


def _style(hf: PreTrainedModel, name: str) -> ParallelStyle:
    if name == "colwise":
        return ColwiseParallel()
    if name == "rowwise":
        return RowwiseParallel()
    if name == "replicated_with_grad_allreduce":
        # A norm over each head [1, T, heads, H]: ranks have other heads, so its gradient is a sum.
        return SequenceParallel(sequence_dim=2, use_local_output=True)
    raise ValueError(
        f"the tensor parallel plan of {type(hf).__name__} asks for {name!r}, which is not known "
        "here: use d or c instead"
    )


def _cut_vocabulary(hf: PreTrainedModel, tp: DeviceMesh) -> None:
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    # An embedding that does more than look up is left whole, and the head that shares its weight.
    if type(embedding) is not nn.Embedding or embedding.num_embeddings % tp.size():
        return
    parallelize_module(embedding, tp, RowwiseParallel(input_layouts=Replicate()))
    if isinstance(head, nn.Linear):
        parallelize_module(head, tp, ColwiseParallel(output_layouts=Replicate()))


def with_partial_gradient(hidden_TD: torch.Tensor, tp: DeviceMesh) -> torch.Tensor:
    """The same tensor on every rank; its gradient is the sum of what the ranks send back."""
    whole = DTensor.from_local(hidden_TD, tp, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])
