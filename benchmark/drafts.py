"""Drafts on a real model: groups of samples with and without them, in one run.

    python benchmark/drafts.py --model runs/smollm2/model [--device cuda] [--json FILE]

The model is the one `examples/smollm2/prepare.py` writes (any chat model will do). Each question is
answered 16 times at temperature 1, until the model ends it or 1,024 tokens; `all` sends all
questions at once, so that drafts begin when few answers are left, `one_by_one` a group at a time.
Rows: tokens per second without drafts, and the speed with them as a multiple of it; how many tokens
were drafted, and the share that came true. `limit` is what no such draft exceeds: the speed if each
token that most often follows the same tokens, so far in its group, were there without a pass.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from report import Row, print_table, write_json
from transformers import AutoTokenizer

from areal.api.config.inference import GenerationHyperparameters
from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import Finished, GenRequest

QUESTIONS = [
    f"{name} has {a} boxes with {b} {thing} each and gives {c} {thing} away. How many {thing} are "
    "left? Think step by step."
    for name, a, b, c, thing in (
        ("Anna", 7, 12, 9, "apples"),
        ("Omar", 14, 6, 20, "pens"),
        ("Li", 9, 15, 31, "stamps"),
        ("Sara", 5, 24, 17, "marbles"),
        ("Tom", 11, 11, 40, "coins"),
        ("Maya", 8, 13, 26, "cards"),
        ("Ivan", 6, 18, 33, "shells"),
        ("Noor", 12, 9, 50, "beads"),
    )
]
SAMPLES = 16
MATCH = 3  # tokens that must stand elsewhere, as in areal/engine/native/drafts.py


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, metavar="FOLDER")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--tokens", type=int, default=1024, help="most tokens of an answer")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
        )
        for question in QUESTIONS[: args.questions]
    ]
    rows = measure(args.model, args.device, prompts, args.tokens)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)
    return 0


def measure(model: str, device: str, prompts: list[list[int]], num_tokens: int) -> list[Row]:
    engines = {
        drafts: NativeEngine.from_pretrained(model, device=device, drafts=drafts)
        for drafts in (False, True)
    }
    rows: list[Row] = []
    for name, batches in (("all", [prompts]), ("one_by_one", [[prompt] for prompt in prompts])):
        speed = {}
        for drafts, engine in engines.items():
            answers = run(engine, batches, num_tokens)[2]  # captures graphs, compiles
            # Nothing of the first time is in the cache of the second.
            tensors = engine.model.named_hf_tensors()
            engine.load_weights(tensors, engine.version + 1, recompute_kv=True)
            before = engine.stats()
            num_drawn, seconds, _ = run(engine, batches, num_tokens)
            after = engine.stats()
            speed[drafts] = num_drawn / seconds
        num_drafted = after["tokens_drafted"] - before["tokens_drafted"]
        num_true = after["drafts_accepted"] - before["drafts_accepted"]
        rows += [
            Row(f"smollm2_group_tail_drafts/{name}/without", speed[False], "tokens/s"),
            Row(f"smollm2_group_tail_drafts/{name}", speed[True] / speed[False], "times as fast"),
            Row(f"smollm2_group_tail_drafts/{name}/drafted", num_drafted / num_drawn, "a token"),
            Row(
                f"smollm2_group_tail_drafts/{name}/came_true",
                num_true / max(num_drafted, 1),
                "of the drafted tokens",
            ),
        ]
    share = guessable_share([(prompts[i], group) for i, group in answers.items()])
    rows.append(Row("smollm2_group_tail_drafts/limit", 1 / (1 - share), "times as fast"))
    return rows


def guessable_share(groups: Sequence[tuple[list[int], list[list[int]]]]) -> float:
    """Of the tokens of all answers: those that follow MATCH tokens as another one did most often
    before, in the prompt or in any answer to it so far. Answers are written at the same pace."""
    num_guessed = num_tokens = 0
    for prompt, answers in groups:
        followers: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for end in range(MATCH, len(prompt)):
            followers[tuple(prompt[end - MATCH : end])][prompt[end]] += 1
        num_tokens += sum(map(len, answers))
        for place in range(MATCH, max(map(len, answers))):
            drawn = [(tuple(a[place - MATCH : place]), a[place]) for a in answers if place < len(a)]
            for before, token in drawn:
                if before in followers:
                    num_guessed += followers[before].most_common(1)[0][0] == token
            for before, token in drawn:
                followers[before][token] += 1
    return num_guessed / num_tokens


def run(
    engine: NativeEngine, batches: list[list[list[int]]], num_tokens: int
) -> tuple[int, float, dict[int, list[list[int]]]]:
    """Tokens drawn, seconds, and the answers by question."""
    answers: defaultdict[int, list[list[int]]] = defaultdict(list)
    num_drawn, number, start = 0, 0, time.perf_counter()
    for batch in batches:
        for i, prompt in enumerate(batch):
            for j in range(SAMPLES):
                options = GenerationHyperparameters(max_new_tokens=num_tokens, seed=100 * i + j)
                engine.add(GenRequest(f"{number + i}-{j}", prompt, options))
        number += len(batch)
        while engine.has_work:
            for done in engine.step():
                assert isinstance(done, Finished)
                num_drawn += len(done.output_tokens)
                answers[int(done.rid.partition("-")[0])].append(done.output_tokens)
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    return num_drawn, time.perf_counter() - start, answers


if __name__ == "__main__":
    sys.exit(main())
