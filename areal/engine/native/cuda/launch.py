"""Overlap of consecutive kernels on the device.

With `OVERLAP` a kernel is launched with `launch_pdl=True` and may start while the previous one
still runs (programmatic dependent launch, Hopper and later). Every such kernel calls `gdc_wait`
before it accesses anything but weights, and only then `gdc_launch_dependents`: so the kernel before
the previous one has always ended, and any kernel but the previous one may write weights. A forward
starts with ordinary launches (embedding), so a weight update always ends first.
"""

from __future__ import annotations

import torch

OVERLAP = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
