"""From a parallel layout to a DeviceMesh with named axes.

    dims = ParallelDims.of(ModelAllocation.from_str("archon:d2t2").parallel)
    mesh = dims.build_mesh("cpu")          # every rank calls
    mesh["tp"], mesh.get_group("dp")

Axes from the slowest to the fastest: pp, dp_replicate, dp_shard, cp, tp; so the ranks of one tp
group, which communicate most, are neighbours. Ranks of pp hold different layers and have the same
rows of the batch. Flattened axes of the same mesh:

| axis      | of                         | its ranks                                               |
|-----------|----------------------------|---------------------------------------------------------|
| `dp`      | dp_replicate, dp_shard     | have different rows of the batch                        |
| `cp_tp`   | cp, tp                     | compute the same rows together; the first is their head |
| `fsdp`    | dp_shard, cp               | each hold a shard of the weights                        |
| `fsdp_tp` | dp_shard, cp, tp           | each hold a shard of the routers, and of uncut experts  |
| `stage`   | all but pp                 | have the same layers                                    |

Layouts with expert parallelism (e, or a t of their own: etp is 1 or tp) have a second mesh of the
same ranks, with axes pp, dp_replicate, efsdp, ep, etp, where efsdp * ep * etp = dp_shard * cp * tp:
ep ranks are neighbours, etp are the ranks of tp, and efsdp, the rest, shards the experts.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal.api.alloc_mode import (
    ParallelStrategy,
    check_expert_tensor_parallel,
    check_num_experts,
)

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from areal.models.common.args import DecoderArgs

_JOINED_AXES = {
    "dp": ("dp_replicate", "dp_shard"),
    "cp_tp": ("cp", "tp"),
    "fsdp": ("dp_shard", "cp"),
    "fsdp_tp": ("dp_shard", "cp", "tp"),
    "stage": ("dp_replicate", "dp_shard", "cp", "tp"),
}
_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep", "etp")


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Ranks along each axis."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    @classmethod
    def of(cls, strategy: ParallelStrategy, *, num_replicas: int = 1) -> ParallelDims:
        """`num_replicas` groups of data-parallel ranks each hold a sharded copy of all weights."""
        dp = strategy.data_parallel_size
        if num_replicas < 1 or dp % num_replicas:
            raise ValueError(
                f"the layout {strategy} has d{dp}, which {num_replicas} replicas do not divide: "
                "choose a number of replicas that divides d"
            )
        dims = cls(
            pp=strategy.pipeline_parallel_size,
            dp_replicate=num_replicas,
            dp_shard=dp // num_replicas,
            cp=strategy.context_parallel_size,
            tp=strategy.tensor_parallel_size,
            ep=strategy.expert_parallel_size,
            etp=strategy.expert_tensor_parallel_size,
        )
        dims._check_experts(strategy)
        return dims

    def _check_experts(self, strategy: ParallelStrategy) -> None:
        check_expert_tensor_parallel(strategy)
        ranks = self.dp_shard * self.cp * self.tp
        if ranks % (self.ep * self.etp):
            raise ValueError(
                f"the layout {strategy} spreads experts over {self.ep * self.etp} ranks, which do "
                f"not divide the {ranks} that hold the weights together (d * c * t by the number "
                f"of replicas, {self.dp_replicate}): choose another e"
            )

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def efsdp(self) -> int:
        """Ranks over which the experts of one (ep, etp) rank are sharded."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def build_mesh(self, device_type: str) -> ParallelMesh:
        """Every rank of torch.distributed calls this, in the same order among collectives."""
        import torch.distributed as dist  # here: `areal check` needs the sizes alone

        if dist.get_world_size() != self.world_size:
            raise ValueError(
                f"the layout {self} needs {self.world_size} ranks, but {dist.get_world_size()} "
                "processes were started: start as many, or change the backend string"
            )
        mesh = self._cut_world(device_type, _AXES)
        spreads_experts = self.ep * self.etp > 1
        experts = self._cut_world(device_type, _EXPERT_AXES) if spreads_experts else None
        return ParallelMesh(mesh, experts)

    def _cut_world(self, device_type: str, axes: tuple[str, ...]) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        sizes = tuple(getattr(self, axis) for axis in axes)
        return init_device_mesh(device_type, sizes, mesh_dim_names=axes)


