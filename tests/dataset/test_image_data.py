"""Geometry3K and CLEVR count from small local samples in the schema of the hub."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from areal.api.config.run import DatasetConfig
from areal.dataset import get_custom_dataset
from areal.dataset.arithmetic import build_char_tokenizer
from areal.reward.clevr_count_70k import clevr_count_70k_reward_fn

DATA = Path(__file__).parents[1] / "data"
SAMPLES = {"geometry3k": DATA / "geometry3k_sample", "clevr_count_70k": DATA / "clevr_count_sample"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_char_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def load(path, loader, tokenizer, *, split="train", max_length=None, processor=None):
    config = DatasetConfig(
        path=str(path), type="rl", dataset_kwargs={"loader": loader}, max_length=max_length
    )
    return get_custom_dataset(split, config, tokenizer, processor)


@pytest.mark.parametrize("loader, num_rows", [("geometry3k", 6), ("clevr_count_70k", 4)])
def test_rows_of_the_sample(loader, num_rows, tokenizer):
    from PIL import Image

    rows = load(SAMPLES[loader], loader, tokenizer)
    assert len(rows) == num_rows
    for row in rows:
        (message,) = row["messages"]
        image, text = message["content"]
        assert message["role"] == "user" and image == {"type": "image"}
        assert text["type"] == "text" and "[" in text["text"] and "<image>" not in text["text"]
        assert isinstance(row["answer"], str)
        (encoded,) = row["images"]
        assert Image.open(io.BytesIO(encoded)).size == (4, 4)


def test_the_loader_is_known_by_the_hubs_name_and_takes_a_processor(tokenizer, tmp_path):
    folder = tmp_path / "clevr_count_70k"
    shutil.copytree(SAMPLES["clevr_count_70k"], folder)
    config = DatasetConfig(path=str(folder), type="rl", max_length=1000)
    rows = get_custom_dataset("train", config, None, SimpleNamespace(tokenizer=tokenizer))
    answers = [row["answer"] for row in rows]
    assert answers == ["3", "5", "4", "10"]
    assert clevr_count_70k_reward_fn("", "I see [5]", [], [], **rows[1]) == 1.0


def test_one_parquet_file_and_other_splits(tokenizer):
    assert len(load(SAMPLES["geometry3k"] / "test.parquet", "geometry3k", tokenizer)) == 4
    assert len(load(SAMPLES["geometry3k"], "geometry3k", tokenizer, split="test")) == 4


def test_long_texts_are_left_out(tokenizer):
    everything = load(SAMPLES["geometry3k"], "geometry3k", tokenizer)
    short = load(SAMPLES["geometry3k"], "geometry3k", tokenizer, max_length=100)
    assert 0 < len(short) < len(everything)
    assert short[0] == everything[0]
    with pytest.raises(ValueError, match="no row in split 'train' with at most 5 tokens"):
        load(SAMPLES["geometry3k"], "geometry3k", tokenizer, max_length=5)


def write(folder, rows):
    datasets = pytest.importorskip("datasets")
    folder.mkdir(exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "train.parquet"))
    return folder


def test_several_images_stand_where_the_problem_puts_them(tokenizer, tmp_path):
    images = [{"bytes": bytes([n]), "path": None} for n in range(2)]
    folder = write(
        tmp_path,
        [
            {"images": images, "problem": "Is <image> larger than <image>?", "answer": "1"},
            {"images": images, "problem": "Compare.", "answer": "1"},
        ],
    )
    placed, first = load(folder, "geometry3k", tokenizer)
    assert placed["images"] == [b"\x00", b"\x01"]
    kinds = [[part["type"] for part in row["messages"][0]["content"]] for row in (placed, first)]
    assert kinds == [["text", "image", "text", "image", "text"], ["image", "image", "text"]]


@pytest.mark.parametrize(
    "images, problem, found",
    [
        ([], "Find x.", "0 images, 0 of them without bytes, for 0 <image>"),
        ([b"a"], "<image> or <image>", "1 images, 0 of them without bytes, for 2 <image>"),
        ([None], "<image>", "1 images, 1 of them without bytes, for 1 <image>"),
    ],
)
def test_images_that_do_not_fit_the_problem(images, problem, found, tokenizer, tmp_path):
    images = [{"bytes": image, "path": "x.png"} for image in images]
    good = {"images": [{"bytes": b"a", "path": "x.png"}], "problem": "Find y.", "answer": "1"}
    folder = write(tmp_path, [good, {"images": images, "problem": problem, "answer": "1"}])
    rows = load(folder, "geometry3k", tokenizer)
    with pytest.raises(ValueError, match=f"row 1 has {found}"):
        rows[1]


def test_wrong_files_are_explained(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match="dataset.path: /no/geometry3k does not exist"):
        load("/no/geometry3k", "geometry3k", tokenizer)
    with pytest.raises(ValueError, match="no split 'valid' in .*found: test.parquet, train"):
        load(SAMPLES["geometry3k"], "geometry3k", tokenizer, split="valid")
    with pytest.raises(RuntimeError, match="'hiyouga/geometry3k' is not a local file or folder"):
        load("geometry3k", "geometry3k", tokenizer)
    with pytest.raises(ValueError, match="is JSON-lines, which holds no images"):
        load(write_jsonl(tmp_path), "geometry3k", tokenizer)
    folder = write(tmp_path / "other", [{"picture": "a", "problem": "b", "answer": "c"}])
    with pytest.raises(ValueError, match="has no column images; found picture, problem, answer"):
        load(folder, "geometry3k", tokenizer)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 but not really")
    with pytest.raises(ValueError, match="broken.parquet: not a Parquet file"):
        load(broken, "geometry3k", tokenizer)


def write_jsonl(folder):
    file = folder / "rows.jsonl"
    file.write_text('{"images": [], "problem": "p", "answer": "1"}\n')
    return file


class OneTokenPerByte:
    """The interface of a processor: an image has as many tokens as bytes, in place of `@`."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def cut(self, data):
        return np.full((len(data), 6), float(len(data)), np.float32), (1, 1, len(data))

    def expand(self, ids, grids):
        return [7] * sum(width for _, _, width in grids) + list(ids)


