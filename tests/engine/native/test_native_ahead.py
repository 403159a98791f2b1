"""An engine whose device runs ahead of the host: nothing a request gets may depend on it."""

from __future__ import annotations

import random

import pytest
import torch
from tiny import tiny_model
from tiny_tokenizer import EOS, byte_tokenizer

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import Grammar
from areal.engine.native import engine as engine_module
from areal.engine.native.engine import NativeEngine
from areal.engine.native.grammar import GrammarCompiler
from areal.engine.native.sequence import Finished, GenRequest
from areal.engine.native.torch_runner import TorchRunner

VOCAB = 64


class Drawn:
    """Rows of several steps, as a device would hand them over."""

    def __init__(self, steps) -> None:
        self._steps = steps

    def read(self):
        tokens = [sum(row, []) for row in zip(*(s.tokens for s in self._steps), strict=True)]
        logprobs = [sum(row, []) for row in zip(*(s.logprobs for s in self._steps), strict=True)]
        return tokens, logprobs


class AheadRunner(TorchRunner):
    """Three steps a launch, two launches under way: the shape of the CUDA runner, on the CPU."""

    steps_per_launch = 3
    launches_ahead = 2

    def decode(self, slots, num_steps):
        steps = []
        for _ in range(num_steps):
            steps.append(super().decode(slots, 1))
            self._table.advance(slots, 1)
        self._table.advance(slots, -num_steps)
        return Drawn(steps)


@pytest.fixture
def ahead(monkeypatch):
    """Builds engines with an AheadRunner."""

    def make_runner(model, table, adapters, *, max_prefill_tokens, batch_invariant, **cache):
        return AheadRunner(
            model, table, adapters, max_prefill_tokens=max_prefill_tokens or 64, **cache
        )

    def make(model=None, **options) -> NativeEngine:
        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "make_runner", make_runner)
            return make_plain(model, **options)

    return make


def make_plain(model=None, **options) -> NativeEngine:
    options = {"page_size": 4, "num_pages": 200, "eos_ids": [1, 2]} | options
    return NativeEngine(model or tiny_model("qwen3"), **options)


def random_requests(seed: int, count: int, max_new_tokens: int = 20) -> list[GenRequest]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 14))] for _ in range(4)]
    return [
        GenRequest(
            str(i),
            rng.choice(prompts),
            GenerationHyperparameters(
                seed=i,
                max_new_tokens=rng.randrange(1, max_new_tokens),
                stop_token_ids=[rng.randrange(VOCAB)],
                min_new_tokens=rng.choice([0, 0, 1]),
            ),
        )
        for i in range(count)
    ]


def run(engine: NativeEngine, requests: list[GenRequest], max_steps: int = 2000):
    for request in requests:
        engine.add(request)
    done: dict[str, Finished] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return done
        for finished in engine.step():
            assert finished.rid not in done, "a request ends once"
            done[finished.rid] = finished
    raise AssertionError(f"requests still run: {engine.stats()}")


def pages_left(engine: NativeEngine) -> float:
    engine.load_weights(engine.model.named_hf_tensors(), engine.version, recompute_kv=True)
    return engine.stats()["pages_in_use"]


@pytest.mark.parametrize("num_pages", [200, 14])  # plenty, and so few that some are preempted
def test_outputs_are_those_of_an_engine_that_waits(ahead, num_pages):
    requests = random_requests(0, 24)
    engine = ahead(num_pages=num_pages)
    expected = run(make_plain(num_pages=num_pages), requests)
    found = run(engine, requests)
    assert found.keys() == expected.keys()
    for rid, finished in found.items():
        assert finished.output_tokens == expected[rid].output_tokens
        assert finished.output_logprobs == expected[rid].output_logprobs
        assert finished.stop_reason == expected[rid].stop_reason
    assert {f.stop_reason for f in found.values()} == {"stop", "length"}
    if num_pages < 20:
        assert engine.stats()["preemptions"] > 0
    assert engine.stats()["tokens_generated"] == sum(len(f.output_tokens) for f in found.values())
    assert pages_left(engine) == 0


