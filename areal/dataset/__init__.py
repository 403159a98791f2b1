"""Data sets: `get_custom_dataset` turns a config section into a list of rows.

A row for RL is {"messages": chat, "answer": str, ...}, passed to the reward function as keywords;
a supervised row is {"input_ids", "loss_mask"}, and with images "multi_modal_input"; a row for
reward models and DPO is {"chosen_ids", "rejected_ids", "prompt_len"}, two texts that share their
first `prompt_len` tokens.

A loader is `get_<name>_<type>_dataset(path, split, tokenizer, max_length=None, **dataset_kwargs)`
and returns a list of rows or a Hugging Face data set. Order of choice: the column loader if the
section names columns (`prompt`, `answer`), `dataset_kwargs.loader` (a name or an import path), the
last part of `path` (`openai/gsm8k`, `openai/gsm8k@v1` and `/data/gsm8k` are all gsm8k), `path`
itself as an import path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from areal.utils import import_path

if TYPE_CHECKING:
    from areal.api.config.run import DatasetConfig

COLUMN_LOADERS = {
    "rl": "areal.dataset.source_files.load_rl",
    "sft": "areal.dataset.source_files.load_sft",
}
LOADERS = {
    ("arithmetic", "dpo"): "areal.dataset.arithmetic.get_arithmetic_rw_dataset",
    ("arithmetic", "rl"): "areal.dataset.arithmetic.get_arithmetic_rl_dataset",
    ("arithmetic", "rw"): "areal.dataset.arithmetic.get_arithmetic_rw_dataset",
    ("arithmetic", "sft"): "areal.dataset.arithmetic.get_arithmetic_sft_dataset",
    ("chats", "dpo"): "areal.dataset.chats.get_chats_dpo_dataset",
    ("chats", "rw"): "areal.dataset.chats.get_chats_rw_dataset",
    ("chats", "sft"): "areal.dataset.chats.get_chats_sft_dataset",
    ("clevr_count_70k", "rl"): "areal.dataset.clevr_count_70k.get_clevr_count_70k_rl_dataset",
    ("clevr_count_70k", "sft"): "areal.dataset.clevr_count_70k.get_clevr_count_70k_sft_dataset",
    ("countdown", "rl"): "areal.dataset.countdown.get_countdown_rl_dataset",
    ("countdown", "sft"): "areal.dataset.countdown.get_countdown_sft_dataset",
    ("Countdown-Tasks-3to4", "rl"): "areal.dataset.countdown.get_countdown_rl_dataset",
    ("geometry3k", "rl"): "areal.dataset.geometry3k.get_geometry3k_rl_dataset",
    ("geometry3k", "sft"): "areal.dataset.geometry3k.get_geometry3k_sft_dataset",
    ("gsm8k", "rl"): "areal.dataset.gsm8k.get_gsm8k_rl_dataset",
    ("gsm8k", "sft"): "areal.dataset.gsm8k.get_gsm8k_sft_dataset",
    ("hh-rlhf", "dpo"): "areal.dataset.hhrlhf.get_hhrlhf_dpo_dataset",
    ("hh-rlhf", "rw"): "areal.dataset.hhrlhf.get_hhrlhf_rw_dataset",
    ("humaneval", "rl"): "areal.dataset.humaneval.get_humaneval_rl_dataset",
    ("openai_humaneval", "rl"): "areal.dataset.humaneval.get_humaneval_rl_dataset",
    ("math500", "rl"): "areal.dataset.math500.get_math500_rl_dataset",
    ("MATH-500", "rl"): "areal.dataset.math500.get_math500_rl_dataset",
    ("seeds", "rl"): "areal.dataset.seeds.get_seeds_rl_dataset",
    ("torl_data", "rl"): "areal.dataset.torl_data.get_torl_data_rl_dataset",
    ("virl39k", "rl"): "areal.dataset.virl39k.get_virl39k_rl_dataset",
    ("virl39k", "sft"): "areal.dataset.virl39k.get_virl39k_sft_dataset",
    ("ViRL39K", "rl"): "areal.dataset.virl39k.get_virl39k_rl_dataset",
    ("ViRL39K", "sft"): "areal.dataset.virl39k.get_virl39k_sft_dataset",
}
VALID_DATASETS = sorted({name for name, _ in LOADERS})
# Rows with images, which need a workflow that can render them.
IMAGE_DATASETS = frozenset({"clevr_count_70k", "geometry3k", "virl39k", "ViRL39K"})


def get_custom_dataset(
    split: str | None, dataset_config: DatasetConfig, tokenizer: Any, processor: Any = None
) -> Sequence[dict[str, Any]]:
    """The rows of `split` (default: the config's). Loaders with such an argument get `processor`,
    which knows how the model sees images."""
    kwargs = dict(dataset_config.dataset_kwargs)
    if dataset_config.prompt is not None:
        load = _column_loader(dataset_config)
        kwargs |= dataset_config.columns
    else:
        load = _find_loader(kwargs.pop("loader", None), dataset_config.path, dataset_config.type)
    signature = inspect.signature(load)
    if processor is not None and "processor" in signature.parameters:
        kwargs["processor"] = processor
    split = split or dataset_config.split
    kwargs |= {"split": split, "tokenizer": tokenizer, "max_length": dataset_config.max_length}
    try:
        signature.bind(dataset_config.path, **kwargs)
    except TypeError as error:
        raise ValueError(f"dataset_kwargs do not fit {load.__qualname__}: {error}") from error
    rows = load(dataset_config.path, **kwargs)
    if len(rows) == 0:
        raise ValueError(
            f"data set {dataset_config.path!r} has no row in split {split!r}"
            f"{_length_hint(dataset_config.max_length)}"
        )
    return rows


def _column_loader(config: DatasetConfig) -> Callable[..., Any]:
    if config.type not in COLUMN_LOADERS:
        raise ValueError(
            f"dataset.prompt: columns make rows of type {' and '.join(COLUMN_LOADERS)}, got "
            f"{config.type!r}; name a loader in dataset_kwargs.loader"
        )
    if config.type == "sft" and config.answer is None:
        raise ValueError("dataset.answer must name the column with the text that is learned")
    return import_path.load(COLUMN_LOADERS[config.type], key="dataset.type")


def loader_name(path: str) -> str:
    """The loader name in `path`: its last part, without a hub's `@revision`."""
    return path.rstrip("/").rpartition("/")[2].partition("@")[0]


def _find_loader(loader: str | None, path: str, row_type: str | None) -> Callable[..., Any]:
    name = loader or loader_name(path)
    table = {known: where for (known, kind), where in LOADERS.items() if kind == row_type}
    if name in table:
        return import_path.load(table[name], key="dataset.path")
    if name in {known for known, _ in LOADERS}:
        kinds = sorted(kind for known, kind in LOADERS if known == name)
        raise ValueError(f"dataset.type: {name} has types {', '.join(kinds)}, got {row_type!r}")
    if loader is None and ("/" in path or "." not in path):
        raise ValueError(
            f"dataset.path: no loader is known for {path!r}; name one in dataset_kwargs.loader "
            f"({', '.join(sorted(table))}, or an import path), give the path of a loader, or name "
            "the columns of a file (prompt: ..., answer: ...)"
        )
    return import_path.load_named(name, table, key="dataset.path")


def _length_hint(max_length: int | None) -> str:
    return "" if max_length is None else f" with at most {max_length} tokens; raise max_length"
