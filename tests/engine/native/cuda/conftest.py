"""Where the kernels run: on the CUDA device if there is one, else in Triton's interpreter.

The interpreter is right in float32 only; bfloat16 joins the dtypes on a device. Its conversions to
FP8 lose the carry of a rounding into the exponent, so torch converts in its place.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch


def _interpret_kernels() -> None:
    # tests/conftest.py does so too, but after this where pytest was given a file of this folder.
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    _skip_repeated_work(interpreter)
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        # Scalars are arrays of shape [1] there, which numpy >= 2.4 no longer turns into an int.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter._convert_float = _convert


def _skip_repeated_work(interpreter) -> None:
    """The interpreter's results are the same, in half of the time."""
    import triton.language as tl

    patch_language = interpreter._patch_lang

    @functools.cache
    def patch_language_once(function):
        # A launch would look for all functions of the language again, and so would each call of one
        # kernel by another, which does not even undo its patches.
        patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_language_once
    # Each sum of integers is computed again in int64, and the assertion left out without `debug`.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)

    numpy_dtype, numpy_dtypes = interpreter._get_np_dtype, {}

    def known_numpy_dtype(dtype):
        if dtype.name not in numpy_dtypes:
            numpy_dtypes[dtype.name] = numpy_dtype(dtype)
        return numpy_dtypes[dtype.name]

    interpreter._get_np_dtype = known_numpy_dtype

    make_block, blocks = tl.block_type.__init__, {}

    def make_known_block(self, element_ty, shape):
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    tl.block_type.__init__ = make_known_block

    make_tensor, shapes = tl.tensor.__init__, {}

    def make_tensor_of_known_shape(self, handle, type):
        if type.name not in shapes:
            make_tensor(self, handle, type)
            shapes[type.name] = {"shape": self.shape, "numel": self.numel, "dtype": self.dtype}
        vars(self).update(shapes[type.name], handle=handle, type=type)

    tl.tensor.__init__ = make_tensor_of_known_shape
    _know_operands(interpreter, tl)
    _call_builtins_at_once(interpreter)


def _know_operands(interpreter, tl) -> None:
    """How two operands are converted and broadcast depends on their types alone, or on the value of
    one that is a plain number, so it is found once. What needs another dtype or more axes is
    converted each time."""
    semantic, known = interpreter.interpreter_semantic, {}
    convert = semantic.binary_op_type_checking_impl

    def key_of(operand):
        return operand.type.name if isinstance(operand, tl.tensor) else (type(operand), operand)

    def change_of(operand, found):
        """operand -> what `convert` made of it, for all of this type; None if only it can."""
        if found is operand:
            return lambda operand: operand
        if not isinstance(operand, tl.tensor):
            return lambda operand: found
        if operand.type.scalar == found.type.scalar and len(operand.shape) == len(found.shape):
            shape, type_, dtype = found.handle.data.shape, found.type, found.handle.dtype
            if operand.type.is_block():
                return lambda operand: tl.tensor(
                    interpreter.TensorHandle(np.broadcast_to(operand.handle.data, shape), dtype),
                    type_,
                )
        return None

    def convert_as_before(lhs, rhs, *options, **more):
        key = key_of(lhs), key_of(rhs), options, *more.items()
        changes = known.get(key)
        if changes is None:
            left, right = convert(lhs, rhs, *options, **more)
            known[key] = change_of(lhs, left), change_of(rhs, right)
            return left, right
        if None in changes:
            return convert(lhs, rhs, *options, **more)
        return changes[0](lhs), changes[1](rhs)

    semantic.binary_op_type_checking_impl = convert_as_before


def _call_builtins_at_once(interpreter) -> None:
    """The interpreter copies the keywords of each call, and each builtin checks what it added."""
    from triton.language import core

    semantic = interpreter.interpreter_semantic
    wrapper = core.builtin(lambda: None).__code__

    def patch_attr(obj, name, member, builder, scope):
        inner = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr


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