def test_an_aborted_request_keeps_every_token_drawn(ahead):
    engine = ahead()
    options = GenerationHyperparameters(max_new_tokens=60, ignore_eos=True, seed=3)
    expected = run(make_plain(), [GenRequest("a", [5, 6], options)])["a"]
    engine.add(GenRequest("a", [5, 6], options))
    for _ in range(6):
        assert engine.step() == []
    aborted = engine.abort("a")
    count = len(aborted.output_tokens)
    assert aborted.stop_reason == "abort" and 0 < count < 60
    assert aborted.output_tokens == expected.output_tokens[:count]
    assert not engine.has_work and pages_left(engine) == 0


def test_a_stream_begins_with_its_first_token(ahead):
    """At most three are drawn when it is told, though a launch draws three and two are ahead."""
    engine = ahead()
    options = GenerationHyperparameters(max_new_tokens=60, ignore_eos=True, seed=3)
    engine.add(GenRequest("other", [7, 8], options))
    for _ in range(6):
        engine.step()
    engine.add(GenRequest("a", [5, 6], options, progress_tokens=1))
    while not (told := engine.step()):
        pass
    assert [len(one.tokens) for one in told] == [1]
    assert len(engine.abort("a").output_tokens) <= 3
    while not engine.step():  # "other": launches are long again
        pass


def test_requests_that_end_while_another_is_aborted_are_returned(ahead):
    engine = ahead()
    short = GenerationHyperparameters(max_new_tokens=2, ignore_eos=True)
    long = GenerationHyperparameters(max_new_tokens=50, ignore_eos=True)
    engine.add(GenRequest("short", [5], short))
    engine.add(GenRequest("long", [6], long))
    returned = engine.step() + engine.step()
    engine.abort("long")
    while engine.has_work:
        returned += engine.step()
    assert [finished.rid for finished in returned] == ["short"]


@torch.no_grad()
def test_new_weights_meet_no_half_recorded_launch(ahead):
    """Every token carries the version of the weights that drew it; with equal weights under other
    versions the outputs stay those of one version."""
    requests = random_requests(2, 12)
    expected = run(make_plain(), requests)
    engine = ahead()
    for request in requests:
        engine.add(request)
    done: dict[str, Finished] = {}
    version = 0
    while engine.has_work:
        done |= {finished.rid: finished for finished in engine.step()}
        version += 1
        engine.load_weights(
            engine.model.named_hf_tensors(), version, recompute_kv=bool(version % 2)
        )
    for rid, finished in done.items():
        assert finished.output_tokens == expected[rid].output_tokens
        assert finished.output_versions == sorted(finished.output_versions)
    assert max(max(f.output_versions) for f in done.values()) > 1


def test_under_a_grammar_the_host_knows_every_token(ahead):
    """Beside others that run ahead as soon as they are alone again."""
    pytest.importorskip("llguidance", reason="constrained output needs the extra `grammar`")
    compiler, grammar = GrammarCompiler(byte_tokenizer(), [EOS]), Grammar(regex="[!-&]{2,9}")

    def requests() -> list[GenRequest]:
        plain, constrained = random_requests(3, 8), random_requests(4, 6)
        for one in constrained:
            one.rid, one.gconfig = f"g{one.rid}", one.gconfig.new(stop_token_ids=[])
            one.grammar, one.grammar_state = grammar, compiler.state(grammar)
        return [*plain, *constrained]

    expected = run(make_plain(num_pages=14), requests())
    engine = ahead(num_pages=14)
    found = run(engine, requests())
    assert engine.stats()["preemptions"] > 0
    assert found.keys() == expected.keys()
    for rid, finished in found.items():
        assert finished.output_tokens == expected[rid].output_tokens
        assert finished.output_logprobs == expected[rid].output_logprobs
        assert finished.stop_reason == expected[rid].stop_reason
    assert "stop" in {found[f"g{i}"].stop_reason for i in range(6)}
    assert pages_left(engine) == 0
