"""Archon with images: log-probabilities, micro-batches, ranks, a frozen tower, checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine.train.archon_world import (
    loss_fn,
    num_loss_tokens,
    open_engine,
    own_rows,
    train,
    weights_of,
)
from gloo_ranks import run_ranks
from tiny import tiny_config, write_tiny_model
from tiny_vision import END, IMAGE, START, VIDEO, ImageRow, image_row, tiny_vision_config
from tiny_vision import write_tiny_vision_model as write_vision

from areal.api.config.train_engine import MicroBatchSpec, TrainEngineConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.train.fit import check_training
from areal.engine.train.images import read_images
from areal.engine.train.micro_batches import split_micro_batches
from areal.models import decoder_args
from areal.models.hf_io import read_hf_config
from areal.utils.data import pack

CONFIG = tiny_vision_config("qwen2_5_vl")
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5_moe", "gemma3")
CONFIGS = {name: tiny_vision_config(name) for name in FAMILIES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_vision(tmp_path_factory.mktemp("model"), "qwen2_5_vl"))


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory) -> str:
    return str(write_vision(tmp_path_factory.mktemp("model"), "qwen3_vl"))


@pytest.fixture(scope="module")
def hybrid_folder(tmp_path_factory) -> str:
    return str(write_vision(tmp_path_factory.mktemp("model"), "qwen3_5_moe"))


@pytest.fixture(scope="module")
def square_folder(tmp_path_factory) -> str:
    """Of a family whose image tokens see each other."""
    return str(write_vision(tmp_path_factory.mktemp("model"), "gemma3"))


def image_batch(
    family: str = "qwen2_5_vl", *, without_images_at: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Seven rows: no image, one, several; rows 1 and 2 are samples of one prompt."""
    config = CONFIGS[family]
    sizes = [[(4, 6)], [(4, 4)], [(4, 4)], [], [(2, 2), (6, 4)], [], [(2, 6)]]
    rows = [
        image_row(config, [] if number in without_images_at else size, seed=number, text=2 + number)
        for number, size in enumerate(sizes)
    ]
    images = [row.multi_modal_input() for row in rows]
    images[2] = dict(images[1])  # the same tensors
    lengths = torch.tensor([len(row.tokens) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.int32)
    for number, row in enumerate(rows):
        ids[number, : len(row.tokens)] = row.tokens
    learn = ((ids < IMAGE) & mask).roll(-1, 1)
    learn[:, -1] = False
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "loss_mask": learn,
        "multi_modal_input": images,
    }


