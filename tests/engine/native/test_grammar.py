"""Outputs under a grammar: what they are, with which probability, and what may go wrong."""

from __future__ import annotations

import itertools
import json
import queue
import random
import sys

import jsonschema
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model, write_tiny_model
from tiny_tokenizer import EOS, IM_END, VOCAB_SIZE, byte_tokenizer, write_byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import Grammar, ModelRequest
from areal.engine.native.engine import NativeEngine
from areal.engine.native.grammar import GrammarCompiler
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.native.loop import EngineLoop
from areal.engine.native.sampler import SamplingOptions, sample
from areal.engine.native.sequence import Finished, GenRequest, Progress
from areal.engine.native.server import create_app
from areal.engine.native.wire import Refusal
from areal.models.common.attention import PackedAttention

pytest.importorskip("llguidance", reason="constrained output needs the extra `grammar`")

TOKENIZER = byte_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER, [EOS])
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "on": {"type": "boolean"},
    },
    "required": ["x", "on"],
    "additionalProperties": False,
    **COMPACT,
}
GRAMMARS = [
    Grammar(json_schema=POINT),
    Grammar(regex="(yes|no), [a-f]{2,9}"),
    Grammar(lark='start: "<call>" %json {"enum": ["left", "right"]} "</call>"'),
]
TOKEN = "token-of-this-run"


def make_engine(**options) -> NativeEngine:
    options = {"page_size": 4, "num_pages": 400, "eos_ids": [EOS]} | options
    return NativeEngine(tiny_model(vocab_size=VOCAB_SIZE), **options)


def request(rid, grammar, prompt=(5, 6), so_far=None, **options) -> GenRequest:
    gconfig = GenerationHyperparameters(**{"max_new_tokens": 800, "seed": 1} | options)
    state = None if grammar is None else COMPILER.state(grammar)
    return GenRequest(
        rid, list(prompt), gconfig, so_far=so_far, grammar=grammar, grammar_state=state
    )


def run(engine, *requests) -> dict[str, Finished]:
    for one in requests:
        engine.add(one)
    done = {}
    for _ in range(5000):
        if not engine.has_work:
            return done
        done |= {one.rid: one for one in engine.step() if isinstance(one, Finished)}
    raise AssertionError(f"requests still run: {engine.stats()}")


def text_of(finished: Finished) -> str:
    assert finished.stop_reason == "stop" and finished.output_tokens[-1] == EOS
    return TOKENIZER.decode(finished.output_tokens[:-1])


@pytest.fixture(scope="module")
def engine():
    """For tests that leave no trace in it."""
    return make_engine()


def same(one: Finished, other: Finished) -> bool:
    return (one.output_tokens, one.output_logprobs) == (other.output_tokens, other.output_logprobs)


scalars = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "integer"}]),
    st.integers(-50, 50).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 9}),
    st.integers(0, 6).map(lambda length: {"type": "string", "maxLength": length}),
    st.lists(st.text('aü"\\😀', max_size=3), min_size=1, unique=True).map(lambda v: {"enum": v}),
    st.just({"type": "string", "pattern": "^[ab]{2,5}$"}),
)


def containers(schemas):
    objects = st.dictionaries(st.sampled_from("abc"), schemas, min_size=1).map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:2],
            "additionalProperties": False,
        }
    )
    arrays = schemas.map(lambda items: {"type": "array", "items": items, "maxItems": 3})
    return objects | arrays | st.lists(schemas, min_size=1, max_size=2).map(lambda s: {"anyOf": s})


schemas = st.recursive(scalars, containers, max_leaves=4)


@settings(max_examples=12, deadline=None)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_outputs_validate_against_their_schemas(engine, schema, seed):
    grammar = Grammar(json_schema={**schema, **COMPACT})
    done = run(engine, *(request(str(i), grammar, seed=seed + i) for i in range(3)))
    for finished in done.values():
        jsonschema.validate(json.loads(text_of(finished)), schema)


