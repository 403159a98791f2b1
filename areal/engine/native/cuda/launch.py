"""How kernels follow each other on the device.

With `OVERLAP` a kernel is launched with `launch_pdl=True` and may start while the one before it
still runs (programmatic dependent launch, Hopper and later). Every such kernel calls `gdc_wait`
before it touches anything but weights, and only then `gdc_launch_dependents`: so what ran two
kernels ago has always ended, and weights may be written by any kernel but the one right before.
A forward starts with kernels launched the ordinary way (embedding), so an update always ends first.
"""

from __future__ import annotations

import torch

OVERLAP = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