def check_layout(args: DecoderArgs, dims: ParallelDims) -> None:
    """ValueError, before anything is built, if the model does not fit these dims."""
    if args.latent is not None and dims.tp > 1:
        raise ValueError(
            f"t{dims.tp}: archon does not cut multi-head latent attention ({args.model_type}) over "
            "tensor parallel ranks; lay the model out with d, c, p and e"
        )
    if args.delta is not None and (dims.tp > 1 or dims.cp > 1):
        found = f"t{dims.tp}" if dims.tp > 1 else f"c{dims.cp}"
        raise ValueError(
            f"{found}: archon does not cut layers with a recurrent state ({args.model_type}) over "
            "tensor or context parallel ranks; lay the model out with d, p and e"
        )
    if args.vision is not None and (dims.tp > 1 or dims.pp > 1):
        raise ValueError(
            f"t{dims.tp}p{dims.pp}: archon does not cut a model with a vision tower "
            f"({args.model_type}) over tensor or pipeline parallel ranks; lay it out with d and c"
        )
    check_heads(args.n_heads, args.n_kv_heads, dims)
    _check_cut({"intermediate_size": args.hidden_dim, "vocab_size": args.vocab_size}, dims)
    if dims.ep * dims.etp > 1:
        _check_experts(args, dims)


def _check_cut(counts: Mapping[str, int], dims: ParallelDims) -> None:
    for key, count in counts.items():
        if count % dims.tp:
            raise ValueError(
                f"t{dims.tp} cannot cut this model: {key} of its config.json must be a multiple "
                f"of {dims.tp}, got {count}; choose another t"
            )


def check_heads(n_heads: int, n_kv_heads: int, dims: ParallelDims) -> None:
    """ValueError unless heads divide evenly among the ranks of t, and then among those of c."""
    _check_cut({"num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads}, dims)
    heads, kv_heads = n_heads // dims.tp, n_kv_heads // dims.tp
    if heads % dims.cp or (kv_heads % dims.cp and dims.cp % kv_heads):
        raise ValueError(
            f"c{dims.cp} cannot cut this model: context parallel ranks divide its {heads} query "
            f"and {kv_heads} key-value heads (per rank of t{dims.tp}) among them; choose another c"
        )


def _check_experts(args: DecoderArgs, dims: ParallelDims) -> None:
    moe = args.moe
    check_num_experts(dims.ep, 0 if moe is None else moe.num_experts)
    assert moe is not None
    if moe.hidden_dim % dims.etp:
        raise ValueError(
            f"experts cannot be cut over t{dims.etp}: moe_intermediate_size of the model's "
            f"config.json must be a multiple of {dims.etp}, got {moe.hidden_dim}"
        )
    own_experts = moe.num_experts // dims.ep
    if own_experts % dims.efsdp and args.dim % dims.efsdp:
        raise ValueError(
            f"neither the {own_experts} experts of a rank of e{dims.ep} nor the "
            f"model's hidden_size of {args.dim} can be cut over the {dims.efsdp} ranks that hold "
            "the same experts: choose another e or d"
        )


class ParallelMesh:
    """Ranks by axis name, flattened axes included; `experts`: the mesh of expert parallelism."""

    def __init__(self, mesh: DeviceMesh, experts: DeviceMesh | None = None) -> None:
        self._mesh = mesh
        self._experts = experts
        self._joined = {name: mesh[axes]._flatten(name) for name, axes in _JOINED_AXES.items()}

    @property
    def spreads_experts(self) -> bool:
        """Whether the axes efsdp, ep and etp exist."""
        return self._experts is not None

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        if axes in self._joined:
            return self._joined[axes]
        names = (axes,) if isinstance(axes, str) else axes
        if not {"efsdp", "ep", "etp"}.isdisjoint(names):
            assert self._experts is not None, f"{axes}: this layout spreads no experts"
            return self._experts[axes]
        with warnings.catch_warnings():
            # torch has no other public way yet to combine a flattened axis with another.
            warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)
            return self._mesh[axes]

    def get_group(self, axis: str) -> dist.ProcessGroup:
        return self[axis].get_group()

    def in_replicas(self, axis: str) -> DeviceMesh:
        """The mesh FSDP shards over: `axis`, under dp_replicate if there are replicas."""
        return self["dp_replicate", axis] if self["dp_replicate"].size() > 1 else self[axis]