def test_any_json_object():
    grammar = Grammar(json_schema={"type": "object"})
    requests = [request(str(i), grammar, seed=i, max_new_tokens=300) for i in range(30)]
    ended = [one for one in run(make_engine(), *requests).values() if one.stop_reason == "stop"]
    assert len(ended) > 5
    assert all(isinstance(json.loads(text_of(one)), dict) for one in ended)


def test_white_space_between_the_parts_of_json_is_bounded():
    state = COMPILER.state(Grammar(json_schema={"type": "object"}))
    state.accept(TOKENIZER.encode('{\n    "a"' + " " * 40))
    assert not state.fault
    state.accept(TOKENIZER.encode(" "))
    assert "does not allow token" in state.fault


LETTERS = "SThe O"  # of which the tokenizer has merged pieces


@torch.no_grad()
def next_logits(model, prompt: list[int], output: list[int]) -> torch.Tensor:
    """[len(output), V] float64: before each output token."""
    device = model.embedding_weight.device
    tokens = torch.tensor(prompt + output, device=device)
    attend = PackedAttention(torch.tensor([0, len(tokens)], device=device), len(tokens))
    hidden = model(tokens, torch.arange(len(tokens), device=device), attend)
    return model.logits(hidden)[len(prompt) - 1 : -1].double()


def allowed_by_hand(written: str) -> list[int]:
    """Pieces with which at most 4 LETTERS are written, and the end of a text of at least one."""
    pieces = {token: TOKENIZER.decode([token]) for token in range(4, len(TOKENIZER))}
    allowed = [token for token, text in pieces.items() if set(text) <= set(LETTERS)]
    allowed = [token for token in allowed if len(written + pieces[token]) <= 4]
    return [*allowed, EOS] if written else allowed


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"greedy": True}])
def test_logprobs_are_of_the_allowed_tokens_renormalised(engine, options):
    grammar = Grammar(regex=f"[{LETTERS}]{{1,4}}")
    requests = [request(str(i), grammar, seed=i, **options) for i in range(12)]
    done = run(engine, *requests)
    for one in requests:
        output = done[one.rid].output_tokens
        text_of(done[one.rid])  # it ended
        logits = next_logits(engine.model, one.input_ids, output) / options.get("temperature", 1.0)
        for i, token in enumerate(output):
            allowed = allowed_by_hand(TOKENIZER.decode(output[:i]))
            assert token in allowed
            expected = logits[i, token] - logits[i, allowed].logsumexp(0)
            assert done[one.rid].output_logprobs[i] == pytest.approx(float(expected), abs=1e-5)
    assert len({len(one.output_tokens) for one in done.values()}) > 1 or "greedy" in options


def test_where_only_one_text_can_follow_it_is_written_in_the_tokenizers_own_pieces(engine):
    done = run(engine, request("a", Grammar(regex="STOP the he")))
    assert done["a"].output_tokens == [*TOKENIZER.encode("STOP the he"), EOS]
    assert done["a"].output_logprobs == [0.0] * len(done["a"].output_tokens)


