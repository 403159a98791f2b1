"""Which rank of a pipeline holds which layers. Without torch: `areal check` uses it too.

layout = StageLayout.of(args.n_layers, num_ranks=2, schedule="1F1B")
"""

from __future__ import annotations

from dataclasses import dataclass

# Stages per rank. In V schedules a rank has one from each end, so the last stage is on rank 0.
_STAGES_PER_RANK = {
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
}
_MORE_STAGES_ALLOWED = ("Interleaved1F1B", "InterleavedZeroBubble")
_V_SCHEDULES = ("ZBVZeroBubble",)


def rank_of_last_stage(schedule: str, num_ranks: int) -> int:
    """The rank that computes the heads and the losses, whatever the model."""
    return 0 if schedule in _V_SCHEDULES else num_ranks - 1


@dataclass(frozen=True, slots=True)
class StageLayout:
    num_ranks: int
    layers: tuple[range, ...]  # of each stage
    is_v: bool = False

    @classmethod
    def of(
        cls,
        n_layers: int,
        *,
        num_ranks: int,
        schedule: str,
        layers_per_stage: int | None = None,
        embedding_layers: int = 1,
        head_layers: int = 1,
    ) -> StageLayout:
        """Equal work for each stage; the embedding and the head count as so many layers."""
        work = n_layers + embedding_layers + head_layers
        num_stages = num_ranks * _STAGES_PER_RANK[schedule]
        if layers_per_stage is not None:
            num_stages = -(-work // layers_per_stage)
            _check_stages(num_stages, num_ranks, schedule, work, layers_per_stage)
        sizes = [work // num_stages] * num_stages
        # The remainder goes to the ends first, which have fewer layers for their work.
        for stage in [-1, *range(num_stages - 1)][: work % num_stages]:
            sizes[stage] += 1
        sizes[0] -= embedding_layers
        sizes[-1] -= head_layers
        if min(sizes) < 1:
            raise ValueError(
                f"{schedule} cuts this model of {n_layers} layers into {num_stages} stages, some "
                f"of {max(min(sizes), 0)} layers; each needs at least one: use a smaller p, "
                "another archon.pp_schedule, or less for archon.pp_first_stage_less_layers and "
                "archon.pp_last_stage_less_layers"
            )
        starts = [sum(sizes[:stage]) for stage in range(num_stages)]
        layers = tuple(range(a, a + size) for a, size in zip(starts, sizes, strict=True))
        return cls(num_ranks, layers, is_v=schedule in _V_SCHEDULES)

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    def rank_of(self, stage: int) -> int:
        """Round-robin; in V schedules every other round is reversed."""
        round_, place = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - place if self.is_v and round_ % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage in range(self.num_stages) if self.rank_of(stage) == rank]

    def owner_of(self, name: str) -> int:
        """The rank that holds the weight `name` of the model."""
        top, _, rest = name.partition(".")
        if top == "layers":
            layer = int(rest.partition(".")[0])
            stage = next(i for i, layers in enumerate(self.layers) if layer in layers)
        else:
            stage = 0 if top == "tok_embeddings" else self.num_stages - 1
        return self.rank_of(stage)


def _check_stages(
    num_stages: int, num_ranks: int, schedule: str, work: int, layers_per_stage: int
) -> None:
    per_rank = _STAGES_PER_RANK[schedule]
    fits = num_stages == num_ranks * per_rank
    if schedule in _MORE_STAGES_ALLOWED:
        fits = num_stages >= num_ranks * per_rank and num_stages % num_ranks == 0
        per_rank = f"{per_rank} or more"
    if not fits:
        raise ValueError(
            f"archon.pp_layers_per_stage={layers_per_stage} makes {num_stages} stages of the work "
            f"of {work} layers (embedding and head included), but {schedule} needs {per_rank} "
            f"on each of {num_ranks} ranks: choose another number, or leave it out"
        )
