"""Compiles the kernels of the CUDA path for an H200, on a machine without one.

    python compile_for_hopper.py MODEL ...        # names in MODELS
    python compile_for_hopper.py fp8_training     # the kernels of training in FP8

Prints `model kernel shared_bytes` per specialization. Launches compile and do not run, so nothing
that is computed here means anything.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import triton
from tiny import tiny_model
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from areal.engine.native.adapters import Adapter, AdapterBank, read_adapter
from areal.engine.native.cuda import device
from areal.models.common.args import DeltaArgs
from areal.models.common.decoder import Decoder
from areal.models.common.delta_rule import DeltaInputs

compiled: set[tuple[str, ...]] = set()
compiling: list[str] = []  # names of models, the current one last
HOPPER = GPUTarget("cuda", 90, 32)
_GEMMA = {"sliding_window": 32, "sliding_window_pattern": 2, "num_hidden_layers": 2}
_DEEPSEEK = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 0,
}
MODELS = {  # family, overrides of its tiny config
    "qwen3": ("qwen3", {"head_dim": 64}),
    "adapters": ("qwen3", {"head_dim": 64}),
    "fp8": ("qwen3", {"head_dim": 128}),
    "fp8_of_16": ("qwen3", {"head_dim": 16}),
    # The shape of gemma-3-1b, and the softcap that its family may have.
    "gemma3": (
        "gemma3_text",
        _GEMMA
        | {"head_dim": 256, "hidden_size": 1152, "intermediate_size": 6912}
        | {"num_attention_heads": 4, "num_key_value_heads": 1, "final_logit_softcapping": 30.0},
    ),
    # Blocks of an expert are from 16 to 128 rows wide here.
    "experts": ("qwen3_moe", {"head_dim": 64}),
    # Padded to 128, without a window and with one.
    "heads_of_80": ("llama", {"head_dim": 80}),
    "heads_of_96": ("gemma3_text", _GEMMA | {"head_dim": 96, "num_hidden_layers": 1}),
    # Heads as Qwen3.5 has them, also for training, and a gated shared feed-forward.
    "hybrid": (
        "qwen3_5_moe_text",
        {"num_hidden_layers": 2, "head_dim": 256, "partial_rotary_factor": 0.25}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    ),
    # The heads of DeepSeek-V2-Lite; those that a rank of four has of DeepSeek-V2, whose experts
    # are in groups; a latent vector that is padded, of several tiles of heads.
    "latent": ("deepseek_v2", _DEEPSEEK | {"num_attention_heads": 16, "num_key_value_heads": 16}),
    "latent_of_32_heads": (
        "deepseek_v2",
        _DEEPSEEK
        | {"num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": 1536}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "latent_of_40": (
        "deepseek_v2",
        {"kv_lora_rank": 40, "qk_rope_head_dim": 8, "first_k_dense_replace": 0}
        | {"num_attention_heads": 36, "num_key_value_heads": 36},
    ),
}
ATTENTION = ("decode_attention", "prefill_attention", "prompt_attention")
LATENT = ("latent_attention", "routing")
# The files of kernels that are compiled, where not all: other models have the others.
FILES = {
    "hybrid": ("delta_chunk_kernels", "delta_conv_kernels", "hybrid_kernels"),
    "adapters": ("adapter_linear",),
    "fp8": ATTENTION,
    "fp8_of_16": ATTENTION,
    "latent": LATENT,
    "latent_of_32_heads": LATENT,
    "latent_of_40": LATENT,
}
# Narrow products, experts, and products of a published width; of others few rows and many will do.
EVERY_NUMBER_OF_ROWS = ("qwen3", "experts", "gemma3")
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def compile_only(kernel: JITFunction, *args, grid, warmup=False, **kwargs) -> None:
    file = kernel.fn.__module__.rpartition(".")[2]
    if file not in FILES.get(compiling[-1], [file]):
        return
    parameters = {parameter.name: parameter for parameter in kernel.params}
    options = {name: kwargs.pop(name) for name in list(kwargs) if name not in parameters}
    values = {**dict(zip(parameters, args, strict=False)), **kwargs}
    constants = {
        name: value
        for name, value in values.items()
        if parameters[name].is_constexpr or value is None
    }
    types = {n: "constexpr" if n in constants else type_of(values[n]) for n in parameters}
    # Loads are pipelined only where addresses are known to be aligned.
    aligned = {
        (parameter.num,): [["tt.divisibility", 16]]
        for name, parameter in parameters.items()
        if name not in constants and is_aligned(values[name], parameter)
    }
    key = (compiling[-1], kernel.fn.__name__, *map(str, (types, constants, aligned, options)))
    if key in compiled:
        return
    compiled.add(key)
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    metadata = triton.compile(source, target=HOPPER, options=options).metadata
    print(*key[:2], metadata.shared)


def is_aligned(value, parameter) -> bool:
    if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
        return False
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def type_of(value) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return {bool: "i1", int: "i32", float: "fp32"}[type(value)]


def no_product(x: torch.Tensor, weight: torch.Tensor, bias=None) -> torch.Tensor:
    """Of the shape of a linear layer's output: bfloat16 takes minutes on a CPU without it."""
    return x.new_zeros(*x.shape[:-1], len(weight))


