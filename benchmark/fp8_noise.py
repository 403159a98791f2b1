"""How far training in FP8 is from training without it: log-probabilities, gradients, ratios.

    python benchmark/fp8_noise.py --model FOLDER [--leave-out NAME[,NAME...] ...] [--json FILE]

Texts are drawn from the model itself and compared in float32, on a CPU: with the layers of all
blocks in FP8 (`all`), then with some left out, as archon.fp8_config.exclude_modules names them.

| row               | meaning                                                                      |
|-------------------|------------------------------------------------------------------------------|
| NAME_logprob      | standard deviation of what FP8 changes in a drawn token's log-probability    |
| NAME_gradient     | cosine between the policy gradients, of one random advantage per text        |
| NAME_ratio        | standard deviation of what FP8 adds to the log of a ratio, new policy to old |
| plain_ratio       | that of the log itself, without FP8                                          |

The new policy is one update away: each weight of a block --lr against the sign of its gradient.
Before all, weights are moved at random by less than half of a bfloat16's last bit. Of those of a
checkpoint in bfloat16 one in 16 lies in the middle between two FP8 numbers, and the first update
would round all of these to its own side at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from report import Row, print_table, write_json
from transformers import AutoModelForCausalLM

from areal.models import own_config
from areal.models.common.attention import PackedAttention
from areal.models.common.decoder import Decoder
from areal.models.common.fp8_training import train_in_fp8
from areal.models.hf_io import build_model, load_hf, read_hf_config

BFLOAT16_DIGITS = 8  # of the mantissa, the first of which is not stored
Grads = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--leave-out", nargs="*", default=[], metavar="NAME[,NAME...]")
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--length", type=int, default=64, help="tokens per text")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model}: there is no config.json; give a Hugging Face folder")
    torch.manual_seed(1)
    texts = draw_texts(args.model, args.texts, args.length)
    advantages = torch.randn(args.texts)
    plain = build(args.model)
    old, grads = logprobs(plain, texts), policy_grads(plain, texts, advantages)
    change = logprobs_after(plain, grads, args.lr, texts) - old
    rows = [Row("plain_ratio", float(change.std()), "nats")]
    for names in ("", *args.leave_out):
        model, name = build(args.model, in_fp8=True, left_out=names), names or "all"
        in_fp8, own_grads = logprobs(model, texts), policy_grads(model, texts, advantages)
        added = logprobs_after(model, grads, args.lr, texts) - in_fp8 - change
        rows += [
            Row(f"{name}_logprob", float((in_fp8 - old).std()), "nats"),
            Row(f"{name}_gradient", cosine(own_grads, grads), "cosine"),
            Row(f"{name}_ratio", float(added.std()), "nats"),
        ]
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def draw_texts(folder: Path, num_texts: int, length: int) -> torch.Tensor:
    """[texts, length], each begun by the model's bos token, or by token 0 if it names none."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    first = model.config.bos_token_id or 0
    begun = torch.full((num_texts, 1), first)
    sizes = {"max_new_tokens": length - 1, "min_new_tokens": length - 1}
    return model.generate(
        begun, attention_mask=torch.ones_like(begun), do_sample=True, top_k=0, top_p=1.0, **sizes
    )


def build(folder: Path, *, in_fp8: bool = False, left_out: str = "") -> Decoder:
    config = own_config(read_hf_config(folder))
    model = build_model(config, device="cpu", dtype=torch.float32, is_critic=False)
    if in_fp8:
        try:
            train_in_fp8(model, left_out.split(",") if left_out else [])
        except ValueError as error:  # no such layer
            raise SystemExit(f"--leave-out {left_out}: {error}") from None
    load_hf(model, folder)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.layers.parameters():
            shift = torch.rand(weight.shape, generator=generator) - 0.5
            weight.mul_(1 + shift * 2**-BFLOAT16_DIGITS)
    return model.train()


def logprobs(model: Decoder, texts: torch.Tensor, *, with_grad: bool = False) -> torch.Tensor:
    """[texts, length - 1]."""
    num_texts, length = texts.shape
    starts = torch.arange(0, texts.numel() + 1, length, dtype=torch.int32)
    positions = torch.arange(length).repeat(num_texts)
    with torch.set_grad_enabled(with_grad):
        hidden = model(texts.flatten(), positions, PackedAttention(starts, length))
        logits = model.logits(hidden.view(num_texts, length, -1)[:, :-1].flatten(0, 1))
        of_all = logits.float().log_softmax(-1)
        return of_all.gather(1, texts[:, 1:].reshape(-1, 1)).view(num_texts, length - 1)


def policy_grads(model: Decoder, texts: torch.Tensor, advantages: torch.Tensor) -> Grads:
    loss = -(advantages[:, None] * logprobs(model, texts, with_grad=True)).mean()
    named = dict(model.layers.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def logprobs_after(model: Decoder, grads: Grads, lr: float, texts: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for name, weight in model.layers.named_parameters():
            weight.sub_(lr * grads[name].sign())
    return logprobs(model, texts)


def cosine(found: Grads, expected: Grads) -> float:
    def dot(left: Grads, right: Grads) -> float:
        return sum(float((left[name].double() * right[name].double()).sum()) for name in expected)

    return dot(found, expected) / (dot(found, found) * dot(expected, expected)) ** 0.5


if __name__ == "__main__":
    main()