def bits(tokens, vocab_size: int) -> np.ndarray:
    mask = np.zeros(-(-vocab_size // 32) * 32, bool)
    mask[tokens] = True
    return np.packbits(mask, bitorder="little").view(np.int32)


def test_the_mask_comes_before_top_k_and_top_p():
    logits = torch.arange(70, 0, -1, dtype=torch.float64).log().expand(400, 70)
    count, allowed = len(logits), [3, 40, 64, 69]
    options = SamplingOptions(
        temperature=np.ones(count),
        top_k=np.full(count, 3),
        top_p=np.full(count, 0.98),
        greedy=np.zeros(count, bool),
        seed=np.arange(count, dtype=np.uint64),
        index=np.zeros(count, np.int64),
        frequency_penalty=np.zeros(count),
        allowed={row: bits(allowed, 70) for row in range(0, count, 2)},
    )
    tokens, logprobs = sample(logits, options, max_chunk_elements=700)
    # 67, 30, 6 and 1: top-k leaves three, of which the first two reach 0.98 only with the third.
    shares = {3: 67 / 103, 40: 30 / 103, 64: 6 / 103}
    found = tokens[::2]
    assert set(found) <= shares.keys() and len(set(found)) > 1
    assert logprobs[::2] == pytest.approx([np.log(shares[token]) for token in found])
    assert set(tokens[1::2]) <= {0, 1, 2}


def test_a_request_is_the_same_beside_others():
    """And rows without a grammar are, bit for bit, what they are where nobody has one."""
    constrained = [(grammar, seed) for grammar in GRAMMARS for seed in range(3)]
    plain = {f"p{i}": request(f"p{i}", None, (7, i + 4), max_new_tokens=40) for i in range(4)}
    alone = run(make_engine(), *plain.values())
    together = run(
        make_engine(),
        *(request(f"g{i}", grammar, seed=seed) for i, (grammar, seed) in enumerate(constrained)),
        *(request(one.rid, None, one.input_ids, max_new_tokens=40) for one in plain.values()),
    )
    for i, (grammar, seed) in enumerate(constrained):
        (single,) = run(make_engine(), request("x", grammar, seed=seed)).values()
        assert same(together[f"g{i}"], single)
    assert all(same(together[rid], one) for rid, one in alone.items())


def test_preemption_and_new_weights_leave_outputs_valid():
    engine = make_engine(num_pages=24, max_running=6)
    requests = [request(str(i), GRAMMARS[i % 3], range(4, 8 + i % 3), seed=i) for i in range(9)]
    for one in requests:
        engine.add(one)
    done, weights = {}, [tiny_model(seed=seed, vocab_size=VOCAB_SIZE) for seed in (0, 1)]
    for version in itertools.count(1):
        for _ in range(3):
            done |= {one.rid: one for one in engine.step()}
        if not engine.has_work:
            break
        tensors = weights[version % 2].named_hf_tensors()
        engine.load_weights(tensors, version, recompute_kv=bool(version % 3))
    assert engine.stats()["preemptions"] > 0
    for i, one in enumerate(requests):
        assert_fits(text_of(done[one.rid]), GRAMMARS[i % 3])
    assert max(max(one.output_versions) for one in done.values()) > 2


def assert_fits(text: str, grammar: Grammar) -> None:
    state = COMPILER.state(grammar)
    state.accept(TOKENIZER.encode(text))
    mask = state.allowed(VOCAB_SIZE, frozenset([EOS]))
    assert not state.fault and mask[0] >> EOS & 1


def test_an_output_goes_on_on_another_engine():
    whole = run(make_engine(), request("a", GRAMMARS[0]))["a"]
    for count in (1, 5, len(whole.output_tokens) - 1):
        so_far = Progress(
            "a",
            whole.output_tokens[:count],
            whole.output_logprobs[:count],
            whole.output_versions[:count],
        )
        assert same(run(make_engine(), request("a", GRAMMARS[0], so_far=so_far))["a"], whole)
    wrong = Progress("a", TOKENIZER.encode('{"y'), [-1.0] * 3, [0] * 3)
    with pytest.raises(ValueError, match="^so_far: grammar.json_schema: cannot be followed"):
        make_engine().add(request("a", GRAMMARS[0], so_far=wrong))


def test_the_end_of_an_output():
    """A stop token where the grammar may end, nothing where no stop token is left."""
    three = Grammar(regex="[a-c]{3}")
    done = run(
        make_engine(),
        request("plain", three),
        request("own", three, ignore_eos=True, stop_token_ids=[IM_END]),
        request("either", three, stop_token_ids=[IM_END]),
        request("none", three, ignore_eos=True),
        request("late", three, min_new_tokens=7),
        request("cut", three, max_new_tokens=2),
        request("open", Grammar(regex="[a-c]*"), min_new_tokens=4),
    )
    assert done["plain"].output_tokens[-1] == EOS and done["plain"].output_logprobs[-1] == 0.0
    assert done["own"].output_tokens[-1] == IM_END
    assert done["either"].output_tokens[-1] in (EOS, IM_END)
    assert done["either"].output_logprobs[-1] < 0
    for rid in ("none", "late"):
        assert len(done[rid].output_tokens) == 3 and done[rid].stop_reason == "stop"
    assert done["cut"].stop_reason == "length"
    assert len(done["open"].output_tokens) > 4 and done["open"].stop_reason == "stop"


def test_a_text_that_the_model_has_no_token_for_ends_the_output():
    engine = NativeEngine(tiny_model(vocab_size=64), num_pages=50, eos_ids=[EOS])
    letter, unknown = (TOKENIZER.decode([token]) for token in (40, 70))
    done = run(engine, request("a", Grammar(regex=f"{letter}{{2}}({unknown}|{unknown}x)")))
    assert done["a"].output_tokens == [40, 40] and done["a"].stop_reason == "stop"
    with pytest.raises(ValueError, match="^grammar: allows no first token"):
        engine.add(request("b", Grammar(regex=unknown)))
    with pytest.raises(ValueError, match="^grammar: allows no first token"):
        engine.add(request("c", Grammar(regex=""), ignore_eos=True))


def test_stop_strings_and_grammars_together():
    text = text_of(run(make_engine(), request("a", GRAMMARS[1]))["a"])
    done = run(make_engine(), request("a", GRAMMARS[1], stop_token_ids=TOKENIZER.encode(",")))
    assert TOKENIZER.decode(done["a"].output_tokens) == text[: text.index(",") + 1]


@pytest.mark.parametrize(
    ("grammar", "fault"),
    [
        ({"regex": "[ab"}, "grammar.regex: unclosed character class"),
        ({"regex": "(?=a)b"}, "grammar.regex: look-around"),
        ({"regex": "(" * 50_000}, "grammar.regex: "),
        ({"regex": "[^\\x00-\\U0010ffff]"}, "grammar.regex: no text .* fits it"),
        ({"lark": "start: a"}, 'grammar.lark: .*unknown name: "a"'),
        ({"lark": "start: " + "(" * 5000}, "grammar.lark: .*nested"),
        ({"lark": "start: start"}, "grammar.lark: no text .* fits it"),
        ({"lark": "start: <|nobody|>"}, "grammar.lark: .*unknown special token"),
        ({"json_schema": {"type": "king"}}, "grammar.json_schema: Invalid type: king"),
        ({"json_schema": {"not": {}}}, 'grammar.json_schema: .*"not"'),
        ({"json_schema": {"$ref": "https://example.com/a.json"}}, "grammar.json_schema: .*fetch"),
        (
            {"json_schema": {"allOf": [{"anyOf": [{"minimum": i} for i in range(9)]}] * 9}},
            "grammar.json_schema: .*large",
        ),
    ],
)
def test_a_bad_grammar_is_named_with_its_fault(grammar, fault):
    with pytest.raises(ValueError, match=f"^{fault}") as error:
        COMPILER.state(Grammar(**grammar))
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)


def test_deep_schemas_are_refused():
    schema = {"type": "integer"}
    for _ in range(150):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ValueError, match="^grammar.json_schema: recursion limit"):
        COMPILER.state(Grammar(json_schema=schema))


