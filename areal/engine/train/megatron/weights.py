"""Weights of a megatron-core model from and to a Hugging Face checkpoint, tensor by tensor.

megatron-core fuses tensors of a checkpoint, and each rank holds a shard of the result:

| its parameter | made of                      | unsharded                              | cut over |
|---------------|------------------------------|----------------------------------------|----------|
| linear_qkv    | q_proj, k_proj, v_proj       | per key-value head: its queries, k, v  | heads    |
| linear_fc1    | gate_proj, up_proj           | gate over up                           | width    |
| embedding     | embed_tokens (a tied lm_head)| rows padded to a multiple of the ranks | rows     |
| the others    | one tensor of the checkpoint | the same                               |          |

`named_pieces` maps each parameter of this rank to its sources, under a name that is the same on all
ranks. `fill` loads and `stream` exports. The only rounding is to the model's dtype, so a checkpoint
of that dtype round-trips bit by bit.

Sources of `fill` are `read(hf_name) -> unsharded tensor`: `folder_weights` reads safetensors whose
names and shapes are checked, on every rank alike, before the first byte is read; `drawn_weights`
draws from a seed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from safetensors import safe_open
from torch import nn

from areal.engine.train.megatron.layout import Layout
from areal.engine.train.megatron.model import MegatronStage, padded_vocab_size
from areal.models.common.args import DecoderArgs
from areal.models.hf_io import (
    SCORE_HEAD,
    build_model,
    check_hf_shapes,
    has_score_head,
    read_shapes,
    weight_files,
)

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")

# Tensors of a layer that differ from the checkpoint's only in their names: (name, cut dim).
_PLAIN = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
    "mlp.router.weight": ("mlp.gate.weight", None),
}
Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """Sources of a parameter. `whole_shape` may have one dimension more than the parameter, which
    is flattened into the next after sharding."""

    hf_names: tuple[str, ...]
    whole_shape: tuple[int, ...]
    cut_dim: int | None  # of the unsharded tensor; None: replicated
    fuse: Callable[[list[torch.Tensor]], torch.Tensor]
    split: Callable[[torch.Tensor], list[torch.Tensor]]
    is_expert: bool = False

    def group(self, layout: Layout) -> dist.ProcessGroup:
        """The ranks that hold the shards."""
        return layout.expert_tp if self.is_expert else layout.tp

    def part_shape(self, layout: Layout) -> tuple[int, ...]:
        shape = list(self.whole_shape)
        if self.cut_dim is not None:
            shape[self.cut_dim] //= self.group(layout).size()
        return tuple(shape)


def named_pieces(stages: list[MegatronStage]) -> dict[str, tuple[Piece, nn.Parameter]]:
    """This rank's parameters by name, with global layer and expert indices."""
    pieces = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            name = _global_name(name, stage)
            pieces[name] = (_piece(name, parameter, stage.args, stage.layout), parameter)
    return pieces


def mark_parts(stages: list[MegatronStage]) -> None:
    """Mark parameters that are sharded over tensor ranks.

    megatron-core marks them when it draws weights; unmarked, the gradient norm counts them once.
    """
    for piece, parameter in named_pieces(stages).values():
        if piece.cut_dim is None or hasattr(parameter, "tensor_model_parallel"):
            continue
        flattened = len(piece.whole_shape) > parameter.ndim
        dim = 0 if flattened else piece.cut_dim
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)


def part_names(stages: list[MegatronStage]) -> dict[str, nn.Parameter]:
    """This rank's tensors by name; two ranks share a name exactly if they hold the same shard."""
    tensors = {}
    for name, (piece, parameter) in named_pieces(stages).items():
        group = piece.group(stages[0].layout)
        if piece.cut_dim is not None and group.size() > 1:
            name = f"{name}.{group.rank()}of{group.size()}"
        tensors[name] = parameter
    return tensors


@torch.no_grad()
def fill(stages: list[MegatronStage], read: Callable[[str], torch.Tensor]) -> None:
    """Load every parameter; `read` returns the unsharded tensor of a Hugging Face name."""
    for piece, parameter in named_pieces(stages).values():
        whole = piece.fuse([read(name) for name in piece.hf_names])
        if piece.cut_dim is not None:
            group = piece.group(stages[0].layout)
            whole = whole.chunk(group.size(), dim=piece.cut_dim)[group.rank()]
        parameter.copy_(whole.reshape(parameter.shape))


