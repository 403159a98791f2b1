"""What each layer of a decoder computes for a few tokens, as numbers that two processes compare.

    trace = trace_layers(model, [5, 7, 9])
    trace["layers"]["layers.0"]     # 2 T numbers of the first block's output
    trace["experts"]["layers.0"]    # [T][K] experts that its router chose, of a model with experts
    trace["args"]["rope.theta"]     # the architecture the model was built with

A hidden state is described by its direction (the cosine to a fixed vector) and the logarithm of its
length: equal states have equal numbers, different ones almost surely differ, and 2 T numbers fit in
a reply where the state itself would not. All values are JSON.

Shape legend: T tokens, D model dim, V vocabulary, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import nn

from areal.models.common.args import DecoderArgs
from areal.models.common.attention import PackedAttention
from areal.models.common.decoder import Decoder
from areal.models.common.moe import MoE


def trace_layers(model: Decoder, tokens: Sequence[int]) -> dict[str, Any]:
    """One forward of `tokens` as one sequence; the whole model must be in this process."""
    device = model.embedding_weight.device
    tokens_T = torch.tensor(list(tokens), device=device)
    attend = PackedAttention(torch.tensor([0, len(tokens_T)], device=device), len(tokens_T))
    trace, hidden_TD = trace_forward(model, tokens_T, attend.positions_T, attend)
    with torch.no_grad():
        trace["layers"]["logits"] = _listed(_described(model.logits(hidden_TD)))
    return trace


@torch.no_grad()
def trace_forward(
    model: Decoder,
    tokens_T: torch.Tensor,
    positions_T: torch.Tensor,
    attend: Any,
    join: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
) -> tuple[dict[str, Any], torch.Tensor]:
    """The trace without logits, and the hidden states. `join` makes the rows of all tokens of those
    that a rank has, where several share them; it is called on all of them in the same order."""
    layers: dict[str, list[float]] = {}
    experts: dict[str, list[list[int]]] = {}

    def keep_layer(name: str, out_TD: torch.Tensor) -> None:
        layers[name] = _listed(join(_described(out_TD)))

    def keep_experts(name: str, chosen_TK: torch.Tensor) -> None:
        experts[name] = join(chosen_TK).tolist()

    with ExitStack() as hooks:
        for name, module in _watched(model):
            _hook(hooks, module, lambda out, name=name: keep_layer(name, out))
            feed_forward = getattr(module, "feed_forward", None)
            if isinstance(feed_forward, MoE):
                router = feed_forward.router
                _hook(hooks, router, lambda out, name=name: keep_experts(name, out[1]))
        hidden_TD = model(tokens_T, positions_T, attend)
    return {"layers": layers, "experts": experts, "args": _flat(model.args)}, hidden_TD


@torch.no_grad()
def trace_modules(
    modules: Mapping[str, nn.Module], run: Callable[[], object]
) -> dict[str, list[float]]:
    """`layers` of a trace, of modules of any model whose outputs are [1, T, D] (or begin with that)
    while `run()` computes one sequence."""
    layers: dict[str, list[float]] = {}

    def keep(name: str, out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        layers[name] = _listed(_described(hidden[0]))

    with ExitStack() as hooks:
        for name, module in modules.items():
            _hook(hooks, module, lambda out, name=name: keep(name, out))
        run()
    return layers


def _watched(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    assert model.tok_embeddings is not None and model.norm is not None, "the whole model is here"
    yield "embedding", model.tok_embeddings
    for index, block in model.layers.items():
        yield f"layers.{index}", block
    yield "norm", model.norm


def _hook(hooks: ExitStack, module: nn.Module, take: Any) -> None:
    handle = module.register_forward_hook(lambda _, __, out: take(out))
    hooks.callback(handle.remove)


def _listed(described_T2: torch.Tensor) -> list[float]:
    """All directions, then all lengths."""
    return described_T2.T.flatten().tolist()


def _described(x_TD: torch.Tensor) -> torch.Tensor:
    """Direction of each token and logarithm of its length; float64, so that only the model's own
    rounding is seen."""
    # Late: a fifth of the start of a server, which needs it for nothing else.
    from torch.distributed.tensor import DTensor

    if isinstance(x_TD, DTensor):
        x_TD = x_TD.full_tensor()
    x_TD = x_TD.double()
    probe_D = torch.cos(torch.arange(1, x_TD.shape[1] + 1, dtype=x_TD.dtype, device=x_TD.device))
    length_T = x_TD.norm(dim=1).clamp(min=1e-30)
    direction_T = (x_TD @ probe_D) / (length_T * probe_D.norm())
    return torch.stack([direction_T, length_T.log()], dim=1)


def _flat(args: DecoderArgs) -> dict[str, Any]:
    """JSON values by dotted name, of what changes a forward."""
    flat: dict[str, Any] = {}

    def add(prefix: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                add(f"{prefix}{name}.", cast("dict[str, Any]", value))
            else:
                many = isinstance(value, frozenset | tuple)
                flat[f"{prefix}{name}"] = list(value) if many else value

    add("", asdict(args))
    return {name: value for name, value in flat.items() if name != "initializer_range"}