@pytest.mark.parametrize("loader", ["geometry3k", "clevr_count_70k"])
def test_supervised_rows_carry_pixels_and_learn_the_answer(loader, tokenizer):
    config = DatasetConfig(path=str(SAMPLES[loader]), type="sft", dataset_kwargs={"loader": loader})
    processor = OneTokenPerByte(tokenizer)
    rows = get_custom_dataset("train", config, tokenizer, processor)
    asked = load(SAMPLES[loader], loader, tokenizer)
    assert len(rows) == len(asked)
    row, question = rows[1], asked[1]
    (image,) = question["images"]
    assert row["multi_modal_input"]["pixel_values"].shape == (len(image), 6)
    assert row["multi_modal_input"]["image_grid_thw"].tolist() == [[1, 1, len(image)]]
    assert row["input_ids"][: len(image)] == [7] * len(image)
    learned = [t for t, kept in zip(row["input_ids"], row["loss_mask"], strict=True) if kept]
    assert learned[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(learned[:-1]) == f"[{question['answer']}]"
    with pytest.raises(ValueError, match="the model of this config reads text only"):
        get_custom_dataset("train", config, tokenizer)


@pytest.fixture
def virl39k(tmp_path):
    """The layout of the hub: a table whose rows name files, beside the unpacked archive."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "virl39k"
    (folder / "images").mkdir(parents=True)
    for number in range(2):
        (folder / "images" / f"{number}.png").write_bytes(bytes([number]))
    (tmp_path / "secret").write_bytes(b"not ours")
    images = [["images/0.png", "images/1.png"], ["images/1.png"], ["images/none.png"]]
    images += [["../secret"], [str(tmp_path / "secret")], ["images/\0.png"]]
    rows = [
        {"image": names, "question": f"Question {i}?", "answer": rf"\boxed{{{i}}}", "qid": i}
        for i, names in enumerate(images)
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "39Krelease.parquet"))
    return folder


def virl39k_rows(folder, tokenizer):
    """By question: which of them are held out is up to a hash."""
    rows = [*range(6)]
    for split in ("train", "test"):
        config = DatasetConfig(path=str(folder), type="rl", split=split)
        try:
            found = get_custom_dataset(split, config, tokenizer)
        except ValueError as error:
            assert "no row in split" in str(error)
            continue
        for place in range(len(found)):
            number = found._numbers[place]
            rows[number] = (found, place)
    return rows


def test_virl39k_reads_the_files_that_its_rows_name(virl39k, tokenizer):
    rows, place = virl39k_rows(virl39k, tokenizer)[0]
    row = rows[place]
    assert row["images"] == [b"\x00", b"\x01"] and row["answer"] == r"\boxed{0}"
    kinds = [part["type"] for part in row["messages"][0]["content"]]
    assert kinds == ["image", "image", "text"]


@pytest.mark.parametrize(
    "number, found",
    [(2, "No such file.*unpack"), (3, "outside of it"), (4, "outside of it"), (5, "null")],
)
def test_virl39k_refuses_other_files(virl39k, tokenizer, number, found):
    rows, place = virl39k_rows(virl39k, tokenizer)[number]
    with pytest.raises(ValueError, match=found):
        rows[place]


def test_virl39k_without_its_table_is_explained(tokenizer, tmp_path):
    config = DatasetConfig(path=str(tmp_path), type="rl", dataset_kwargs={"loader": "virl39k"})
    with pytest.raises(FileNotFoundError, match=r"39Krelease.parquet does not exist; expected a f"):
        get_custom_dataset("train", config, tokenizer)
