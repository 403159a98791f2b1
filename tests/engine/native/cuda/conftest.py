"""Where the kernels run: on the CUDA device if there is one, else in Triton's interpreter.

The interpreter is right in float32 only; bfloat16 joins the dtypes on a device.
"""

from __future__ import annotations

import pytest
import torch


def _interpret_kernels() -> None:
    # tests/conftest.py has set TRITON_INTERPRET.
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        # Scalars are arrays of shape [1] there, which numpy >= 2.4 no longer turns into an int.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index


if not torch.cuda.is_available():
    _interpret_kernels()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


_DTYPES = [torch.float32] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.fixture(params=_DTYPES, ids=lambda dtype: str(dtype).split(".")[1])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each dtype that the kernels compute rightly here."""
    return request.param
