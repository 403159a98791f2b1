"""Compiles the kernels of the CUDA path for an H200, on a machine without one; prints their names.

Launches compile and do not run, so nothing that is computed here means anything.
"""

from __future__ import annotations

import torch
import triton
from tiny import tiny_model
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from areal.engine.native.cuda import device

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_only(kernel: JITFunction, *args, grid, warmup=False, **kwargs) -> None:
    parameters = {parameter.name: parameter for parameter in kernel.params}
    options = {name: kwargs.pop(name) for name in list(kwargs) if name not in parameters}
    values = {**dict(zip(parameters, args, strict=False)), **kwargs}
    constants = {
        name: value
        for name, value in values.items()
        if parameters[name].is_constexpr or value is None
    }
    types = {n: "constexpr" if n in constants else type_of(values[n]) for n in parameters}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    triton.compile(source, target=HOPPER, options=options)
    print(kernel.fn.__name__)


def type_of(value) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return {bool: "i1", int: "i32", float: "fp32"}[type(value)]


def main() -> None:
    device.OVERLAP = True  # before the kernels' modules read it
    JITFunction.run = compile_only
    torch.empty_like = torch.zeros_like  # tokens that no kernel writes are looked up
    from areal.engine.native.cuda.program import DeviceProgram
    from areal.engine.native.runner import Chunk
    from areal.engine.native.scheduler import SlotTable

    for family in ("qwen3", "qwen3_moe"):
        model = tiny_model(family, head_dim=64, hidden_size=128, num_hidden_layers=1).bfloat16()
        program = DeviceProgram(
            model, SlotTable(64, 8), num_pages=32, page_size=16, max_rows=64, batch_invariant=False
        )
        # Blocks of an expert are 16 and 128 rows wide here, and 64 in the step of 64 rows.
        program.prefill([Chunk([1, 2, 3], 0, [1])])
        program.prefill([Chunk([1] * 100, 0, [*range(1, 8)])])
        for num_rows in (4, 64):  # few rows and many have kernels of their own
            slots = torch.zeros(num_rows, dtype=torch.int32)
            program.begin()
            program.step(slots, *program.new_outputs(1, num_rows))


if __name__ == "__main__":
    main()
