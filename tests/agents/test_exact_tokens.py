"""No token is trained on that the engine did not sample, and none twice, whatever a client does.

Random histories (random_client.py) over HTTP, against a real engine whose calls are recorded. Every
learned span of every exported row must be one of them: its prompt before it token by token, its
output, its log-probabilities and versions; and no call may be found twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from itertools import groupby

import pytest
from agent_world import CHAT_TEMPLATE
from random_client import RandomClient, open_talkative_world
from safetensors.torch import load_file

from areal.api.io_struct import WeightUpdateMeta
from areal.api.workflow_context import episode
from areal.rollout.trajectory import as_tensors

NUM_IN_FLIGHT = 16
UPDATE_EVERY = 10  # histories
TIMEOUT_S = 900

SHOWS_REASONING = CHAT_TEMPLATE.replace(
    "{{ message.content",
    "{{ '<think>' + message.reasoning_content + '</think>' if message.reasoning_content }}"
    "{{ message.content",
)
# Rewrites what is in the past: strips it, and shows the tools' results to the last turn only.
REWRITES = CHAT_TEMPLATE.replace("{{ message.content", "{{ (message.content or '') | trim").replace(
    "{%- for message in messages %}",
    "{%- for message in messages if message.role != 'tool' or loop.last %}",
)


@dataclass(frozen=True)
class Call:
    """One sampled output."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


class Recorder:
    """The engine of one episode. What it told while it sampled must be what it returned."""

    def __init__(self, engine):
        self._engine = engine
        self.calls = Counter()

    async def agenerate(self, request):
        told, listener = [], request.on_tokens

        def listen(tokens, logprobs):
            told.extend(zip(tokens, logprobs, strict=True))
            listener(tokens, logprobs)

        prompt = tuple(request.input_ids)
        request.on_tokens = listener and listen
        response = await self._engine.agenerate(request)
        sampled = list(zip(response.output_tokens, response.output_logprobs, strict=True))
        assert told == sampled[: len(told)]
        tokens, logprobs = zip(*sampled, strict=True) if sampled else ((), ())
        self.calls[Call(prompt, tokens, logprobs, tuple(response.output_versions))] += 1
        return response


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    with open_talkative_world(tmp_path_factory.mktemp("model")) as world:
        yield world


@pytest.fixture
def run_histories(talkative):
    """Takes seeds through a client, many at a time: {seed: (interactions, recorder)}."""
    before = talkative.tokenizer.chat_template

    def run(client, seeds, template=CHAT_TEMPLATE, **config):
        talkative.tokenizer.chat_template = template
        with talkative.open(client, **config) as workflow:
            running = _run_histories(talkative, workflow, iter(seeds))
            return talkative.runner.run(running).result(TIMEOUT_S)

    yield run
    talkative.tokenizer.chat_template = before


async def _run_histories(world, workflow, seeds):
    results = {}

    async def work():
        for seed in seeds:
            recorder = Recorder(world.engine)
            with episode(task_id=seed, sample=0, is_eval=False, run_seed=7):
                try:
                    items = await workflow.arun_episode(recorder, {"seed": seed})
                except Exception as error:
                    raise AssertionError(f"seed {seed}: {error!r}") from error
            results[seed] = items, recorder
            if len(results) % UPDATE_EVERY == 0:
                await asyncio.to_thread(update_weights, world)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_IN_FLIGHT):
            group.create_task(work())
    return results


def update_weights(world):
    """The same weights as the next version, in the midst of whatever is being sampled."""
    (file,) = world.folder.glob("*.safetensors")
    meta = WeightUpdateMeta("direct", version=world.engine.get_version() + 1)
    world.engine.update_weights(meta, iter(load_file(file).items()))


CASES = {  # histories, template, options
    "concat": (40, CHAT_TEMPLATE, {"export_style": "concat"}),
    "orphans": (40, SHOWS_REASONING, {"export_style": "concat", "drop_retry_orphans": True}),
    "rewritten": (40, REWRITES, {"export_style": "concat"}),
    "individual": (20, SHOWS_REASONING, {"export_style": "individual"}),
    "hf": (20, REWRITES, {"export_style": "individual", "chat_template_type": "hf"}),
}


@pytest.mark.parametrize("case", CASES)
def test_only_sampled_tokens_are_learned_and_none_twice(run_histories, case):
    count, template, config = CASES[case]
    seeds = range(count)
    client = RandomClient()
    results = run_histories(client, seeds, template, **config)
    assert sorted(results) == list(seeds)
    for seed, (items, recorder) in results.items():
        try:
            # An answer whose client has left may be lost, and a repeated one dropped.
            may_lose = seed in client.left or config.get("drop_retry_orphans", False)
            check_learned(as_tensors(items), recorder, may_lose=may_lose)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_dialogue_that_only_goes_on_is_one_row(run_histories):
    """Whatever APIs its turns are sent to, and whatever a client leaves out of the replies."""
    results = run_histories(RandomClient(only_goes_on=True), range(20), export_style="concat")
    assert {seed: len(items) for seed, (items, _) in results.items() if len(items) != 2} == {}


def check_learned(batch, recorder, *, may_lose):
    left = +recorder.calls
    for row in range(len(batch["input_ids"])):
        length = int(batch["attention_mask"][row].sum())
        keys = ("input_ids", "turn_ids", "loss_mask", "logprobs", "versions")
        ids, turns, mask, logprobs, versions = (
            tuple(batch[k][row, :length].tolist()) for k in keys
        )
        assert [turn >= 0 for turn in turns] == [bool(bit) for bit in mask]
        end = 0
        for turn, span in groupby(turns):
            start, end = end, end + len(list(span))
            found = Call(ids[:start], ids[start:end], logprobs[start:end], versions[start:end])
            if turn < 0:
                assert set(found.logprobs) == {0.0} and set(found.versions) == {-1}
                continue
            matching = [call for call in left if is_same(call, found)]
            assert matching, f"row {row}: never sampled, or learned twice: {found}"
            left[matching[0]] -= 1
            left = +left
    if not may_lose:
        lost = [call for call in left if call.output]
        assert not lost, f"sampled, answered and not learned: {lost}"


def is_same(call, found):
    """Log-probabilities are exported in float32."""
    return (call.prompt, call.output, call.versions) == (
        found.prompt,
        found.output,
        found.versions,
    ) and found.logprobs == pytest.approx(call.logprobs, rel=1e-6)
