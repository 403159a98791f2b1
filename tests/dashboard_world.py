"""A run on the disk as a real one leaves it, written in milliseconds by the run's own classes, and
the dashboard's server over it."""

from __future__ import annotations

import http.client
import json
import threading
from pathlib import Path

import torch
import uvicorn
from tiny_tokenizer import byte_tokenizer

from areal.dashboard.routes import Routes
from areal.dashboard.server import create_app
from areal.evaluation.store import Evaluation, ResultStore, SampleResult
from areal.rollout.buffer import Outcome
from areal.rollout.executor import Batch
from areal.rollout.ledger import Ledger
from areal.rollout.source import Prompt
from areal.run.database import RunDatabase, Start
from areal.trainer.samples import SampleRecorder
from areal.utils.addresses import bind
from areal.utils.http_server import server_config

TOKEN = "a-token-of-this-test"
GROUP = 2
CONFIG = """\
experiment_name: math
trial_name: first
total_train_epochs: 1
total_train_steps: 40
total_train_n_seqs: null
train_dataset: {batch_size: 2}
rollout: {max_head_offpolicyness: 2}
actor: {optimizer: {lr: 0.001}}
"""


def group(version: int) -> dict:
    """Two samples: 2 prompt tokens, then 2 generated ones (and padding), or 3 of which the model
    only read the second."""
    return {
        "input_ids": torch.tensor([[5, 6, 7, 8, 0], [5, 6, 9, 3, 4]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool(),
        "loss_mask": torch.tensor([[0, 0, 1, 1, 0], [0, 0, 1, 0, 1]]),
        "logprobs": torch.tensor([[0, 0, -0.5, -1.0, 0], [0, 0, -2.0, 0, -0.25]]),
        "versions": torch.tensor([[-1, -1, version, version, 0], [-1, -1, version, -1, version]]),
        "rewards": torch.tensor([1.0, 0.0]),
    }


def computed(num_groups: int, step: int) -> dict:
    """What training computes: position t is about token t + 1. It has no entropy in step 0, and
    none of the first sample in step 1."""
    rows = GROUP * num_groups
    entropy = torch.arange(5.0).repeat(rows, 1) / 2
    if step == 1:
        entropy[0] = torch.nan
    return {
        **({"entropy": entropy} if step > 0 else {}),
        "rewards": torch.tensor([1.0, 0.0] * num_groups),
        "advantages": torch.arange(5.0).expand(rows, 5),
        "prox_logp": torch.full((rows, 5), -0.5),
    }


class WrittenRun:
    """`steps` steps of two prompts each; one more group finished, one failed, one running."""

    def __init__(self, root: Path, *, steps: int = 3, config: str = CONFIG, **stats: float) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        (root / "config.yaml").write_text(config)
        self.database = RunDatabase(root / "run.db")
        self.ledger = Ledger(self.database)
        self.recorder = SampleRecorder(self.database, byte_tokenizer(), total_steps=steps)
        self.database.record_start(Start(0, config, 1000, {}))
        self.database.record_event("started", "step 0")
        self.num_steps = 0
        for _ in range(steps):
            self.train_step(**stats)
        last = [Prompt(2 * steps + i, 0, i, {}) for i in range(3)]
        self.ledger.issue(last, steps)
        self.settle(last[:1])
        failed = Outcome(last[1].task_id, "failed", steps, steps, steps, why="TimeoutError: 3 s")
        self.ledger.settle([failed], steps)

    def settle(self, prompts: list[Prompt]) -> None:
        version = self.num_steps
        self.ledger.settle(
            [
                Outcome(one.task_id, "finished", *[version] * 3, trajectory=group(version))
                for one in prompts
            ],
            version,
        )

    def train_step(self, **stats: float) -> None:
        step = self.num_steps
        prompts = [Prompt(2 * step + i, 0, i, {}) for i in range(2)]
        ids = [prompt.task_id for prompt in prompts]
        self.ledger.issue(prompts, step)
        self.settle(prompts)
        self.ledger.trained(ids, step, step)
        batch = Batch(step, ids, [group(step) for _ in ids], [])
        self.recorder.record(batch, computed(2, step), step)
        times = {"timeperf/step": 2.0, "timeperf/train": 1.0, "timeperf/rollout": 0.6}
        usual = {"rollout/reward": 0.5, "tokens": 18.0, "server/busy_s": float(step)}
        self.database.record_step(step, {**times, **usual, "server/servers": 1.0, **stats})
        self.num_steps += 1

    def finish(self) -> None:
        self.database.record_event("finished", f"step {self.num_steps}")
        self.close()

    def close(self) -> None:
        self.database.close()


def write_evaluation(file: Path, *, text: str = "48") -> None:
    """Two problems: one sample scored, one failed, one cut off."""
    evaluation = Evaluation("e1", "final model", 7, "arithmetic", {"weights": "abc"})
    with ResultStore(file) as store:
        rows = [{"messages": [{"role": "user", "content": f"{i} + 41? {text}"}]} for i in (7, 8)]
        store.begin(evaluation, rows)
        store.add("e1", SampleResult(0, 0, "scored", 1.0, completion=text, num_tokens=2, version=7))
        store.add("e1", SampleResult(0, 1, "failed", None, why="TimeoutError: 3 s"))
        store.add("e1", SampleResult(1, 0, "truncated", 0.5, completion="4", num_tokens=1))


class Dash:
    """The dashboard's real server in a thread, and a client of it."""

    def __init__(self, root) -> None:
        self._listener = bind("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        app = create_app(Routes([root]), TOKEN, self.port)
        self._server = uvicorn.Server(server_config(app, keep_alive_s=5))
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=300)

    def ask(self, path: str, *, method: str = "GET", cookie: str | None = TOKEN, host: str = ""):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        headers = {"Host": host or f"127.0.0.1:{self.port}"}
        if cookie is not None:
            headers["Cookie"] = f"other=1; areal_dash_{self.port}={cookie}"
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        body = reply.read()
        connection.close()
        return reply, body

    def get(self, path: str):
        reply, body = self.ask(f"/api/{path}")
        return reply.status, json.loads(body)
