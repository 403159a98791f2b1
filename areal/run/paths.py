"""Where the files of one run lie: the only place that spells out the folder layout.

{fileroot}/{experiment_name}/{trial_name}/
    config.yaml      the config the run was started with, all values filled in
    models.json      the commit that each hub name of the config was at
    run.db           ledger, trajectories, statistics, events, configs (SQLite)
    recover/         points a killed run goes on from
    checkpoints/     {role}/epoch{E}epochstep{S}globalstep{G}, Hugging Face format
    model/           the final weights, Hugging Face format
    weights/         publications of new weights on their way to the servers
    tmp/             temporary folders of the run's processes (api/scratch.py)
    logs/            main.log, server logs, and dumped trajectories
    traces/          the Chrome trace of the controller (JSONL)

The folder is its user's alone (0700), and so is all that areal writes into it (0600), whatever the
umask says. `checkpoints/` and `model/` are guarded by the folder only: moved out of it they have
the modes that any file of their user has.
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
    """The paths of one run. Asking for a path creates nothing; `made` and `make_root` do."""

    root: Path

    @classmethod
    def of(cls, config: BaseExperimentConfig) -> RunPaths:
        return cls(Path(config.cluster.fileroot) / config.experiment_name / config.trial_name)

    @contextmanager
    def made(self) -> Iterator[None]:
        """The run's folder while the block runs. A user's mistake that ends the block before the
        run has begun (it then has a config.yaml) leaves no folder that was not there."""
        new = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        self.make_root()
        try:
            yield
        except (ValueError, FileNotFoundError):
            if new and not self.config.exists():
                shutil.rmtree(self.root, ignore_errors=True)
                with suppress(OSError):  # of another run that was started meanwhile
                    for folder in new[1:]:
                        folder.rmdir()
            raise

    def make_root(self) -> None:
        """Make the folder; one that is there already becomes private too."""
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
    def scratch(self) -> Path:
        return self.root / "tmp"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def servers(self) -> Path:
        """The addresses of the inference servers that run now."""
        return self.root / "servers.json"

    @property
    def stacks(self) -> Path:
        """Where the processes of a run that hangs stood."""
        return self.logs / "stacks.txt"

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    def trace(self, process: str) -> Path:
        """The trace file of one process, e.g. `controller` or `server0`."""
        return self.traces / f"{process}.jsonl"