def compile_training(sizes: DeltaArgs) -> None:
    from areal.models.common.delta_kernels import Chunks, recur_by_kernels

    num_tokens, heads, width = 70, sizes.num_value_heads, sum(sizes.widths)

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    decay = new(num_tokens, heads, dtype=torch.float32)
    inputs = DeltaInputs(new(num_tokens, width), decay, new(num_tokens, heads), new(width, 4))
    chunks = Chunks.of(torch.tensor([num_tokens]), torch.device("cpu"))
    out = recur_by_kernels(inputs, sizes, torch.arange(num_tokens), chunks)
    out.backward(torch.zeros_like(out))


def main() -> None:
    device.OVERLAP = True  # before the kernels' modules read it
    JITFunction.run = compile_only
    torch.empty_like = torch.zeros_like  # tokens that no kernel writes are looked up
    torch.nn.functional.linear = no_product
    from areal.engine.native.cuda.program import DeviceProgram
    from areal.engine.native.runner import Chunk
    from areal.engine.native.scheduler import SlotTable

    for name in sys.argv[1:]:
        compiling.append(name)
        if name == "fp8_training":
            compile_fp8_training()
            continue
        family, overrides = MODELS[name]
        shape = {"hidden_size": 128, "num_hidden_layers": 1} | overrides
        model = tiny_model(family, **shape).bfloat16()
        if name.startswith("fp8"):
            model.store_in_fp8()
        num_states = None
        if model.args.delta is not None:
            num_states = 8
            compile_training(model.args.delta)
        bank = AdapterBank(model)
        if name == "adapters":
            bank.add("one", some_adapter(model))
        program = DeviceProgram(
            model,
            SlotTable(96, 8),
            bank,
            num_pages=32,
            page_size=16,
            max_rows=96,
            batch_invariant=False,
            num_states=num_states,
        )
        for num_tokens in (3, 100):  # tiles of few rows and of many
            program.prefill([Chunk([1] * num_tokens, 0, list(range(1, 8)))])
        if name == "gemma3":  # with an image, whose tokens see all of it
            last = np.full(20, 19)
            program.prefill([Chunk([1] * 20, 0, list(range(1, 8)), last_visible=last)])
        # Few rows and many have kernels of their own; further numbers have other tiles and splits.
        for num_rows in (1, 4, 64, 96) if name in EVERY_NUMBER_OF_ROWS else (1, 64):
            slots = torch.zeros(num_rows, dtype=torch.int32)
            program.begin()
            reads_together = num_rows == 64 and model.args.latent is None
            shared = program.new_shared(num_rows) if reads_together else None
            program.step(slots, *program.new_outputs(1, num_rows), shared, adapted=False)
            if bank.names:
                program.adapters.sync()
                program.step(slots, *program.new_outputs(1, num_rows), shared, adapted=True)


def some_adapter(model: Decoder) -> Adapter:
    rank, tensors = 128, []
    for layer in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj"):
        num_outputs, dim = model.hf_shapes()[f"{layer}.weight"]
        tensors += [
            (f"{layer}.lora_A.weight", torch.zeros(rank, dim)),
            (f"{layer}.lora_B.weight", torch.zeros(num_outputs, rank)),
        ]
    return read_adapter(model, tensors, alpha=1.0)


def compile_fp8_training() -> None:
    from areal.models.common import fp8_training_kernels as kernels

    x = torch.zeros(256, 512, dtype=torch.bfloat16)
    kernels.transpose(*kernels.quantize(x), torch.zeros(()))
    kernels.quantize_gated(x)
    kernels.quantize_gate_grads(x[:, :256].contiguous(), x)
    for transposed in (False, True):
        q, scale = torch.zeros_like(x, dtype=torch.float8_e4m3fn), torch.zeros(4, 4)
        kernels.quantize_weights([x, x], torch.cat([q, q]), scale, transposed=transposed)


if __name__ == "__main__":
    main()
