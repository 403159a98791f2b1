"""The parts of a native engine that can be offloaded: `weights` and `kv_cache`."""

from __future__ import annotations

from collections.abc import Iterable

DEVICE_PARTS = frozenset({"weights", "kv_cache"})


def device_parts(tags: Iterable[str] | None) -> frozenset[str]:
    """The parts named by `tags`; None is all."""
    wanted = frozenset(DEVICE_PARTS if tags is None else tags)
    if unknown := wanted - DEVICE_PARTS:
        known = ", ".join(sorted(DEVICE_PARTS))
        raise ValueError(f"tags: expected some of {known}, got {min(unknown)!r}")
    return wanted


def parts_that_leave(tags: Iterable[str] | None) -> frozenset[str]:
    """Offloading weights implies the cache: CUDA graphs hold both."""
    return device_parts(tags) | {"kv_cache"}
