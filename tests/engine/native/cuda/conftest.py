"""Where the kernels run: on the CUDA device if there is one, else in Triton's interpreter.

The interpreter is right in float32 only; bfloat16 joins the dtypes on a device. Its conversions to
FP8 lose the carry of a rounding into the exponent, so torch converts in its place.
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
    interpreter._convert_float = _convert


def _convert(values, from_dtype, to_dtype, rounding):
    source, target = _TORCH_DTYPES[from_dtype.name], _TORCH_DTYPES[to_dtype.name]
    converted = torch.frombuffer(bytearray(values.tobytes()), dtype=source).to(target)
    return converted.view(_BITS[target.itemsize]).numpy().reshape(values.shape)


_TORCH_DTYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


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
