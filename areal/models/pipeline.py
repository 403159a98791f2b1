"""Cuts a decoder into pipeline stages.

    layout = StageLayout.of(args.n_layers, num_ranks=2, schedule="1F1B")
    stage = cut_stage(model, layout.layers[index], is_first=..., is_last=...)   # on the meta device

The first stage embeds, the last one has the final norm and the head. A rank holds one stage or
several. Its model keeps the full structure: weights of other ranks stay on the meta device, with a
name and a shape but no memory, so names are those of the full model and each weight has one owner.
`is_meta` tests whether a weight belongs to another rank.

A tied head is the embedding, which the first stage owns. The last stage computes with a copy:
`TiedHead` sends its gradient to the owner and the owner's new weight back.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from areal.models.common.decoder import Decoder
from areal.models.stage_layout import StageLayout


def cut_stage(model: Decoder, layers: range, *, is_first: bool, is_last: bool) -> Decoder:
    """A decoder of some of the modules of `model`; both are on the meta device.

    Stages other than the first are called with hidden states in place of tokens.
    """
    with torch.device("meta"):
        stage = type(model)(model.args)
        if is_last and model.output is None and model.score is None:
            stage.output = nn.Linear(model.args.dim, model.args.vocab_size, bias=False)
            stage.output.requires_grad_(model.embedding_weight.requires_grad)
        else:
            stage.output = model.output if is_last else None
    stage.layers = nn.ModuleDict({str(i): model.layers[str(i)] for i in layers})
    stage.tok_embeddings = model.tok_embeddings if is_first else None
    stage.norm = model.norm if is_last else None
    stage.score = model.score if is_last else None
    return stage


class TiedHead:
    """The embedding of the first stage and its copy in the last one, sharded alike.

    Ranks that hold neither have None for both; all ranks of the pipeline call.
    """

    def __init__(
        self,
        embedding: DTensor | None,
        copy: DTensor | None,
        layout: StageLayout,
        group: dist.ProcessGroup,
    ) -> None:
        self._embedding, self._copy = embedding, copy
        self._owner, self._user = layout.rank_of(0), layout.rank_of(layout.num_stages - 1)
        self._group = group

    @torch.no_grad()
    def collect_gradient(self) -> None:
        """Add the copy's gradient to the embedding's, once per step."""
        embedding, copy = _own_gradient(self._embedding), _own_gradient(self._copy)
        arrived = self._pass_on(copy, embedding, source=self._user, target=self._owner)
        if embedding is not None and arrived is not None:
            embedding += arrived
        if self._copy is not None:
            self._copy.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the copy after the embedding was loaded or updated."""
        embedding = None if self._embedding is None else self._embedding.to_local()
        copy = None if self._copy is None else self._copy.to_local()
        arrived = self._pass_on(embedding, copy, source=self._owner, target=self._user)
        if copy is not None and arrived is not None:
            copy.copy_(arrived)

    def _pass_on(
        self, tensor: torch.Tensor | None, like: torch.Tensor | None, *, source: int, target: int
    ) -> torch.Tensor | None:
        if source == target:
            return tensor
        if tensor is not None:
            dist.send(tensor.contiguous(), group=self._group, group_dst=target)
        if like is None:
            return None
        arrived = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(arrived, group=self._group, group_src=source)
        return arrived


def _own_gradient(weight: DTensor | None) -> torch.Tensor | None:
    if weight is None:
        return None
    assert isinstance(weight.grad, DTensor), "it is called after the backward pass"
    return weight.grad.to_local()