def their_logprobs(folder: str, batch: dict[str, Any]) -> torch.Tensor:
    """Of transformers, with the image placeholders taken out of the choices."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    out = torch.zeros(batch["input_ids"].shape)
    has_videos = model.config.model_type != "gemma3"
    banned = [IMAGE, START, END, *[VIDEO] * has_videos]
    for number, images in enumerate(batch["multi_modal_input"]):
        tokens = batch["input_ids"][number][batch["attention_mask"][number]].long()
        inputs = {"mm_token_type_ids": (tokens == IMAGE).int()[None], **images} if images else {}
        if images and model.config.model_type == "gemma3":
            row = ImageRow(tokens, images["pixel_values"], images["image_grid_thw"])
            kinds = inputs["mm_token_type_ids"]
            inputs = {"token_type_ids": kinds, "pixel_values": row.pictures(patch_size=4)}
        with torch.no_grad():
            logits = model(input_ids=tokens[None], **inputs).logits[0]
        logits[:, banned] = -torch.inf
        logprobs = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None]).squeeze(1)
        out[number, : len(logprobs)] = logprobs
    return out


@pytest.mark.parametrize("which", ["folder", "other_folder", "hybrid_folder", "square_folder"])
def test_log_probabilities_equal_transformers_and_placeholders_have_none(which, request):
    folder = request.getfixturevalue(which)
    batch = image_batch(read_hf_config(folder)["model_type"])
    engine = open_engine(folder, "archon:d1")
    found = engine.forward_batch(batch)
    expected, learned = their_logprobs(folder, batch), batch["loss_mask"]
    torch.testing.assert_close(found[learned], expected[learned], atol=3e-5, rtol=1e-5)
    is_placeholder = (batch["input_ids"] >= IMAGE).roll(-1, 1)
    is_placeholder[:, -1] = False
    assert (found[is_placeholder] == 0).all() and is_placeholder.any()
    engine.mb_spec = MicroBatchSpec(max_tokens_per_mb=30)
    torch.testing.assert_close(engine.forward_batch(batch)[learned], found[learned])


def test_samples_of_a_prompt_share_one_pass_of_the_tower():
    args = decoder_args(CONFIG)
    batch = image_batch()
    images = read_images(pack(batch, [1, 2, 4]), args, torch.device("cpu"))
    assert [image.grids.tolist() for image in images.shown] == [[[1, 4, 4]], [[1, 2, 2], [1, 6, 4]]]
    assert images.source_I.tolist() == [*range(4), *range(4), *range(4, 11)]
    assert read_images(pack(batch, [3, 5]), args, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("budget", "n_mbs", "expected"),
    [
        (13, 1, [[0, 1], [2, 3]]),  # by length alone 9 + 4 and 8 + 3
        (11, 1, [[0], [1, 3], [2]]),  # too long to stay together
        (13, 4, [[0], [1], [2], [3]]),
    ],
)
def test_rows_that_show_one_image_share_a_micro_batch(budget, n_mbs, expected):
    lengths = torch.tensor([4, 8, 9, 3])
    mask = torch.arange(9) < lengths[:, None]
    images = [{"pixel_values": torch.zeros(4, 1)} for _ in range(2)]
    batch = {
        "input_ids": mask.int(),
        "attention_mask": mask,
        "multi_modal_input": [images[0], images[0], images[1], images[1]],
    }
    spec = MicroBatchSpec(max_tokens_per_mb=budget, n_mbs=n_mbs)
    found = split_micro_batches(batch, spec, torch.device("cpu"))
    assert [mb.rows for mb in found] == expected


def work(engine) -> dict[str, Any]:
    """One step, and one where some rows and whole micro-batches have no image, one without any."""
    found: dict[str, Any] = {"start": weights_of(engine)}
    family = engine.model.args.model_type
    batch = image_batch(family)
    found["eval"] = engine.eval_batch(own_rows(engine, batch), loss_fn, num_loss_tokens).item()
    found["step"] = train(engine, batch)
    found["after"] = weights_of(engine)
    engine.mb_spec = MicroBatchSpec(max_tokens_per_mb=24)
    # With two data parallel ranks the second has no image at all.
    found["cut_step"] = train(engine, no_images_at_1(family))
    blind = image_batch(family, without_images_at=tuple(range(7)))
    text = {**blind, "multi_modal_input": [{}] * 7}
    found["text_step"] = train(engine, text)
    found["end"] = weights_of(engine)
    return found


def no_images_at_1(family: str) -> dict[str, Any]:
    batch = image_batch(family, without_images_at=(1, 2, 3, 5))
    batch["multi_modal_input"][2] = {}
    return batch


def ranks_body(jobs: list[tuple[str, str]], scratch: str) -> None:
    for number, (folder, backend) in enumerate(jobs):
        engine = open_engine(folder, backend)
        found = work(engine)
        engine.save(SaveLoadMeta(path=f"{scratch}/{number}-dcp", weight_format="dcp"))
        engine.save(SaveLoadMeta(path=f"{scratch}/{number}-hf", weight_format="hf"))
        if dist.get_rank() == 0:
            torch.save(found, f"{scratch}/{number}.pt")


def test_two_ranks_train_as_one_and_shard_and_save_the_tower(folder, square_folder, tmp_path):
    check_ranks([(folder, "archon:d2"), (square_folder, "archon:c2")], tmp_path)


@pytest.mark.slow
def test_so_do_two_ranks_of_other_families(other_folder, hybrid_folder, tmp_path):
    check_ranks([(other_folder, "archon:c2"), (hybrid_folder, "archon:d2e2")], tmp_path)


def check_ranks(jobs: list[tuple[str, str]], tmp_path: Path) -> None:
    run_ranks(2, "engine.train.test_archon_vision:ranks_body", jobs, str(tmp_path), timeout_s=900)
    for number, (own, backend) in enumerate(jobs):
        expected, got = work(open_engine(own, "archon:d1")), torch.load(tmp_path / f"{number}.pt")
        ends = ("patch_embed.proj.weight", "patch_embedding.weight")
        (name,) = (name for name in got["start"] if name.endswith(ends))
        assert not torch.allclose(got["start"][name], got["after"][name], atol=1e-4)
        torch.testing.assert_close(
            got, expected, rtol=1e-4, atol=1e-5, msg=lambda m, b=backend: f"{b}: {m}"
        )
        for kind in ("dcp", "hf"):
            engine = open_engine(own, "archon:d1")
            engine.load(SaveLoadMeta(path=str(tmp_path / f"{number}-{kind}"), weight_format=kind))
            for name, tensor in engine.hf_weights():
                assert torch.equal(tensor, got["end"][name]), (backend, kind, name)


def test_a_frozen_tower_stays_and_recomputation_changes_nothing(folder):
    batch = image_batch()
    plain = open_engine(folder, "archon:d1")
    saving = open_engine(folder, "archon:d1", gradient_checkpointing=True)
    frozen = open_engine(folder, "archon:d1", freeze_vision_tower=True)
    start = weights_of(plain)
    for engine in (plain, saving, frozen):
        train(engine, batch)
    ends = [weights_of(engine) for engine in (plain, saving, frozen)]
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)
    for name, tensor in ends[2].items():
        if name.startswith("visual."):
            assert torch.equal(tensor, start[name]), name
        else:
            torch.testing.assert_close(tensor, ends[0][name], rtol=1e-5, atol=1e-6)


def test_a_frozen_tower_looks_once_at_an_image_that_it_is_shown_again(other_folder, tmp_path):
    batch = image_batch("qwen3_vl")
    plain = open_engine(other_folder, "archon:d1")
    frozen = open_engine(other_folder, "archon:d1", freeze_vision_tower=True)
    seen: list[list[int]] = []
    frozen.model.tower.register_forward_pre_hook(
        lambda _, args: seen.extend(args[0].grids.tolist())
    )
    first = frozen.forward_batch(batch)
    torch.testing.assert_close(first, plain.forward_batch(batch))
    assert len(seen) == 5, "rows 1 and 2 share theirs"
    frozen.mb_spec = MicroBatchSpec(max_tokens_per_mb=30)
    torch.testing.assert_close(frozen.forward_batch(batch), first)
    train(frozen, batch)
    assert len(seen) == 5
    # Other pixels, other weights.
    frozen.forward_batch(image_batch("qwen3_vl"))
    assert len(seen) == 10
    train(plain, batch)
    plain.save(SaveLoadMeta(path=str(tmp_path), weight_format="hf"))
    frozen.load(SaveLoadMeta(path=str(tmp_path), weight_format="hf"))
    torch.testing.assert_close(frozen.forward_batch(batch), plain.forward_batch(batch))


@pytest.mark.parametrize(
    ("which", "decoder"), [("folder", "model."), ("square_folder", "language_model.model.")]
)
def test_adapters_are_of_the_decoder_and_peft_reads_them(which, decoder, request, tmp_path):
    folder = request.getfixturevalue(which)
    batch = image_batch(read_hf_config(folder)["model_type"])
    engine = open_engine(folder, "archon:d1", use_lora=True, lora_rank=2)
    train(engine, batch)
    engine.save(SaveLoadMeta(path=str(tmp_path), weight_format="hf"))
    expected = engine.forward_batch(batch)
    other = open_engine(folder, "archon:d1", use_lora=True, lora_rank=2)
    other.load(SaveLoadMeta(path=str(tmp_path), weight_format="hf"))
    torch.testing.assert_close(other.forward_batch(batch), expected)
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForImageTextToText

    base = AutoModelForImageTextToText.from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of adapters that the file lacks
        adapted = peft.PeftModel.from_pretrained(base, str(tmp_path))
    merged = adapted.merge_and_unload().state_dict()
    ours = weights_of(engine)
    name = "layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(ours[f"{decoder}{name}"], merged[f"model.language_model.{name}"])


def changed_rows(change: str) -> dict[str, Any]:
    batch = image_batch()
    row = dict(batch["multi_modal_input"][0])
    if change == "by reference":
        row["image_sha256"] = row.pop("pixel_values")
    elif change == "cut":
        row["pixel_values"] = row["pixel_values"][:-1]
    elif change == "nan":
        row["pixel_values"] = row["pixel_values"].clone().fill_(torch.nan)
    elif change == "grid":
        row["image_grid_thw"] = torch.tensor([[1, 6, 6]])
    else:
        row = {}
    batch["multi_modal_input"][0] = row
    return batch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("by reference", "expected the tensors pixel_values"),
        ("cut", r"expected \[24, 96\]"),
        ("nan", "not finite"),
        ("grid", r"expected \[36, 96\]"),
        ("missing", "pass an image for each placeholder"),
    ],
)
def test_images_that_do_not_fit_are_refused(folder, change, message):
    engine = open_engine(folder, "archon:d1")
    with pytest.raises(ValueError, match=message):
        engine.forward_batch(changed_rows(change))


def test_images_for_a_text_model_are_refused(tmp_path):
    engine = open_engine(str(write_tiny_model(tmp_path, "qwen2")), "archon:d1")
    with pytest.raises(ValueError, match="has no vision tower"):
        engine.forward_batch(image_batch())


@pytest.mark.parametrize(
    ("changes", "hf_config", "message"),
    [
        ({"backend": "archon:t2"}, CONFIG, "over tensor or pipeline"),
        ({"backend": "archon:p2"}, CONFIG, "over tensor or pipeline"),
        ({"enable_tree_training": True}, CONFIG, "trees do not compute images"),
        ({"freeze_vision_tower": True}, tiny_config("qwen3"), "has no vision tower"),
    ],
)
def test_what_is_not_computed_with_images_is_refused_from_the_config(changes, hf_config, message):
    config = TrainEngineConfig(**{"path": "m", "backend": "archon:d1", **changes})
    with pytest.raises(ValueError, match=message):
        check_training(config, hf_config)
