"""The `cluster` and `scheduler` sections: where files lie and who starts processes."""

from __future__ import annotations

from typing import Literal

from areal.api.config.checks import expand_path, require, require_at_least
from areal.api.config.section import config_section


@config_section
class ClusterSpecConfig:
    """What the run needs to know about the machines."""

    fileroot: str = "runs"
    """Folder of all runs. What a run keeps is under {fileroot}/{experiment_name}/{trial_name}."""
    n_nodes: int = 1
    """Machines of the run; more than one needs Ray. `areal launch slurm` asks for as many, and
    `areal launch ray` waits for them."""
    n_gpus_per_node: int = 0
    """GPUs that `areal launch slurm` asks for on each machine."""

    def __post_init__(self) -> None:
        require_at_least(1, n_nodes=self.n_nodes)
        require_at_least(0, n_gpus_per_node=self.n_gpus_per_node)
        require(bool(self.fileroot), "fileroot must name a folder", self.fileroot)
        self.fileroot = expand_path("fileroot", self.fileroot)


@config_section
class SchedulerConfig:
    """Who starts worker processes."""

    type: Literal["local", "ray"] = "local"
    """`local`: the controller itself, on this machine; a layout of one rank then runs in the
    controller. `ray`: Ray, on one machine or a cluster; needs the extra `ray`."""
    placement: Literal["PACK", "SPREAD"] = "PACK"
    """With Ray, the workers of a role on few machines or on many."""
