"""The table of model families in docs/training_backends.md is what `areal check` accepts."""

from __future__ import annotations

import re
from pathlib import Path

from tiny import tiny_config
from tiny_vision import tiny_vision_config

from areal.api.config.inference import InferenceEngineConfig
from areal.api.config.inference_servers import NativeServerConfig
from areal.api.config.train_engine import TrainEngineConfig
from areal.engine.train import fit
from areal.models import known_model_types, vision_args

PAGE = Path(__file__).parents[1] / "docs" / "training_backends.md"
ROW = re.compile(r"^\| `(\w+)` +\|([yes |]+)\|$", re.MULTILINE)
COLUMNS = ("archon", "fsdp", "megatron", "native", "LoRA", "images")


def test_the_page_says_which_families_there_are_and_what_takes_them():
    table = {
        family: dict(
            zip(COLUMNS, [cell.strip() == "yes" for cell in cells.split("|")], strict=True)
        )
        for family, cells in ROW.findall(PAGE.read_text())
    }
    assert sorted(table) == known_model_types()
    assert {family: accepted(family) for family in table} == table


def accepted(family: str) -> dict[str, bool]:
    has_tower = family.endswith("_vl") or family in ("qwen3_5", "qwen3_5_moe", "gemma3")
    config = tiny_vision_config(family) if has_tower else tiny_config(family)
    trained = {name: trains(config, name) for name in ("archon", "fsdp", "megatron")}
    adapted = [trains(config, name, use_lora=True) for name in ("archon", "fsdp") if trained[name]]
    native = InferenceEngineConfig(backend="native:d1"), NativeServerConfig()
    return {
        **trained,
        "native": holds(fit.check_generation, *native, config),
        "LoRA": all(adapted),
        "images": vision_args(config) is not None,
    }


def trains(config, backend: str, *, use_lora: bool = False) -> bool:
    section = TrainEngineConfig(path="model", backend=f"{backend}:d1", use_lora=use_lora)
    return holds(fit.check_training, section, config)


def holds(check, *arguments) -> bool:
    try:
        check(*arguments)
    except ValueError:
        return False
    return True
