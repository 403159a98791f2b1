"""The folder layout of one run, defined only here.

{fileroot}/{experiment_name}/{trial_name}/
    config.yaml      the config the run was started with, all values filled in
    models.json      the commit that each hub name of the config was at
    run.db           ledger, trajectories, statistics, events, configs (SQLite)
    recover/         points from which a killed run resumes
    checkpoints/     {role}/epoch{E}epochstep{S}globalstep{G}, Hugging Face format
    model/           the final weights, Hugging Face format
    weights/         published weights for the servers
    images/          images that trajectories show, by the sha256 of their bytes
    tmp/             temporary folders of the run's processes (api/scratch.py)
    agents/          servers for agents that run now, and their keys
    fleet/           requests of `areal serve join` to the run while it is alive (mailbox.py)
    logs/            main.log, server logs, dumped trajectories and episodes
    traces/          Chrome traces of the processes (JSONL); `areal trace` joins them
    profiles/        what torch did in some steps (perf_tracer.profile_steps)

The folder is private to its user (0700), and so is every file in it (0600), whatever the umask.
`checkpoints/` and `model/` are protected by the folder only: moved out of it they have ordinary
modes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from areal.utils.fs import private_folder, set_private

if TYPE_CHECKING:
    from areal.api.config.experiment import BaseExperimentConfig


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The paths of one run. Only `made` and `make_root` create folders."""

    root: Path

    @classmethod
    def of(cls, config: BaseExperimentConfig) -> RunPaths:
        return cls(Path(config.cluster.fileroot) / config.experiment_name / config.trial_name)

    @contextmanager
    def made(self) -> Iterator[None]:
        """Creates the run's folder. A user error that ends the block before the run has begun
        (before config.yaml exists) removes the folders created here."""
        new = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        self.make_root()
        try:
            yield
        except (ValueError, FileNotFoundError):
            if new and not self.config.exists():
                shutil.rmtree(self.root, ignore_errors=True)
                with suppress(OSError):  # another run was started there meanwhile
                    for folder in new[1:]:
                        folder.rmdir()
            raise

    def make_root(self) -> None:
        """Create the folder; an existing one becomes private too."""
        self.root.parent.mkdir(parents=True, exist_ok=True)  # shared with other runs, maybe users
        set_private(private_folder(self.root))

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def models(self) -> Path:
        return self.root / "models.json"

    @property
    def database(self) -> Path:
        return self.root / "run.db"

    @property
    def recover(self) -> Path:
        return self.root / "recover"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def scratch(self) -> Path:
        return self.root / "tmp"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def servers(self) -> Path:
        """Addresses of the running inference servers."""
        return self.root / "servers.json"

    @property
    def agents(self) -> Path:
        """Entries of the running servers for agents."""
        return self.root / "agents"

    @property
    def fleet(self) -> Path:
        """Requests to the living run about its servers."""
        return self.root / "fleet"

    @property
    def stacks(self) -> Path:
        """Stacks of all processes of a run that hangs."""
        return self.logs / "stacks.txt"

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    @property
    def profiles(self) -> Path:
        """Of torch, by step and rank."""
        return self.root / "profiles"

    def trace(self, process: str) -> Path:
        """The trace file of one process, e.g. `controller` or `server0`."""
        return self.traces / f"{process}.jsonl"
