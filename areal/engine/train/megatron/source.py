"""Where the weights of a stage come from: a folder of safetensors, or a seed.

Both give `read(hf_name) -> whole tensor`. Names and shapes of a folder are checked against the
whole model before the first byte is read, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from areal.models.hf_io import (
    SCORE_HEAD,
    build_model,
    check_hf_shapes,
    has_score_head,
    read_shapes,
    weight_files,
)

Read = Callable[[str], torch.Tensor]


def drawn_weights(hf_config: Mapping[str, Any], seed: int, is_critic: bool) -> Read:
    """A function of (config, seed) alone, whatever the layout: those Archon draws."""
    model = build_model(hf_config, device="cpu", dtype=torch.float32, is_critic=is_critic)
    model.init_weights(seed)
    return dict(model.named_hf_tensors()).__getitem__


@contextmanager
def folder_weights(
    hf_config: Mapping[str, Any], path: str | Path, *, is_critic: bool, new_critic: bool
) -> Iterator[Read]:
    """`new_critic`: a score head that the folder does not have is 0."""
    files = weight_files(Path(path))
    model = build_model(hf_config, device="meta", dtype=torch.float32, is_critic=is_critic)
    shapes = read_shapes(files)
    draws_score = new_critic and not has_score_head(path)
    if draws_score:
        shapes[SCORE_HEAD] = (1, model.args.dim)
    check_hf_shapes(model, shapes, source=str(path))
    with ExitStack() as stack:
        places = {}
        for file in files:
            tensors = stack.enter_context(safe_open(file, framework="pt"))
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                places[model.adapter.usual_hf_name(name)] = (tensors, name)

        def read(hf_name: str) -> torch.Tensor:
            if hf_name == SCORE_HEAD and draws_score:
                return torch.zeros(shapes[SCORE_HEAD])
            tensors, name = places[hf_name]
            return tensors.get_tensor(name)

        yield read