@torch.no_grad()
def stream(
    stages: list[MegatronStage],
    value: Callable[[nn.Parameter], torch.Tensor] = torch.Tensor.detach,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, unsharded tensor) of each weight, or of what `value` takes from it.

    All ranks must iterate to the end, because shards are gathered; only rank 0 gets tensors. One
    parameter is unsharded at a time.
    """
    args, layout, own = stages[0].args, stages[0].layout, named_pieces(stages)
    is_receiver = dist.get_rank() == 0
    for name, (shape, hf_names), owner in _all_pieces(own):
        whole = None
        if name in own:
            piece, parameter = own[name]
            whole = _gather(piece, value(parameter), layout)
        if owner != 0 and dist.get_rank() in (0, owner):
            whole = _move(whole, shape, owner, stages[0])
        if is_receiver:
            piece = _piece_by_name(name, args, layout)
            assert whole is not None and piece.hf_names == tuple(hf_names)
            yield from zip(piece.hf_names, piece.split(whole), strict=True)


def _all_pieces(
    own: dict[str, tuple[Piece, nn.Parameter]],
) -> Iterator[tuple[str, tuple[tuple[int, ...], tuple[str, ...]], int]]:
    """Every parameter of the model once, in rank order: its name, shape, checkpoint names and
    first owner."""
    mine = {name: (piece.whole_shape, piece.hf_names) for name, (piece, _) in own.items()}
    theirs: list = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    seen: set[tuple[str, ...]] = set()
    for owner, pieces in enumerate(theirs):
        for name, facts in pieces.items():
            if facts[1] not in seen:  # a tied head is the embedding
                seen.add(facts[1])
                yield name, facts, owner


def _gather(piece: Piece, part: torch.Tensor, layout: Layout) -> torch.Tensor:
    part = part.view(piece.part_shape(layout))
    group = piece.group(layout)
    if piece.cut_dim is None or group.size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=piece.cut_dim)


def _move(
    whole: torch.Tensor | None, shape: tuple[int, ...], owner: int, stage: MegatronStage
) -> torch.Tensor | None:
    """From its owner to rank 0."""
    if dist.get_rank() == owner:
        assert whole is not None, "its owner has gathered it"
        dist.send(whole.contiguous(), dst=0)
        return None
    some = next(stage.parameters())
    whole = torch.empty(shape, dtype=some.dtype, device=some.device)
    dist.recv(whole, src=owner)
    return whole


def _global_name(name: str, stage: MegatronStage) -> str:
    if match := _LAYER.fullmatch(name):
        layer: Any = stage.decoder.layers[int(match[1])]
        rest = match[2]
        if expert := _EXPERT.fullmatch(rest):
            number = layer.mlp.local_expert_indices[int(expert[1])]
            rest = f"mlp.experts.local_experts.{number}.{expert[2]}"
        name = f"decoder.layers.{layer.layer_number - 1}.{rest}"
    return name


def _piece(name: str, parameter: nn.Parameter, args: DecoderArgs, layout: Layout) -> Piece:
    piece = _piece_by_name(name, args, layout)
    parts = torch.Size(piece.part_shape(layout))
    assert parts.numel() == parameter.numel(), f"{name}: {parts} and {parameter.shape}"
    return piece


def _piece_by_name(name: str, args: DecoderArgs, layout: Layout) -> Piece:
    if match := _LAYER.fullmatch(name):
        return _layer_piece(f"model.layers.{match[1]}.", match[2], args)
    rows = padded_vocab_size(args, layout)
    return {
        "embedding.word_embeddings.weight": _vocab("model.embed_tokens.weight", rows, args),
        "output_layer.weight": _vocab(
            "model.embed_tokens.weight" if args.tie_word_embeddings else "lm_head.weight",
            rows,
            args,
        ),
        "decoder.final_layernorm.weight": _plain("model.norm.weight", (args.dim,), None),
        "score.weight": _plain("score.weight", (1, args.dim), None),
    }[name]


def _layer_piece(prefix: str, name: str, args: DecoderArgs) -> Piece:
    if match := _EXPERT.fullmatch(name):
        mlp, width = f"{prefix}mlp.experts.{match[1]}.", args.expert_args.hidden_dim
        if match[2] == "linear_fc1.weight":
            return _gate_up(mlp, width, args, is_expert=True)
        return _plain(f"{mlp}down_proj.weight", (args.dim, width), 1, is_expert=True)
    if name == "mlp.linear_fc1.weight":
        return _gate_up(f"{prefix}mlp.", args.hidden_dim, args)
    if name.startswith("self_attention.linear_qkv."):
        return _qkv(f"{prefix}self_attn.", name.rpartition(".")[2], args)
    hf_name, cut_dim = _PLAIN[name]
    return _plain(prefix + hf_name, _plain_shape(name, args), cut_dim)


def _plain_shape(name: str, args: DecoderArgs) -> tuple[int, ...]:
    if name.startswith("self_attention.") and name.endswith("_layernorm.weight"):
        return (args.head_dim,)
    return {
        "self_attention.linear_proj.weight": (args.dim, args.n_heads * args.head_dim),
        "mlp.linear_fc2.weight": (args.dim, args.hidden_dim),
        "mlp.router.weight": (args.moe.num_experts if args.moe else 0, args.dim),
    }.get(name, (args.dim,))


def _plain(
    hf_name: str, shape: tuple[int, ...], cut_dim: int | None, *, is_expert: bool = False
) -> Piece:
    return Piece(
        (hf_name,), shape, cut_dim, lambda x: x[0], lambda whole: [whole], is_expert=is_expert
    )


def _gate_up(prefix: str, width: int, args: DecoderArgs, *, is_expert: bool = False) -> Piece:
    return Piece(
        (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"),
        (2, width, args.dim),
        1,
        torch.stack,
        lambda whole: list(whole.unbind()),
        is_expert=is_expert,
    )


def _vocab(hf_name: str, rows: int, args: DecoderArgs) -> Piece:
    missing = rows - args.vocab_size
    return Piece(
        (hf_name,),
        (rows, args.dim),
        0,
        lambda x: F.pad(x[0], (0, 0, 0, missing)),
        lambda whole: [whole[: args.vocab_size]],
    )


def _qkv(prefix: str, leaf: str, args: DecoderArgs) -> Piece:
    """[key-value heads, rows of one, D], or without D for the biases."""
    groups, size = args.n_kv_heads, args.head_dim
    rows = (args.n_heads // groups * size, size, size)
    columns = (args.dim,) if leaf == "weight" else ()

    def fuse(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([x.unflatten(0, (groups, -1)) for x in tensors], dim=1)

    def split(whole: torch.Tensor) -> list[torch.Tensor]:
        return [x.flatten(0, 1) for x in whole.split(rows, dim=1)]

    names = tuple(f"{prefix}{x}_proj.{leaf}" for x in "qkv")
    return Piece(names, (groups, sum(rows), *columns), 0, fuse, split)


def drawn_weights(hf_config: Mapping[str, Any], seed: int, is_critic: bool) -> Read:
    """A function of (config, seed) alone, whatever the layout; equal to Archon's."""
    model = build_model(hf_config, device="cpu", dtype=torch.float32, is_critic=is_critic)
    model.init_weights(seed)
    return dict(model.named_hf_tensors()).__getitem__


@contextmanager
def folder_weights(
    hf_config: Mapping[str, Any], path: str | Path, *, is_critic: bool, new_critic: bool
) -> Iterator[Read]:
    """`new_critic`: a score head missing in the folder is 0."""
    files = weight_files(Path(path))
    model = build_model(hf_config, device="meta", dtype=torch.float32, is_critic=is_critic)
    shapes = read_shapes(files)
    draws_score = new_critic and not has_score_head(path)
    if draws_score:
        shapes[SCORE_HEAD] = (1, model.args.dim)
    check_hf_shapes(model, shapes, source=str(path))
    with ExitStack() as stack:
        places = {}
        for file in files:
            tensors = stack.enter_context(safe_open(file, framework="pt"))
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                places[model.adapter.usual_hf_name(name)] = (tensors, name)

        def read(hf_name: str) -> torch.Tensor:
            if hf_name == SCORE_HEAD and draws_score:
                return torch.zeros(shapes[SCORE_HEAD])
            tensors, name = places[hf_name]
            return tensors.get_tensor(name)

        yield read
