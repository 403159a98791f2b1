"""The device program behind the engine, without CUDA: kernels in order, several steps a launch.

What the CUDA runner captures in graphs runs here one kernel after another, so that slots, pages,
prefill, drawing and running ahead are checked against a plain forward of the same weights.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from adapter_models import ATTENTION, MLP, adapter_tensors, merged_model
from eager_runner import EagerRunner
from tiny import tiny_model
from tiny_tokenizer import EOS, byte_tokenizer
from tiny_vision import tiny_vision_config

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import Grammar
from areal.engine.native import engine as engine_module
from areal.engine.native.adapters import read_adapter
from areal.engine.native.cuda import program as program_module
from areal.engine.native.cuda import shared_prompts
from areal.engine.native.cuda.device import HOPPER
from areal.engine.native.drafts import Drafts
from areal.engine.native.engine import NativeEngine
from areal.engine.native.grammar import GrammarCompiler
from areal.engine.native.sequence import Finished, GenRequest
from areal.models.common.attention import PackedAttention
from areal.models.common.image_attention import ImageAttention
from areal.models.common.moe import recorded_experts
from areal.models.hf_io import build_model
from areal.models.vision.patches import Patches
from areal.models.vision.positions import mrope_positions
from areal.models.vision.prompt_images import CutImage, PromptImages
from areal.models.vision.tower import Images

VOCAB = 64


GEMMA = {  # a window shorter than most sequences, then all of them; norms that are not the identity
    "num_hidden_layers": 2,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 3.0,
}

HYBRID = {  # a layer with the delta rule, of whose value heads two share a key, and one without
    "num_hidden_layers": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


LATENT = {  # a dense layer and one with experts of two groups; ranks and heads of no power of two
    "head_dim": None,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 10,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
}

ONE_PRODUCT = {  # of queries, without a latent vector of their own
    "head_dim": None,
    "num_hidden_layers": 2,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
}


def small_model(family="qwen3", seed=0, **overrides):
    overrides = {"head_dim": 16, "num_hidden_layers": 1} | overrides
    model = tiny_model(family, seed=seed, **overrides)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # a norm that is 1 everywhere would hide a wrong one
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def make_engine(monkeypatch, device):
    monkeypatch.setattr(engine_module, "make_runner", EagerRunner)
    if device.type == "cpu":
        # Few rows take 64 splits, which the interpreter would visit one by one.
        monkeypatch.setattr(program_module, "splits_for", lambda *_: 2)

    def make(family="qwen3", seed=0, shape=None, fp8=False, **options) -> NativeEngine:
        model = small_model(family, seed, **(shape or {})).to(device)
        if fp8:
            model.store_in_fp8()
        options = {"page_size": 4, "num_pages": 100, "max_running": 12} | options
        return NativeEngine(model, **options)

    return make


def run(engine: NativeEngine) -> dict[str, Finished]:
    done: dict[str, Finished] = {}
    for _ in range(500):
        if not engine.has_work:
            return done
        done |= {finished.rid: finished for finished in engine.step()}
    raise AssertionError(f"requests still run: {engine.stats()}")


@torch.no_grad()
def full_forward_logits(model, prompt, output) -> torch.Tensor:
    """Of each output token, float64 on the host."""
    device = model.tok_embeddings.weight.device
    tokens = torch.tensor(prompt + output, device=device)
    attend = PackedAttention(torch.tensor([0, len(tokens)], device=device), len(tokens))
    hidden = model(tokens, torch.arange(len(tokens), device=device), attend)
    return model.logits(hidden).double().cpu()[len(prompt) - 1 : -1]


def full_forward_logprobs(model, prompt, output, temperature=1.0, allowed=None):
    """`allowed`: the tokens that could be drawn at each step, if not all."""
    logits = full_forward_logits(model, prompt, output) / temperature
    for i in range(len(output) if allowed else 0):
        kept = logits[i, allowed[i]]
        logits[i] = -torch.inf
        logits[i, allowed[i]] = kept
    return logits.log_softmax(-1)[range(len(output)), output].tolist()


def image_request(args, rid, sizes, length=4) -> GenRequest:
    """Images of `sizes` (rows and columns of patches) between words."""
    tokens, images = [5], []
    for number, (rows, columns) in enumerate(sizes):
        tokens += [7, *[args.image_token_id] * (rows * columns // 4), 9]
        rng = np.random.default_rng([rows, columns])
        pixels = rng.standard_normal((rows * columns, args.patch_values), np.float32)
        images.append(CutImage(bytes([rows, columns, number]), Patches(pixels, (1, rows, columns))))
    seen = PromptImages.of(tokens, images, args) if images else None
    options = GenerationHyperparameters(seed=1, max_new_tokens=length, ignore_eos=True)
    return GenRequest(rid, tokens, options, images=seen)


def image_logprobs(model, req: GenRequest, output: list[int]) -> list[float]:
    tokens, args = torch.tensor(req.input_ids + output), model.args.vision
    cut = [] if req.images is None else [image.patches for image in req.images.images]
    grids, seen = [one.grid for one in cut], (None, None)
    if cut:
        pixels = torch.from_numpy(np.concatenate([one.pixels for one in cut]))
        rows = (tokens == args.image_token_id).nonzero().squeeze(1)
        seen = model.look(Images(pixels, torch.tensor(grids))), rows
    attend = PackedAttention(torch.tensor([0, len(tokens)]), len(tokens))
    positions = attend.positions_T
    if args.has_axes:
        positions = torch.from_numpy(mrope_positions(tokens.numpy(), grids, args))
    elif cut:
        attend = ImageAttention(attend, [(0, *span) for span in req.images.spans])
    logits = model.logits(model(tokens, positions, attend, *seen)).double()
    logits[:, list(args.placeholder_ids)] = -torch.inf
    rows = range(len(req.input_ids) - 1, len(tokens) - 1)
    return logits.log_softmax(-1)[rows, output].tolist()


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # rows of padding
@pytest.mark.parametrize(
    ("family", "sections", "drafts"),
    [
        ("qwen2_5_vl", [2, 3, 3], False),
        ("qwen3_vl", [4, 2, 2], True),
        ("gemma3", None, False),  # tokens see all of their image, more than their window
        ("qwen3_5", [2, 2, 2], False),  # three quarters of a head are rotated
    ],
)
@torch.no_grad()
def test_prompts_with_images_are_what_a_full_forward_gives(monkeypatch, family, sections, drafts):
    """Embeddings and positions in chunks of a prompt, positions of steps, masked draws."""
    monkeypatch.setattr(engine_module, "make_runner", EagerRunner)
    monkeypatch.setattr(program_module, "splits_for", lambda *_: 2)
    monkeypatch.setattr(EagerRunner, "max_prefill_tokens", 5 if sections else 10)
    config = tiny_vision_config(family)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config["text_config"] |= {**heads, "num_hidden_layers": 2}
    if family == "qwen3_5":
        config["text_config"] |= {key: HYBRID[key] for key in HYBRID if "linear" in key}
    if sections:
        config["text_config"]["rope_parameters"]["mrope_section"] = sections
    else:
        config["text_config"] |= {"sliding_window": 6, "sliding_window_pattern": 2}
    model = build_model(config, device="cpu", dtype=torch.float32)
    model.init_weights(0)
    model.output_weight[list(model.args.vision.placeholder_ids)] *= 30  # and yet never drawn
    if drafts:
        monkeypatch.setattr(Drafts, "best_length", lambda *_: 3)
    engine = NativeEngine(model, page_size=4, num_pages=100, max_running=12, drafts=drafts)
    args = model.args.vision
    sizes = {"two": [(2, 2), (4, 2)] if sections else [(6, 6), (6, 6)], "words": []}
    requests = {rid: image_request(args, rid, some) for rid, some in sizes.items()}
    for request in requests.values():
        engine.add(request)
    for rid, done in run(engine).items():
        expected = image_logprobs(model, requests[rid], done.output_tokens)
        assert done.output_logprobs == pytest.approx(expected, abs=1e-4)
        assert not set(done.output_tokens) & set(args.placeholder_ids)


def mixed_requests(count: int, most: int, seed: int = 0) -> list[GenRequest]:
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(9)]
    return [
        GenRequest(
            str(i),
            shared if i % 3 == 0 else [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))],
            GenerationHyperparameters(
                seed=i, max_new_tokens=rng.randrange(1, most + 1), ignore_eos=True, temperature=0.8
            ),
        )
        for i in range(count)
    ]


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # rows of padding
@pytest.mark.parametrize(
    ("family", "num_requests", "shape"),
    [
        ("qwen2", 3, {}),
        ("qwen3", 10, {}),
        ("qwen3_moe", 3, {}),
        ("qwen3_moe", 10, {}),
        ("gemma3_text", 3, GEMMA),
        ("gemma3_text", 10, GEMMA | {"head_dim": 24}),
        ("llama", 3, {"head_dim": 8, "mlp_bias": True}),
        ("qwen3", 3, {"head_dim": 48}),
        ("deepseek_v2", 3, LATENT),
        ("deepseek_v2", 10, ONE_PRODUCT),
    ],
)
def test_logprobs_equal_a_full_forward(make_engine, family, num_requests, shape):
    """A few rows, and more than the kernels for few rows take."""
    engine = make_engine(family, shape=shape)
    requests = mixed_requests(num_requests, most=3)
    for request in requests:
        engine.add(request)
    done = run(engine)
    for request in requests:
        out = done[request.rid]
        assert len(out.output_tokens) == request.gconfig.max_new_tokens
        expected = full_forward_logprobs(engine.model, request.input_ids, out.output_tokens, 0.8)
        assert out.output_logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # rows of padding
@pytest.mark.parametrize(
    ("family", "num_requests", "shape", "targets", "drafts"),
    [
        ("qwen2", 3, {}, ATTENTION + MLP, False),
        ("qwen3", 9, {}, ATTENTION + MLP, True),
        ("qwen3_moe", 3, {}, ATTENTION, False),
        ("llama", 3, {"head_dim": 24, "mlp_bias": True}, ("k_proj", "down_proj"), False),
        ("qwen3_5_text", 3, HYBRID, ("in_proj_qkv", "out_proj", "q_proj", "up_proj"), False),
        ("deepseek_v2", 3, LATENT, ("q_b_proj", "kv_a_proj_with_mqa", "o_proj", "up_proj"), True),
        ("deepseek_v2", 3, ONE_PRODUCT, ("q_proj", "kv_a_proj_with_mqa"), False),
    ],
)
@torch.no_grad()
def test_rows_of_one_batch_have_their_own_adapters(
    make_engine, monkeypatch, family, num_requests, shape, targets, drafts
):
    """Of different ranks and layers, beside rows of the plain model."""
    if drafts:
        monkeypatch.setattr(Drafts, "best_length", lambda *_: 3)
    engine = make_engine(family, shape=shape, drafts=drafts)
    plain = copy.deepcopy(engine.model)
    models = {"": plain}
    for number, (rank, some) in enumerate([(4, targets), (20, targets[:1]), (1, targets[1:])]):
        tensors = adapter_tensors(plain, number, rank, *some)
        adapter = read_adapter(engine.model, tensors.items(), alpha=2.0 + number)
        engine.adapters.add(f"a{number}", adapter)
        models[f"a{number}"] = merged_model(plain, tensors, 2.0 + number)
    requests = mixed_requests(num_requests, most=3)
    for number, request in enumerate(requests):
        request.gconfig = request.gconfig.new(lora_name=list(models)[number % len(models)])
        engine.add(request)
    done = run(engine)
    for request in requests:
        out = done[request.rid].output_tokens
        model = models[request.gconfig.lora_name]
        expected = full_forward_logprobs(model, request.input_ids, out, 0.8)
        assert done[request.rid].output_logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # rows of padding
@torch.no_grad()
def test_adapters_come_change_and_go_between_requests(make_engine):
    """A live adapter is published twice, the second of a higher rank; a named one is replaced."""
    engine = make_engine(shape={"num_hidden_layers": 1})
    plain = copy.deepcopy(engine.model)

    def ask(name: str, model) -> None:
        options = GenerationHyperparameters(
            seed=3, max_new_tokens=2, ignore_eos=True, lora_name=name
        )
        engine.add(GenRequest("r", [5, 7, 9, 11, 2], options))
        out = run(engine)["r"]
        expected = full_forward_logprobs(model, [5, 7, 9, 11, 2], out.output_tokens)
        assert out.output_logprobs == pytest.approx(expected, abs=1e-4)

    ask("", plain)
    for version, rank in ((1, 2), (2, 40)):
        tensors = adapter_tensors(plain, version, rank, "q_proj", "down_proj")
        engine.load_adapter(tensors.items(), version, alpha=4.0, name="run", recompute_kv=True)
        model = merged_model(plain, tensors, 4.0)
        ask("", model)
        ask(f"run-v{version}", model)
    for seed in (5, 6):
        tensors = adapter_tensors(plain, seed, 3, "o_proj")
        engine.adapters.add("mine", read_adapter(engine.model, tensors.items(), alpha=1.0))
        ask("mine", merged_model(plain, tensors, 1.0))
        engine.remove_adapter("mine")
    ask("", model)
    tensors = adapter_tensors(plain, 7, 129, "q_proj")  # more than a tile of the kernels
    with pytest.raises(ValueError, match="has to be merged here"):
        engine.load_adapter(tensors.items(), 3, alpha=4.0, name="run", recompute_kv=True)
    ask("", model)
    weights = [(name, tensor.clone()) for name, tensor in plain.named_hf_tensors()]
    engine.load_weights(weights, 3, recompute_kv=True)  # whole weights have no adapter
    ask("", plain)


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # rows of padding
@pytest.mark.parametrize(
    ("family", "shape"),
    [("qwen3_5_text", HYBRID), ("qwen3_5_moe_text", HYBRID), ("deepseek_v2", LATENT)],
)
def test_samples_that_stop_turns_and_new_weights(make_engine, family, shape, device):
    """Prompts that go on where a sequence has ended start from pages of its own even though the
    runner was ahead of it, and in hybrids from the state at their border."""
    engine, history = make_engine(family, shape=shape), [3, 1, 4]
    stops = {"ignore_eos": False, "stop_token_ids": list(range(0, VOCAB, 2))}
    for turn, (num_samples, most) in enumerate([(2, 3), (1, 2), (1, 1)]):
        if turn == 2:
            weights = small_model(family, 1, **shape).to(device)
            engine.load_weights(weights.named_hf_tensors(), 1, recompute_kv=True)
        for sample in range(num_samples):
            options = {"seed": sample, "max_new_tokens": most, "ignore_eos": True}
            options |= stops if sample == 1 else {}
            engine.add(GenRequest(str(sample), history, GenerationHyperparameters(**options)))
        done = run(engine)
        for out in done.values():
            expected = full_forward_logprobs(engine.model, history, out.output_tokens)
            assert out.output_logprobs == pytest.approx(expected, abs=1e-4)
            assert (out.cached_tokens > 0) == (turn == 1)
        history = [*history, *done["0"].output_tokens, 7]


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # rows of padding
@pytest.mark.parametrize(
    ("family", "shape", "num_requests"),
    [("qwen3_moe", {}, 2), ("qwen3_moe", {}, 7), ("deepseek_v2", LATENT, 3)],
)
def test_experts_on_record_are_those_of_a_full_forward(make_engine, family, shape, num_requests):
    """A few rows, and more than the kernels for few rows take; prompts that are shared, too."""
    engine, requests = make_engine(family, shape=shape), mixed_requests(num_requests, most=3)
    for request in requests:
        request.return_routed_experts = True
        engine.add(request)
    done = run(engine)
    for request in requests:
        out = done[request.rid]
        with recorded_experts(engine.model) as chosen:
            full_forward_logits(engine.model, request.input_ids, out.output_tokens)
        expected = torch.stack(chosen, dim=1)[:-1].cpu().numpy()
        np.testing.assert_array_equal(out.routed_experts, expected)


@pytest.mark.parametrize(
    ("family", "shape"),
    [("qwen3", {}), pytest.param("gemma3_text", GEMMA, marks=pytest.mark.slow)],
)
def test_samples_that_read_their_prompts_together(make_engine, monkeypatch, family, shape):
    monkeypatch.setattr(shared_prompts, "MIN_SAVED_BYTES", 1)
    small = replace(HOPPER, num_processors=8)
    monkeypatch.setattr(shared_prompts, "device_of", lambda device: small)
    engine, rng = make_engine(family, shape=shape), random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (70, 5)]
    requests = [
        GenRequest(
            str(i),
            prompts[prompt],
            GenerationHyperparameters(seed=i, max_new_tokens=2 + i % 3, ignore_eos=True),
        )
        for i, prompt in enumerate([0, 1, 0, 0, 1, 0])
    ]
    for request in requests:
        engine.add(request)
    done = run(engine)
    assert engine._runner.shared_launches > 0
    for request in requests:
        out = done[request.rid]
        expected = full_forward_logprobs(engine.model, request.input_ids, out.output_tokens)
        assert out.output_logprobs == pytest.approx(expected, abs=1e-4)


def test_rows_under_a_grammar_beside_rows_without(make_engine):
    pytest.importorskip("llguidance", reason="constrained output needs the extra `grammar`")
    compiler = GrammarCompiler(byte_tokenizer(), [EOS])
    grammar, letters = Grammar(regex="[!-&]{2,3}"), [*range(4, 10)]
    allowed = [letters, letters, [*letters, EOS], [EOS]]
    requests = mixed_requests(4, most=5)
    for one in requests[1::2]:
        one.gconfig = one.gconfig.new(max_new_tokens=8, ignore_eos=False)
        one.grammar, one.grammar_state = grammar, compiler.state(grammar)
    engine = make_engine(eos_ids=[EOS])
    for one in requests:
        engine.add(one)
    done = run(engine)
    for i, one in enumerate(requests):
        out, is_constrained = done[one.rid], bool(i % 2)
        if is_constrained:
            assert out.stop_reason == "stop" and out.output_tokens[-1] == EOS
            assert all(token in allowed[i] for i, token in enumerate(out.output_tokens))
        else:
            assert len(out.output_tokens) == one.gconfig.max_new_tokens
        expected = full_forward_logprobs(
            engine.model,
            one.input_ids,
            out.output_tokens,
            0.8,
            allowed=allowed if is_constrained else None,
        )
        assert out.output_logprobs == pytest.approx(expected, abs=1e-4)


def test_logprobs_bias_and_penalties_survive_preemption_and_new_weights(make_engine, device):
    """Each token's log-probability under the weights of its time and, where there are penalties,
    under all that was drawn before it, also before a preemption."""
    engine, requests = make_engine(num_pages=12), mixed_requests(6, most=12, seed=1)
    rare = {"repetition_penalty": 1.7, "presence_penalty": 0.8, "logit_bias": {"9": 2.0}}
    for request in requests[1::2]:
        request.gconfig = request.gconfig.new(**rare)
    for request in requests:
        engine.add(request)
    done: dict[str, Finished] = {}
    for _ in range(2):
        done |= {finished.rid: finished for finished in engine.step()}
    engine.load_weights(small_model(seed=1).to(device).named_hf_tensors(), 1, recompute_kv=True)
    done |= run(engine)
    assert engine.stats()["preemptions"] > 0
    assert {v for out in done.values() for v in out.output_versions} == {0, 1}
    models = [small_model(seed=seed).to(device) for seed in (0, 1)]
    for i, request in enumerate(requests):
        out = done[request.rid]
        tokens = torch.tensor([*request.input_ids, *out.output_tokens])
        logits = [full_forward_logits(m, request.input_ids, out.output_tokens) for m in models]
        for step, found in enumerate(out.output_logprobs):
            x_V = logits[out.output_versions[step]][step]
            if i % 2:
                x_V[9] += 2.0
                seen = tokens[: len(request.input_ids) + step].unique()
                x_V[seen] = torch.where(x_V[seen] > 0, x_V[seen] / 1.7, x_V[seen] * 1.7)
                x_V[torch.tensor(out.output_tokens[:step]).long().unique()] -= 0.8
            expected = (x_V / 0.8).log_softmax(-1)[out.output_tokens[step]].item()
            assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_greedy_tokens_and_stops_are_those_of_the_plain_engine(make_engine, monkeypatch):
    options = GenerationHyperparameters(greedy=True, max_new_tokens=14, min_new_tokens=4)
    requests = [GenRequest(str(i), [i, 2 * i, 5], options) for i in range(6)]
    engine = make_engine(eos_ids=range(24))
    for request in requests:
        engine.add(request)
    found = run(engine)
    monkeypatch.undo()
    plain = NativeEngine(small_model(), page_size=4, num_pages=100, eos_ids=range(24))
    for request in requests:
        plain.add(request)
    expected = run(plain)
    assert {rid: f.output_tokens for rid, f in found.items()} == {
        rid: f.output_tokens for rid, f in expected.items()
    }
    assert all(len(f.output_tokens) > 4 for f in found.values())
    assert "stop" in {f.stop_reason for f in found.values()}


def test_a_model_in_fp8_and_its_updates(make_engine, device):
    """Weights and cache are quantized as the model's own forward quantizes them.

    Sums in another order round an activation to another FP8 value now and then, which moves the
    tokens after it; tensor cores, which add FP8 products with 14 bits, many."""
    usual, most = (1e-2, 0.2) if device.type == "cpu" else (0.6, 0.6)
    engine = make_engine(fp8=True, shape={"hidden_size": 160, "intermediate_size": 200})
    requests = mixed_requests(4, most=6)
    for version in range(2):
        for request in requests:
            engine.add(request)
        done, differences = run(engine), []
        for request in requests:
            out = done[request.rid]
            args = (request.input_ids, out.output_tokens, 0.8)
            expected = full_forward_logprobs(engine.model, *args)
            differences += np.abs(np.subtract(out.output_logprobs, expected)).tolist()
            assert set(out.output_versions) == {version}
        assert np.median(differences) < usual and max(differences) < most
        shape = {"hidden_size": 160, "intermediate_size": 200}
        weights = small_model(seed=1, **shape).to(device).named_hf_tensors()
        engine.load_weights(weights, version + 1, recompute_kv=True)


# Drafts.


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # rows of padding
@pytest.mark.parametrize(("family", "shape"), [("qwen3", {}), ("deepseek_v2", ONE_PRODUCT)])
def test_drafts_change_no_draw(make_engine, monkeypatch, family, shape):
    """Guesses that are right for a while, or not at all: the tokens are those drawn without."""

    def generate(**options):
        engine = make_engine(family, shape=shape, **options)
        sampling = GenerationHyperparameters(max_new_tokens=8, temperature=0.7, seed=3)
        engine.add(GenRequest("a", [5, 6, 7, 8, 9], sampling))
        done = run(engine)["a"]
        expected = full_forward_logprobs(engine.model, [5, 6, 7, 8, 9], done.output_tokens, 0.7)
        assert done.output_logprobs == pytest.approx(expected, abs=2e-3)
        return done.output_tokens, engine.stats()

    expected, stats = generate(drafts=False)
    assert stats["drafts_accepted"] == stats["tokens_drafted"] == 0

    def guess(_, sequence, limit):
        num_tokens = len(sequence.output_tokens)
        right = expected[num_tokens : num_tokens + limit]
        return right if num_tokens < 4 else [*right[:1], *(VOCAB - 1 - t for t in right[1:])]

    monkeypatch.setattr(Drafts, "best_length", lambda *_: 3)
    monkeypatch.setattr(Drafts, "draft", guess)
    drawn, stats = generate()
    assert drawn == expected
    assert 2 < stats["drafts_accepted"] < stats["tokens_drafted"]
