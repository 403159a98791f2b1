"""The one process per test process from which others are forked: it has imported torch already.

    fork(function, *args).start()

Importing torch and the trainers takes seconds of a core, for every process of every test. Python
has one such server in a process, so all tests that fork from it share this list.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
# Slow to import, and used by what is forked. None of it starts a thread, which a fork would lose.
FORKS.set_forkserver_preload(
    [
        "areal.trainer.experiment",
        "areal.agents.router",
        "areal.agents.workflow",
        "areal.engine.train.archon",
        "areal.engine.native.server",
        "areal.engine.native.local_engine",
        "omegaconf",
        "torch._dynamo",  # imported when a model is built
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
        "transformers.modeling_utils",
        "transformers.models.auto.tokenization_auto",
    ]
)


def fork(target: Callable[..., object], *args: Any, daemon: bool = False) -> BaseProcess:
    """A process that will call `target(*args)`."""
    return FORKS.Process(target=_run_forked, args=(target, args), daemon=daemon)


def _run_forked(target: Callable[..., object], args: tuple[Any, ...]) -> None:
    # To search what was imported for garbage would copy it all, as the server's pages are shared.
    gc.freeze()
    target(*args)


def take_environment(env: Mapping[str, str]) -> None:
    """In a forked process: `env` and no other variables, as if it had been started with them."""
    os.environ.clear()
    os.environ.update(env)
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None:  # it reads its variables while it is imported
        importlib.reload(constants)
