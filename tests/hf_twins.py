"""A tiny model of ours and transformers' model of the same weights, and how to compare them.

    ours, theirs = twin_models("qwen3_moe", num_experts=8)
    assert_same_logits(ours, theirs, lengths=[1, 5, 90])

Theirs is read from a folder that ours was saved in, so every comparison is also one of the files.
"""

from __future__ import annotations

import tempfile

import torch
from tiny import tiny_config, tiny_model

from areal.models.common.attention import PackedAttention
from areal.models.hf_io import save_hf


def merged_by_peft(theirs, adapter):
    """transformers' model, the adapter in the folder `adapter` added to its weights."""
    from peft import PeftModel  # takes a second, which the tests that do not need it are spared

    return PeftModel.from_pretrained(theirs, adapter).merge_and_unload()


def twin_models(family: str, **overrides):
    """Ours and transformers' with equal random weights, biases and norms moved off 0 and 1."""
    from transformers import AutoModelForCausalLM

    ours = tiny_model(family, **overrides)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    # Absent instead of null, but for what some families have by default.
    config = {
        key: value
        for key, value in tiny_config(family, **overrides).items()
        if value is not None or key in ("pad_token_id", "q_lora_rank")
    }
    with tempfile.TemporaryDirectory() as folder:
        save_hf(ours.named_hf_tensors(), config, folder)
        theirs, info = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", output_loading_info=True
        )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return ours, theirs.eval()


def packed_logits(model, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    lengths = torch.tensor([len(s) for s in sequences])
    attend = PackedAttention(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), int(lengths.max()))
    hidden = model(torch.cat(sequences), attend.positions_T, attend)
    return list(model.logits(hidden).split(lengths.tolist()))


def random_sequences(vocab_size: int, lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (n,), generator=generator) for n in lengths]


def assert_same_logits(ours, theirs, lengths: list[int]) -> None:
    sequences = random_sequences(ours.args.vocab_size, lengths)
    with torch.no_grad():
        for tokens, logits in zip(sequences, packed_logits(ours, sequences), strict=True):
            expected = theirs(tokens[None]).logits[0]
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def assert_same_gradients(ours, theirs, lengths: list[int]) -> None:
    sequences = random_sequences(ours.args.vocab_size, lengths)
    sum(logits.logsumexp(-1).sum() for logits in packed_logits(ours, sequences)).backward()
    sum(theirs(tokens[None]).logits.logsumexp(-1).sum() for tokens in sequences).backward()
    expected = dict(_per_expert((n, p.grad) for n, p in theirs.named_parameters()))
    for name, parameter in ours.named_parameters():
        for hf_name, grad in ours.adapter.convert_single_to_hf(name, parameter.grad):
            assert torch.allclose(grad, expected[hf_name], atol=1e-4, rtol=1e-4), hf_name


def _per_expert(named):
    """transformers stacks experts too, gate over up, but writes them one by one."""
    for name, tensor in named:
        stem, _, leaf = name.rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj") or not stem.endswith(".experts"):
            yield name, tensor
            continue
        for index, one in enumerate(tensor):
            if leaf == "down_proj":
                yield f"{stem}.{index}.down_proj.weight", one
            else:
                gate, up = one.chunk(2)
                yield f"{stem}.{index}.gate_proj.weight", gate
                yield f"{stem}.{index}.up_proj.weight", up
