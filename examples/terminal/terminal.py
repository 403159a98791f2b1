"""Terminal tasks: folders in Harbor's layout, worked on in a sandbox and graded in a second one.

    task/instruction.md     what the model is told
    task/environment/       files that lie in its workspace
    task/tests/test.sh      not shown to the model; leaves its verdict in /logs/verifier/reward.txt
    task/task.toml          verifier.timeout_sec, environment.memory_mb, environment.storage_mb

The same folders run by `env: harbor:FOLDER`, which has Harbor's own package read and check them
(docs/environments.md). Here the few keys above are read by ourselves, so that nothing needs to be
installed; what happens in an episode is the same.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from areal.dataset.chat_rows import Rows
from areal.environments.hubs.harbor import PROMPT, HarborEnv
from areal.environments.hubs.harbor_tasks import Options, task_of
from areal.environments.interface import EnvError

TASKS = "examples/terminal/tasks"
__all__ = ["PROMPT", "Terminal", "load"]


def load(path, split, tokenizer, max_length=None, tasks=TASKS, num_rows=None):
    """A row for each task: {"task": its folder}. All of them are in every split."""
    folders = sorted(file.parent for file in Path(tasks).glob("*/task.toml"))
    return Rows({"task": str(folder)} for folder in folders[:num_rows])


class Terminal(HarborEnv):
    def __init__(self, **options):
        super().__init__(Folders(Options.of(options)))


class Folders:
    env = "examples.terminal.terminal.Terminal"

    def __init__(self, options: Options) -> None:
        self.options = options

    async def task(self, row):
        folder = Path(row["task"])
        file = folder / "task.toml"
        try:
            config = tomllib.loads(file.read_text(encoding="utf-8"))
            told = (folder / "instruction.md").read_text(encoding="utf-8")
            given = {"name": folder.name, "folder": folder, "instruction": told, "config": config}
            return task_of(given, self.options)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise EnvError(f"{file}: {error}; its keys are those of {__name__}") from error
