"""Tokens per second with an image in every prompt, beside text alone through the same decoder.

    python benchmark/vision.py [--only PART ...] [--json FILE] [--tiny]

Random weights in the shape of Qwen2.5-VL 3B, bfloat16, and its decoder alone (a Qwen2 of the same
sizes, which has no tower and no rule against image tokens). A prompt has one image of 1024 x 1024
pixels (1,369 image tokens) and text up to 1,536 tokens, or as many tokens of text. Tokens are those
that the decoder processes: image tokens count, patches of the tower do not.

| part     | work                                                                                |
|----------|-------------------------------------------------------------------------------------|
| generate | 32 prompts, 8 samples each. After prefill: tokens drawn from the moment that every  |
|          | request has its first one until the first request ends, over that time. Prefill:    |
|          | tokens of the 32 prompts over the time before, tower included                       |
| train    | GRPO steps (forward, backward, clipping, AdamW), compiled, of 8 answers of 512      |
|          | tokens: 16,384 tokens a step, prompts included. `group`: all to one prompt, as the  |
|          | samples of a group are, so that the tower computes its image once; `frozen`: the    |
|          | same with `freeze_vision_tower`; `apart`: 8 prompts with 8 images, 4 in a           |
|          | micro-batch                                                                         |

Rows of `_ratio` divide the speed with images by that of text. `--tiny` shrinks everything, to try
the script where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import tempfile
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generation import request_options
from report import Row, print_table, write_json
from training import DrawnEngine, grpo_loss, median_seconds, peak_bytes, reset_peak, synchronize

from areal.api.config.train_engine import (
    ArchonEngineConfig,
    MicroBatchSpec,
    OptimizerConfig,
    TrainEngineConfig,
)
from areal.api.io_struct import FinetuneSpec
from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import GenRequest
from areal.engine.train.archon import ArchonEngine
from areal.models import decoder_args
from areal.models.common.decoder import Decoder
from areal.models.hf_io import build_model
from areal.models.vision.patches import Patches, PatchRules, cut_patches
from areal.models.vision.prompt_images import CutImage, PromptImages

TEXT = {
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
TINY_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
TINY_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
}
# The published ids of tokens that stand for images, counted from the end of the vocabulary.
FROM_END = {
    "image_token_id": 281,
    "video_token_id": 280,
    "vision_start_token_id": 284,
    "vision_end_token_id": 283,
}
MAX_PIXELS = 16384 * 28 * 28  # of the published preprocessor_config.json
PARTS = ("generate", "train")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Sizes:
    side: int = 1024  # of an image, in pixels
    prompt: int = 1536  # tokens
    answer: int = 512
    prompts: int = 32  # of generation
    samples: int = 8
    repeats: int = 3


TINY_SIZES = Sizes(side=112, prompt=24, answer=8, prompts=2, samples=2, repeats=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS, metavar="PART")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and images")
    args = parser.parse_args()
    work = Work(TINY_SIZES if args.tiny else Sizes(), tiny=args.tiny)
    rows = [Row("image_tokens", work.num_image_tokens, "of a prompt's tokens")]
    for part in args.only:
        rows += work.generate() if part == "generate" else work.train()
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


class Work:
    def __init__(self, sizes: Sizes, *, tiny: bool) -> None:
        self.sizes, self.tiny = sizes, tiny
        self.text = TEXT | (TINY_TEXT if tiny else {})
        rope = {"rope_type": "default", "rope_theta": 1e6}
        head_dim = self.text["hidden_size"] // self.text["num_attention_heads"]
        rope["mrope_section"] = [head_dim // 8, 3 * head_dim // 16, 3 * head_dim // 16]
        decoder = {**self.text, "model_type": "qwen2_5_vl_text", "rope_parameters": rope}
        self.seeing = {
            "model_type": "qwen2_5_vl",
            "tie_word_embeddings": True,
            **{name: self.text["vocab_size"] - back for name, back in FROM_END.items()},
            "text_config": decoder,
            "vision_config": TOWER | (TINY_TOWER if tiny else {}),
        }
        self.vision = decoder_args(self.seeing).vision_args
        self.num_image_tokens = self.vision.num_tokens(self.image(0).grid)

    def image(self, seed: int) -> Patches:
        return random_image(self.sizes.side, seed)

    def prompt(self, seed: int, *, has_image: bool) -> list[int]:
        """`sizes.prompt` tokens, of an image first if it has one."""
        drawn = self.words([seed], self.sizes.prompt)
        if has_image:
            shown = [self.vision.image_token_id] * self.num_image_tokens
            drawn[1 : 1 + len(shown)] = shown
        return drawn

    def words(self, seed: list[int], count: int) -> list[int]:
        most = self.text["vocab_size"] - max(FROM_END.values())
        return np.random.default_rng(seed).integers(0, most, count).tolist()

    # Generation

    def generate(self) -> list[Row]:
        rows: list[Row] = []
        speeds = {name: self._speed(config) for name, config in self._models().items()}
        for at, number in (("", 0), ("_prefill", 1)):
            found = {name: speed[number] for name, speed in speeds.items()}
            rows += [
                Row(f"generate{at}_{name}", speed, "tokens/s") for name, speed in found.items()
            ]
            ratio = found["image"] / found["text"]
            rows.append(Row(f"generate{at}_ratio", ratio, "of the speed of text"))
        print_table(rows)
        return rows

    def _models(self) -> dict[str, dict[str, Any]]:
        return {"text": self.text, "image": self.seeing}

    def _speed(self, config: dict[str, Any]) -> tuple[float, float]:
        """Tokens per second after prefill, and of prefill."""
        sizes = self.sizes
        engine = NativeEngine(drawn_model(config), max_running=sizes.prompts * sizes.samples)
        self._run(engine, num_out=min(64, sizes.answer))  # captures graphs, compiles
        weights = engine.model.named_hf_tensors()
        engine.load_weights(weights, engine.version + 1, recompute_kv=True)
        found = self._run(engine, num_out=sizes.answer)
        assert not engine.stats()["preemptions"], "the cache is too small for this load"
        del engine, weights
        free_memory()
        return found

    def _run(self, engine: NativeEngine, *, num_out: int) -> tuple[float, float]:
        requests = self._requests(engine.model.args.vision is not None, num_out)
        before = engine.stats()["tokens_generated"]
        synchronize()
        start = time.perf_counter()
        for request in requests:
            engine.add(request)
        while engine.stats()["tokens_generated"] - before < len(requests):
            assert not engine.step(), "an output ended before all had begun"
        synchronize()
        begun, drawn = time.perf_counter(), engine.stats()["tokens_generated"]
        while not engine.step():
            pass
        synchronize()
        seconds = time.perf_counter() - begun
        speed = (engine.stats()["tokens_generated"] - drawn) / seconds
        while engine.has_work:
            engine.step()
        return speed, self.sizes.prompts * self.sizes.prompt / (begun - start)

    def _requests(self, has_image: bool, num_out: int) -> list[GenRequest]:
        requests = []
        for number in range(self.sizes.prompts):
            prompt, images = self.prompt(number, has_image=has_image), None
            if has_image:
                cut = CutImage(hashlib.sha256(b"%d" % number).digest(), self.image(number))
                images = PromptImages.of(prompt, [cut], self.vision)
            requests += [
                GenRequest(f"{number}-{i}", prompt, request_options(num_out), images=images)
                for i in range(self.sizes.samples)
            ]
        return requests

    # Training

    def train(self) -> list[Row]:
        group = self.sizes.samples
        arms = {
            "text": (self.text, group, {}),
            "group": (self.seeing, group, {}),
            "frozen": (self.seeing, group, {"freeze_vision_tower": True}),
            "apart": (self.seeing, 1, {}),
        }
        rows: list[Row] = []
        for name, (config, samples, options) in arms.items():
            speed, peak = self._train_speed(config, samples, options)
            rows.append(Row(f"train_{name}", speed, "tokens/s"))
            rows.append(Row(f"train_{name}_peak", peak / GIB, "GiB"))
            print_table(rows[-2:])
        text = rows[0].value
        for name in list(arms)[1:]:
            speed = next(row.value for row in rows if row.name == f"train_{name}")
            rows.append(Row(f"train_{name}_ratio", speed / text, "of the speed of text"))
        return rows

    def _train_speed(
        self, config: dict[str, Any], samples: int, options: dict[str, Any]
    ) -> tuple[float, float]:
        """Tokens per second, and the peak of the device's memory."""
        sizes = self.sizes
        length, num_rows = sizes.prompt + sizes.answer, sizes.samples
        per_mb = num_rows * length // (1 if samples > 1 else 2)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            section = TrainEngineConfig(
                path=folder,
                mb_spec=MicroBatchSpec(max_tokens_per_mb=per_mb),
                optimizer=OptimizerConfig(lr=1e-6),
                gradient_checkpointing=False,
                archon=ArchonEngineConfig(enable_compile=not self.tiny),
                **options,
            )
            engine = DrawnEngine(section)
            engine.initialize(
                FinetuneSpec(total_train_epochs=1, dataset_size=1000, train_batch_size=1)
            )
            batch = self._batch(num_rows, samples, has_image="vision_config" in config)
            for _ in range(1 if self.tiny else 3):
                step_unseen(engine, batch)
            reset_peak()
            seconds = median_seconds(partial(step_unseen, engine, batch), sizes.repeats)
            peak = peak_bytes()
            engine.destroy()
        del engine
        free_memory()
        return num_rows * length / seconds, peak

    def _batch(self, num_rows: int, samples: int, *, has_image: bool) -> dict[str, Any]:
        """Rows as the trainer has them, on the CPU; samples of a prompt share their pixels."""
        sizes, rows, shown = self.sizes, [], []
        for number in range(num_rows // samples):
            prompt = self.prompt(number, has_image=has_image)
            images = {}
            if has_image:
                patches = self.image(number)
                images = {
                    "pixel_values": torch.from_numpy(patches.pixels),
                    "image_grid_thw": torch.tensor([patches.grid]),
                }
            for sample in range(samples):
                rows.append([*prompt, *self.words([number, sample], sizes.answer)])
                shown.append(images)
        ids = torch.tensor(rows, dtype=torch.int32)
        learned = torch.zeros(ids.shape, dtype=torch.bool)
        learned[:, sizes.prompt - 1 : -1] = True
        advantages = torch.randn(num_rows, 1, generator=torch.Generator().manual_seed(0))
        batch = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(learned),
            "loss_mask": learned,
            "advantages": advantages.expand(ids.shape).contiguous(),
        }
        return {**batch, "multi_modal_input": shown} if has_image else batch


def step_unseen(engine: DrawnEngine, batch: dict[str, Any]) -> None:
    """With tensors of pixels that no step had: a frozen tower looks at one only once."""
    shown = batch.get("multi_modal_input", [])
    new = {id(x): {**x, "pixel_values": x["pixel_values"][:]} for x in shown}
    more = {"multi_modal_input": [new[id(x)] for x in shown]} if shown else {}
    step(engine, {**batch, **more})


@cache
def random_image(side: int, seed: int) -> Patches:
    rgb = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    return cut_patches(rgb, PatchRules(max_pixels=MAX_PIXELS))


def drawn_model(config: dict[str, Any]) -> Decoder:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model = build_model(config, device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_q" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model


def step(engine: ArchonEngine, batch: dict[str, Any]) -> None:
    engine.train_batch(batch, grpo_loss, lambda mb: mb["loss_mask"].sum())


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