def test_compiling_has_a_deadline():
    properties = {f"p{i}": {"type": "string"} for i in range(1200)}
    slow = Grammar(json_schema={"type": "object", "properties": properties})
    compiler = GrammarCompiler(TOKENIZER, [EOS], timeout_s=0.01)
    with pytest.raises(ValueError, match=r"^grammar.json_schema: not compiled within 0.01 s"):
        compiler.state(slow)


def test_many_grammars_one_after_another():
    """More than are kept, and again the first ones."""
    for word in [*map(str, range(100)), "0", "1"]:
        state = COMPILER.state(Grammar(regex=word))
        state.accept(TOKENIZER.encode(word))
        assert not state.fault


def too_wide() -> Grammar:
    """Its limit is reached after the first letter."""
    rules = "\n".join(f'r{i}: "b" s{i}\ns{i}: "c{i}" | "d" s{i}' for i in range(2500))
    return Grammar(lark=f'start: "a" ({" | ".join(f"r{i}" for i in range(2500))})\n{rules}')


def test_a_grammar_that_proves_too_complex_is_an_error_of_its_requests_alone():
    loop, results = EngineLoop(make_engine()), queue.Queue()
    try:
        loop.submit([request("bad", too_wide()), request("good", GRAMMARS[1])], results.put)
        found = {}
        while len(found) < 2:
            found |= {one.rid: one for one in results.get(timeout=900)}
    finally:
        loop.close()
    assert isinstance(found["bad"], Refusal) and found["bad"].kind == "request"
    assert "grammar.lark: cannot be followed after " in found["bad"].message
    assert_fits(text_of(found["good"].finished), GRAMMARS[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE)
    write_byte_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": EOS}))
    return folder


@pytest.fixture
def client(folder):
    loop = EngineLoop(NativeEngine.from_pretrained(folder, num_pages=200))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with TestClient(create_app(loop, TOKEN, model=str(folder)), headers=headers) as client:
        yield client
    loop.close()


def entry(rid, **fields):
    gconfig = {"max_new_tokens": 300, "seed": 2}
    return {"rid": rid, "input_ids": [5, 6], "gconfig": gconfig, **fields}


def generated(answer) -> dict[str, dict]:
    assert answer.status_code == 200, answer.text
    return {line["rid"]: line for line in map(json.loads, answer.text.splitlines())}


def test_over_http(client):
    grammars = [{"json_schema": POINT}, {"regex": "yes|no"}, {"lark": GRAMMARS[2].lark}, None]
    entries = [entry(str(i), grammar=grammar) for i, grammar in enumerate(grammars)]
    lines = generated(client.post("/generate", json={"requests": entries}))
    texts = {rid: TOKENIZER.decode(line["output_tokens"][:-1]) for rid, line in lines.items()}
    jsonschema.validate(json.loads(texts["0"]), POINT)
    assert texts["1"] in ("yes", "no")
    assert texts["2"] in ('<call>"left"</call>', '<call>"right"</call>')
    assert {lines[rid]["stop_reason"] for rid in "012"} == {"stop"}


@pytest.mark.parametrize(
    ("grammar", "fault"),
    [
        ({"regex": "["}, "grammar.regex: unclosed"),
        ({}, "grammar: expected exactly one of json_schema, regex, lark, got none"),
        ({"regex": "a", "lark": "b"}, "grammar: expected exactly one"),
        ({"regex": 3}, "grammar.regex: expected a text"),
        ({"json_schema": [1]}, "grammar.json_schema: expected a JSON object"),
        ({"ebnf": "a"}, "grammar.ebnf: unknown field"),
    ],
)
def test_a_bad_grammar_over_http_is_answered_with_400(client, grammar, fault):
    answer = client.post("/generate", json={"requests": [entry("a", grammar=grammar)]})
    assert answer.status_code == 400 and answer.json()["error"].startswith(fault)
    both = {"requests": [entry("a", grammar=grammar), entry("b", grammar={"regex": "no"})]}
    lines = generated(client.post("/generate", json=both))
    assert lines["a"]["message"].startswith(fault)
    assert TOKENIZER.decode(lines["b"]["output_tokens"][:-1]) == "no"


async def test_in_process(folder):
    engine = NativeLocalEngine(folder, num_pages=100)
    engine.initialize()
    try:
        reply = await engine.agenerate(ModelRequest([5, 6], grammar=Grammar(regex="yes|no")))
        assert TOKENIZER.decode(reply.output_tokens[:-1]) in ("yes", "no")
        with pytest.raises(ValueError, match="^grammar.regex: unclosed"):
            await engine.agenerate(ModelRequest([5, 6], grammar=Grammar(regex="[")))
    finally:
        engine.destroy()


def test_without_the_extra_the_error_names_it(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = client.post("/generate", json={"requests": [entry("a", grammar={"regex": "a"})]})
    assert answer.status_code == 400
    assert "pip install 'areal[grammar]'" in answer.json()["error"]


def test_a_model_without_a_tokenizer(tmp_path):
    folder = write_tiny_model(tmp_path / "bare", vocab_size=VOCAB_SIZE)
    loop = EngineLoop(NativeEngine.from_pretrained(folder, num_pages=50))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with TestClient(create_app(loop, TOKEN, model=str(folder)), headers=headers) as client:
        answer = client.post("/generate", json={"requests": [entry("a", grammar={"regex": "a"})]})
    loop.close()
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("grammar: the model folder")


def test_a_tokenizer_that_llguidance_cannot_read_is_read_token_by_token():
    """One token per letter, and two that only look like text."""
    pieces = ["<pad>", "<eos>", *"abcxyz", "<", ">", "é"]
    core = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<pad>", "<eos>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    state = GrammarCompiler(tokenizer, [EOS]).state(Grammar(regex="[a-cé<>]{2}"))
    for text in ("é", "<"):
        mask = state.allowed(len(pieces), frozenset([EOS]))
        assert mask.tolist() == bits([2, 3, 4, 8, 9, 10], len(pieces)).tolist()
        state.accept(tokenizer.encode(text))
    assert state.allowed(len(pieces), frozenset([EOS])).tolist() == [1 << EOS]


def test_allowed_tokens_are_accepted():
    rng, stop_ids = random.Random(0), frozenset([EOS])
    for grammar in GRAMMARS:
        for _ in range(2):
            state, written = COMPILER.state(grammar), []
            while True:
                mask = state.allowed(VOCAB_SIZE, stop_ids).view(np.uint8)
                allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
                assert allowed and max(allowed) < VOCAB_SIZE
                for token in rng.sample(range(4, len(TOKENIZER)), 9):
                    probe = COMPILER.state(grammar)
                    probe.accept([*written, token])
                    assert token not in allowed or not probe.fault
                token = rng.choice(allowed)
                if token == EOS:
                    break
                state.accept([token])
                written.append(token)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_where_steps_are_graphs(batch_invariant):
    """Valid outputs with the log-probabilities of the allowed tokens, beside rows that run on."""
    model = tiny_model(vocab_size=VOCAB_SIZE, head_dim=16).cuda()
    engine = NativeEngine(
        model, num_pages=400, eos_ids=[EOS], batch_invariant=batch_invariant, max_running=40
    )
    plain = [request(f"p{i}", None, (7, i + 4), max_new_tokens=60, seed=i) for i in range(8)]
    constrained = [request(str(i), GRAMMARS[i % 3], seed=i) for i in range(24)]
    done = run(engine, *plain, *constrained)
    for i, one in enumerate(constrained):
        assert_fits(text_of(done[one.rid]), GRAMMARS[i % 3])
        state, output = COMPILER.state(GRAMMARS[i % 3]), done[one.rid].output_tokens
        logits = next_logits(model, one.input_ids, output).cpu()
        for row, token in zip(logits, output, strict=True):
            mask = state.allowed(VOCAB_SIZE, frozenset([EOS])).view(np.uint8)
            is_allowed = np.unpackbits(mask, count=VOCAB_SIZE, bitorder="little")
            row[torch.from_numpy(is_allowed == 0)] = -torch.inf
            state.accept([token] if token != EOS else [])
        expected = logits.log_softmax(-1)[torch.arange(len(output)), output].tolist()
        assert done[one.rid].output_logprobs == pytest.approx(expected, abs=1e-3)
    if batch_invariant:
        again = [request(f"p{i}", None, (7, i + 4), max_new_tokens=60, seed=i) for i in range(8)]
        alone = run(engine, *again)
        assert all(same(alone[one.rid], done[one.rid]) for one in plain)
