"""What CPU engines build on: a row of a product has the same bits among any other rows, and freed
memory serves the next tensor."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from areal.utils.device import use_plain_blas


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 50), (192, 64), (896, 128)])
def test_rows_of_a_product_do_not_depend_on_their_number(num_inputs, num_outputs):
    use_plain_blas()
    torch.manual_seed(0)
    x, weight = torch.randn(512, num_inputs), torch.randn(num_outputs, num_inputs)
    whole = F.linear(x, weight)
    for start, stop in [(0, 16), (3, 19), (16, 64), (100, 340), (0, 496)]:
        assert torch.equal(F.linear(x[start:stop].clone(), weight), whole[start:stop])


PRODUCTS = """
import torch
from areal.utils.device import use_plain_blas

use_plain_blas()
torch.manual_seed(0)
for num_inputs, num_outputs in [(64, 50), (36, 61), (48, 192), (896, 300)]:
    x, weight = torch.randn(512, num_inputs), torch.randn(num_outputs, num_inputs)
    whole = torch.nn.functional.linear(x, weight)
    for count in range(16, 512, 16):  # native/torch_runner.py makes whole tiles of rows
        part = torch.nn.functional.linear(x[:count].clone(), weight)
        assert torch.equal(part, whole[:count]), (num_inputs, num_outputs, count)
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="MKL is x86's")
@pytest.mark.parametrize("instructions", ["AVX512", "AVX2", "SSE4_2"])
def test_so_it_is_with_every_kind_of_x86(instructions):
    """In a process of its own: MKL chooses its kernels at the first product."""
    env = {k: v for k, v in os.environ.items() if k != "MKL_CBWR"}
    env |= {"MKL_ENABLE_INSTRUCTIONS": instructions}
    subprocess.run([sys.executable, "-c", PRODUCTS], env=env, check=True, timeout=900)


FAULTS = """
import resource, torch
from areal.utils.device import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        kept = [torch.ones(500_000) for _ in range(8)]  # 2 MB each
        del kept  # all at once, as after a training step
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
faults()  # the first blocks are new
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no such cost")
def test_freed_memory_serves_the_next_tensors():
    """Else each of the 400 tensors costs a page fault for every 4 KiB, 195,000 in all."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], check=True, timeout=900, capture_output=True, text=True
    )
    assert int(done.stdout) < 20_000
