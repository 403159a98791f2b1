"""What must hold of every stock server behind RemoteEngine, shared by the tests of each kind.

    world = ServerWorld(engine, folders=[first, second])    # two sets of weights of one model
    await check_update_in_the_middle(world)

The judge of versions is a forward pass of ours: the log-probability of a token under the weights of
the version it is said to have must be the one that was reported.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_run import grpo_config, query

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.dashboard.reader import RunReader
from areal.dashboard.seconds import time_by_cause
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.remote.engine import RemoteEngine
from areal.engine.remote.server_control import ControlClient
from areal.engine.remote.vllm import MODEL_NAME
from areal.engine.train.export import send_weights
from areal.models.hf_io import read_shapes, weight_files
from areal.models.lora_files import FILE_PREFIX, read_peft, write_peft
from areal.models.lora_merge import merge_adapter
from areal.rollout.ledger import Ledger
from areal.rollout.trajectory import decode
from areal.run.database import RunDatabase
from areal.run.paths import RunPaths
from areal.trainer.experiment import run_experiment
from areal.weight_sync.transports import PublicationRoot

RECEIVER = ModelAllocation.from_str("vllm:d1")  # which engine it is does not matter


@dataclass
class ServerWorld:
    engine: RemoteEngine
    folders: list[Path]  # version v serves the weights of folders[v % 2]
    run_name: str
    tolerance: float  # of log-probabilities
    # Sent in place of whole weights: folders[i] is then the model with adapters[i] merged.
    adapters: list[Path] | None = None
    versions: itertools.count = field(default_factory=lambda: itertools.count(1))

    def publish(self, kind: str = "shm") -> int:
        """Make the other weights serve, as the next version."""
        disk = self.folders[0].parent / "weights"
        with PublicationRoot(kind, run_name=self.run_name, disk_root=disk) as root:
            return self.publish_in(root)

    def publish_in(self, root: PublicationRoot) -> int:
        """Likewise, and the publication stays there for others."""
        version = next(self.versions)
        options: dict = {"gen_allocation": RECEIVER, "weight_chunked_mem_mb": 1}
        if self.adapters is None:
            weights = read_weights(self.folders[version % 2])
        else:
            tensors, alpha = read_peft(self.adapters[version % 2])
            weights, options = tensors.items(), {**options, "use_lora": True, "lora_alpha": alpha}
        meta = root.meta(**options)
        send_weights(self.engine, meta.with_version(version), weights)
        return version

    def check_logprobs(self, replies: list[ModelResponse]) -> None:
        """Every token's log-probability is that of the version it names, at temperature 1."""
        for parity in (0, 1):
            judge = NativeLocalEngine(self.folders[parity])
            judge.initialize()
            try:
                for reply in replies:
                    ids = torch.tensor([reply.input_tokens + reply.output_tokens])
                    scores = judge.compute_logp(
                        {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                    )[0, reply.input_len - 1 : -1]
                    for place, version in enumerate(reply.output_versions):
                        if version % 2 == parity:
                            error = abs(scores[place].item() - reply.output_logprobs[place])
                            assert error < self.tolerance, (place, version, error)
            finally:
                judge.destroy()


def draw_adapters(base: Path, root: Path) -> tuple[list[Path], list[Path]]:
    """Two adapters of a model, of rank 3 on two layers of each block, and the merged models."""
    shapes = read_shapes(weight_files(base))
    adapters, merged = ([root / f"{kind}{i}" for i in (0, 1)] for kind in ("adapter", "merged"))
    for seed, (folder, whole) in enumerate(zip(adapters, merged, strict=True)):
        generator, tensors = torch.Generator().manual_seed(seed), {}
        for name, shape in shapes.items():
            layer = f"{FILE_PREFIX}{name.removesuffix('.weight')}"
            if layer.endswith((".q_proj", ".down_proj")):
                a_RD, b_NR = (3, shape[1]), (shape[0], 3)
                tensors[f"{layer}.lora_A.weight"] = torch.randn(a_RD, generator=generator) * 0.2
                tensors[f"{layer}.lora_B.weight"] = torch.randn(b_NR, generator=generator) * 0.2
        folder.mkdir(parents=True)
        write_peft(tensors, folder, alpha=6.0, base_model=str(base))
        merge_adapter(folder, base, whole)
    return adapters, merged


async def check_adapters(world: ServerWorld, control: ControlClient) -> None:
    """Each version is an adapter of its own name, and the one before it is gone."""
    await asyncio.to_thread(world.publish)
    await check_update_in_the_middle(world)
    await check_updates_while_generating(world)
    protocol, version = world.engine._protocol, world.engine.get_version()
    loaded = protocol.load_adapter(control, "mine", str(world.adapters[0]))
    assert {name for name in loaded if name != MODEL_NAME} == {"mine", f"policy-v{version}"}
    # Loaded once more, as after a connection that broke; what is not of the run stays.
    with PublicationRoot("shm", run_name=world.run_name, disk_root=world.folders[0]) as root:
        version = await asyncio.to_thread(world.publish_in, root)
        meta = root.meta(use_lora=True, lora_alpha=6.0).with_version(version)
        protocol.load_weights(control, protocol.weight_order(meta))
    named = request(greedy=True, lora_name="mine")
    assert (await world.engine.agenerate(named)).output_len == 6
    await asyncio.to_thread(protocol.unload_adapter, control, "mine")
    replies = [await world.engine.agenerate(request(seed=seed)) for seed in range(3)]
    assert all(reply.output_versions == [version] * 6 for reply in replies)
    world.check_logprobs(replies)


def read_weights(folder: Path):
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                yield name, tensors.get_tensor(name)


def request(ids=(5, 7, 9), seed=1, max_new_tokens=6, ignore_eos=True, **options) -> ModelRequest:
    gconfig = GenerationHyperparameters(
        max_new_tokens=max_new_tokens, seed=seed, ignore_eos=ignore_eos, **options
    )
    return ModelRequest(input_ids=list(ids), gconfig=gconfig)


async def check_generation(world: ServerWorld) -> None:
    """Bounds, stops and the sampling distribution."""
    engine = world.engine
    replies = await asyncio.gather(*[engine.agenerate(request(seed=seed)) for seed in range(6)])
    assert all(reply.output_len == 6 and reply.stop_reason == "length" for reply in replies)
    assert len({tuple(reply.output_tokens) for reply in replies}) > 1
    assert {v for reply in replies for v in reply.output_versions} == {engine.get_version()}
    world.check_logprobs(replies)
    again = await engine.agenerate(request(seed=3, max_tokens=7))
    assert again.output_len == 4  # prompt and output together
    greedy = await engine.agenerate(request(greedy=True, max_new_tokens=4))
    judge = await engine.agenerate(request(top_k=1, seed=8, max_new_tokens=4))
    assert greedy.output_tokens == judge.output_tokens
    stops = list(range(10, 50))
    stopped = await engine.agenerate(request(stop_token_ids=stops, max_new_tokens=60))
    assert stopped.stop_reason == "stop"
    assert [token in stops for token in stopped.output_tokens].index(True) == stopped.output_len - 1
    later = await engine.agenerate(
        request(stop_token_ids=stops, max_new_tokens=90, min_new_tokens=20)
    )
    assert later.output_len > 20 or later.stop_reason == "length"


async def check_scores(world: ServerWorld) -> None:
    """Log-probabilities of given tokens are those that the model gives them when it samples."""
    replies = await asyncio.gather(*[world.engine.agenerate(request(seed=s)) for s in range(3)])
    rows = [[*reply.input_tokens, *reply.output_tokens] for reply in replies]
    rows.append(rows[0][:2])
    width = max(map(len, rows))
    data = {
        "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[i < len(row) for i in range(width)] for row in rows]),
    }
    scores_BS = await asyncio.to_thread(world.engine.compute_logp, data)
    for scores_S, reply in zip(scores_BS, replies, strict=False):
        start = reply.input_len - 1
        told_T = scores_S[start : start + reply.output_len]
        expected_T = torch.tensor(reply.output_logprobs)
        torch.testing.assert_close(told_T, expected_T, rtol=0, atol=world.tolerance)
    assert abs(scores_BS[3, 0] - scores_BS[0, 0]) < world.tolerance
    assert scores_BS[:, 0].lt(0).all() and not scores_BS[3, 1:].any()


async def check_refusals(world: ServerWorld) -> None:
    for wrong, match in (
        (request(ids=[]), "input_ids"),
        (request(ids=[99_999]), "99999|vocab"),
        (request(max_tokens=3), "max_tokens"),
    ):
        try:
            await world.engine.agenerate(wrong)
        except ValueError as error:
            assert re.search(match, str(error)), error
        else:
            raise AssertionError(f"{wrong} was not refused")


class Told:
    """What `on_tokens` of a request gets."""

    def __init__(self, request: ModelRequest) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.num_calls = 0
        self.begun = asyncio.Event()
        request.on_tokens = self._take

    def _take(self, tokens: list[int], logprobs: list[float]) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.num_calls += 1
        self.begun.set()

    def check(self, reply: ModelResponse) -> None:
        """Nothing was told twice or in another order; the reply may have a few tokens more."""
        count = len(self.tokens)
        assert self.tokens == reply.output_tokens[:count]
        assert self.logprobs == reply.output_logprobs[:count]


async def check_streams(world: ServerWorld) -> None:
    """Tokens are told as they are sampled; a call that is cancelled frees its generation."""
    asked = request(max_new_tokens=60)
    told = Told(asked)
    reply = await world.engine.agenerate(asked)
    told.check(reply)
    assert reply.output_len == 60 == len(told.tokens) and told.num_calls > 10
    world.check_logprobs([reply])
    plain = await world.engine.agenerate(request(max_new_tokens=60))
    assert plain.output_tokens == reply.output_tokens
    for seed in range(3):
        asked = request(max_new_tokens=240, seed=seed)
        told = Told(asked)
        task = asyncio.create_task(world.engine.agenerate(asked))
        await told.begun.wait()
        task.cancel()
    deadline = asyncio.get_running_loop().time() + 20
    while (await asyncio.to_thread(world.engine.stats))["running"]:
        assert asyncio.get_running_loop().time() < deadline, "cancelled requests run on"
        await asyncio.sleep(0.01)


async def check_pause(world: ServerWorld) -> None:
    """What runs is held where it is, with its version, and goes on."""
    engine = world.engine
    before = await engine.agenerate(request(max_new_tokens=100))
    task = asyncio.create_task(engine.agenerate(request(max_new_tokens=100)))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(engine.pause_generation)
    done, _ = await asyncio.wait([task], timeout=0.5)
    late = asyncio.create_task(engine.agenerate(request()))
    _, waiting = await asyncio.wait([late], timeout=0.5)
    assert waiting
    await asyncio.to_thread(engine.continue_generation)
    reply = task.result() if done else await task
    assert reply.output_len == before.output_len == 100
    assert len(set(reply.output_versions)) == 1
    assert (await late).output_len == 6


async def check_update_in_the_middle(world: ServerWorld, kind: str = "shm") -> None:
    """Running requests go on with the new weights; each token names those that made it."""
    engine = world.engine
    for _ in range(8):  # they may have ended before the pause came
        old = engine.get_version()
        replies, new = await _generate_across_an_update(world, kind)
        assert await asyncio.to_thread(engine.get_version) == new
        if {v for reply in replies for v in reply.output_versions} == {old, new}:
            break
    else:
        raise AssertionError("no update met a running request")
    for reply in replies:
        assert reply.output_len == 240 and reply.stop_reason == "length"
        assert reply.output_versions == sorted(reply.output_versions)
    after = await asyncio.gather(*[engine.agenerate(request(seed=seed)) for seed in range(3)])
    assert all(reply.output_versions == [new] * 6 for reply in after)
    world.check_logprobs([*replies, *after])


async def _generate_across_an_update(world, kind) -> tuple[list[ModelResponse], int]:
    engine = world.engine
    tasks = [
        asyncio.create_task(engine.agenerate(request(seed=seed, max_new_tokens=240)))
        for seed in range(4)
    ]
    running = 0.0
    while not running and not tasks[0].done():
        running = (await asyncio.to_thread(engine.stats))["running"]
    await asyncio.to_thread(engine.pause_generation)
    new = await asyncio.to_thread(world.publish, kind)
    await asyncio.to_thread(engine.continue_generation)
    return await asyncio.gather(*tasks), new


async def check_updates_while_generating(world: ServerWorld) -> None:
    """Update after update under load: nothing is lost, and no token names the wrong weights."""
    engine, replies = world.engine, []

    async def keep_asking(seed: int) -> None:
        for turn in range(6):
            ids = (5, 7, 9 + seed)
            replies.append(await engine.agenerate(request(ids, seed=turn, max_new_tokens=40)))

    asking = asyncio.gather(*[keep_asking(seed) for seed in range(4)])
    for _ in range(4):
        await asyncio.sleep(0.05)
        await asyncio.to_thread(world.publish)
    await asking
    assert len(replies) == 24 and all(reply.output_len == 40 for reply in replies)
    world.check_logprobs(replies)


async def check_replacement(
    world: ServerWorld, root: PublicationRoot, kill: Callable[[], None]
) -> None:
    """A server that is killed while it has requests: they go on at a replacement, with the tokens
    they have, from the weights that serve; also when an update comes just then."""
    engine = world.engine
    before = engine.get_version()
    tasks = [asyncio.create_task(engine.agenerate(long_request(seed))) for seed in range(4)]
    await asyncio.sleep(0.1)
    await asyncio.to_thread(engine.pause_generation)
    tasks += [asyncio.create_task(engine.agenerate(long_request(seed))) for seed in range(4, 6)]
    kept = await asyncio.to_thread(world.publish_in, root)  # what they have so far is theirs
    kill()
    new = await asyncio.to_thread(world.publish_in, root)
    await asyncio.to_thread(engine.continue_generation)
    replies = await asyncio.gather(*tasks)
    for reply in replies:
        assert reply.output_len == 240 and reply.stop_reason == "length"
        assert reply.output_versions == sorted(reply.output_versions)
        assert set(reply.output_versions) <= {before, new}
    assert all(reply.output_versions[-1] == new for reply in replies[4:])
    world.check_logprobs(replies)
    stats = await asyncio.to_thread(engine.stats)
    assert stats["restarts"] == 1 and stats["requests_resent"] > 0
    assert await asyncio.to_thread(engine.get_version) == new == kept + 1


def long_request(seed: int) -> ModelRequest:
    return request(ids=(5, 7, 9 + seed), seed=seed, max_new_tokens=240)


def check_grpo_run(root: Path, *overrides: str) -> None:
    """A few steps of the arithmetic recipe: all prompts trained, on tokens that are not too old,
    each with the log-probability that the checkpoint of its version gives it."""
    config = grpo_config(
        root,
        "rollout.max_head_offpolicyness=2",
        "total_train_steps=4",
        "actor.optimizer.lr=1e-2",  # versions then differ by more than rounding
        "saver.freq_steps=1",
        *overrides,
    )
    run_experiment(config)
    paths = RunPaths.of(config)
    with RunDatabase(paths.database) as database:
        balance = Ledger(database).balance()
    assert balance["trained"] == balance["total"] == 4 * 8
    _check_time(paths.root)
    rows = query(paths.root, "SELECT step, data FROM tasks JOIN trajectories USING (task_id)")
    trained = [(step, decode(data)) for step, data in rows]
    versions = set()
    for step, trajectory in trained:
        drawn = trajectory["versions"][trajectory["loss_mask"].bool()]
        assert step - drawn.max() >= 0 and step - drawn.min() <= 2
        versions |= set(drawn.tolist())
    assert max(versions) > 0  # step 3 cannot be trained on tokens of version 0
    for version in versions:
        saved = sorted(paths.checkpoints.glob(f"actor/*globalstep{version - 1}"))
        folder = saved[0] if version else Path(config.actor.path)
        if version and config.actor.use_lora:
            folder = root / f"merged{version}"
            merge_adapter(saved[0], Path(config.actor.path), folder)
        _check_trained(folder, version, [trajectory for _, trajectory in trained])


def _check_time(root: Path) -> None:
    """Of servers that do not measure themselves: the run did."""
    with RunReader(root) as reader:
        found, last = time_by_cause(reader), reader.steps(last=1)[-1]
    assert found is not None
    # What lies between the first row and the last: all requests may have been answered before.
    assert any(share.cause == "requests in flight" for share in found.servers)
    assert last.stats["server/busy_s"] > 0 and last.stats["server/control_s"] > 0
    assert sum(share.share for share in found.servers) == pytest.approx(1)


def _check_trained(folder: Path, version: int, trajectories: list) -> None:
    judge = NativeLocalEngine(folder)
    judge.initialize()
    for trajectory in trajectories:
        scores = judge.compute_logp(trajectory)[:, :-1]  # at t, of the token at t + 1
        errors = (scores - trajectory["logprobs"][:, 1:]).abs()
        is_of_it = (trajectory["versions"] == version)[:, 1:]
        assert errors[is_of_it].numel() == 0 or errors[is_of_it].max() < 2e-3, version
    judge.destroy()
