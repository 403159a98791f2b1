"""Questions about one group's trajectory (a dict of tensors, see `api/io_struct.py`); its bytes.

In: what a workflow returned, after the samples of a prompt are concatenated. Out: a check that it
is a trajectory at all, the span of weight versions that wrote it, its mean reward, and its stored
form (safetensors: data only, no code, so a run database from elsewhere is safe to read).
"""

from __future__ import annotations

from typing import Any

import safetensors.numpy
import safetensors.torch
import torch

REQUIRED_KEYS = ("input_ids", "attention_mask")


def check_trajectory(trajectory: Any) -> None:
    """Raises TypeError or ValueError when a workflow returned something that cannot be trained on.

    Every value is a tensor with one row per sample, and 2-D values are as wide as `input_ids`.
    """
    if not isinstance(trajectory, dict) or not trajectory:
        raise TypeError(
            f"a workflow must return a non-empty dict of tensors or None, got {trajectory!r:.200}"
        )
    missing = [key for key in REQUIRED_KEYS if key not in trajectory]
    if missing:
        raise ValueError(f"a trajectory needs {missing}, got only {sorted(trajectory)}")
    for key, value in trajectory.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"trajectory[{key!r}] must be a tensor, got {type(value).__name__}")
    shape = trajectory["input_ids"].shape
    if len(shape) != 2:
        raise ValueError(f"trajectory['input_ids'] must be [B, S], got {tuple(shape)}")
    for key, value in trajectory.items():
        if value.dim() == 0 or value.shape[: min(value.dim(), 2)] != shape[: value.dim()]:
            raise ValueError(
                f"trajectory[{key!r}] must begin with [B, S] = {tuple(shape)} or be [B], "
                f"got {tuple(value.shape)}"
            )


def version_span(trajectory: dict[str, torch.Tensor]) -> tuple[int, int] | None:
    """Oldest and newest weight version among the generated tokens; None when it is not recorded."""
    if "versions" not in trajectory:
        return None
    versions = trajectory["versions"].numpy(force=True)
    # Prompt tokens carry -1. Padding carries 0, which is a version too: the mask tells them apart.
    real = trajectory["attention_mask"].numpy(force=True).astype(bool)
    generated = versions[real & (versions >= 0)]
    if generated.size == 0:
        return None
    return int(generated.min()), int(generated.max())


def mean_reward(trajectory: dict[str, torch.Tensor]) -> float | None:
    rewards = trajectory.get("rewards")
    return None if rewards is None else float(rewards.float().mean())


def encode(trajectory: dict[str, torch.Tensor]) -> bytes:
    """The safetensors bytes. Runs for every group, so it takes the library's quicker way."""
    if any(tensor.dtype == torch.bfloat16 for tensor in trajectory.values()):
        tensors = {key: value.detach().cpu().contiguous() for key, value in trajectory.items()}
        return safetensors.torch.save(tensors)  # numpy knows no bfloat16; a third of the speed
    return safetensors.numpy.save(
        {key: value.contiguous().numpy(force=True) for key, value in trajectory.items()}
    )


def decode(data: bytes) -> dict[str, torch.Tensor]:
    """Keys come back sorted: the library reads them in no fixed order."""
    return dict(sorted(safetensors.torch.load(data).items()))
