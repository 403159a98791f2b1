"""A Hugging Face causal LM or scorer that takes packed tokens and says something of each.

    model = build_model(folder, dtype=torch.float32, is_critic=False)     # on the meta device
    logprobs_T, entropy_T = model(tokens_T, positions_T, attend, labels_T)
    (values_T,) = critic(tokens_T, positions_T, attend)

The LM head runs inside `forward`, in chunks, so that logits of the whole micro-batch never exist
and the head's weight is whole there when it is sharded outside. `check_model` compares the result
with the model's own forward pass, sequence by sequence: a model for which this is wrong (its layers
mix tokens other than by attention, its logits are more than a product) is refused.

Shape legend: T packed tokens, D model dim, V vocabulary.

How a model is spread over ranks: the mesh, FSDP2 by block, recomputation, empty memory.

FSDP keeps each rank's part of the float32 weights; a block is gathered in the compute dtype when
it runs, forward and backward, and its gradients are summed over ranks in float32. One rank without
offload needs none of it and stays a plain module.

Packed attention for Hugging Face models, registered with transformers under a name of its own.

    hf = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION)
    attend = PackedAttention(cu_seqlens, max_seqlen)
    hf(input_ids=tokens_T[None], position_ids=attend.positions_T[None], attend=attend)

A model made with this name asks for no mask and calls `packed_attention` in every layer; the
keyword `attend` travels through transformers' keyword arguments and knows where sequences begin, so
that none sees another. What a layer asks for and `attend` does not compute is refused, not ignored.

Shape legend: T packed tokens, N query heads, K key-value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from areal.engine.train.fsdp.weights import fill_buffers, with_partial_gradient
from areal.engine.train.logprobs import VocabPart, next_token_logprobs
from areal.engine.train.process_group import join_alone
from areal.models.common.attention import Attend, PackedAttention
from areal.models.hf_io import read_hf_config
from areal.models.parallel_dims import ParallelDims, ParallelMesh

_SOFTCAP = "final_logit_softcapping"  # of a config.json: logits become cap * tanh(logits / cap)


class PackedModel(nn.Module):
    def __init__(self, hf: PreTrainedModel, is_critic: bool) -> None:
        super().__init__()
        self.hf = hf
        self.is_critic = is_critic

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend,
        labels_T: torch.Tensor | None = None,
        *,
        temperature: float = 1.0,
        chunk_size: int = 1024,
    ) -> tuple[torch.Tensor, ...]:
        """log p(labels) and entropy `[T]`, or a critic's values `[T]`; float32.

        A language model without labels gives the logits `[T, V]` that its own forward makes.
        """
        inputs = {
            "input_ids": tokens_T[None],
            "position_ids": positions_T[None],
            "use_cache": False,
            "attend": attend,
        }
        if not self.is_critic and labels_T is None:
            return (self.hf(**inputs).logits[0].float(),)
        hidden_TD = self.hf.base_model(**inputs).last_hidden_state[0]
        if labels_T is None or self.is_critic:
            return (self.score_head(hidden_TD).float().squeeze(-1),)
        weight, part = self.head_weight, None
        if isinstance(weight, DTensor):
            tp, weight = weight.device_mesh, weight.to_local()
            part = VocabPart(len(weight) * tp.get_local_rank(), tp.get_group())
            hidden_TD = with_partial_gradient(hidden_TD, tp)
        return next_token_logprobs(
            hidden_TD,
            weight,
            labels_T,
            temperature=temperature,
            logit_softcap=getattr(self.hf.config.get_text_config(), _SOFTCAP, None),
            chunk_size=chunk_size,
            part=part,
        )

    @property
    def score_head(self) -> nn.Linear:
        """Of a critic."""
        return cast(nn.Linear, self.hf.score)  # `_refuse_unfit` has looked

    @property
    def head_weight(self) -> torch.Tensor:
        """The LM head [V, D], of a language model."""
        head = cast(nn.Linear | TiedHead, self.hf.get_output_embeddings())
        return head.weight

    def blocks(self) -> list[nn.Module]:
        """The transformer blocks: what is sharded and recomputed as one."""
        names = set(self.hf._no_split_modules or ())
        found = [m for m in self.hf.base_model.modules() if type(m).__name__ in names]
        if not found:
            raise ValueError(
                f"{type(self.hf).__name__} does not name its blocks (_no_split_modules), so it "
                "cannot be sharded or recomputed by block: use another model"
            )
        return found


class TiedHead(nn.Module):
    """An LM head whose weight is the embedding's and nobody else's.

    The weight has one owner then, whatever shards, moves or saves the parameters of the model.
    """

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self._embedding = [embedding]  # in a list: no submodule

    @property
    def weight(self) -> torch.Tensor:
        return cast(torch.Tensor, self._embedding[0].weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if not isinstance(weight, DTensor):
            return F.linear(hidden, weight)
        everywhere = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
        return cast(DTensor, F.linear(everywhere, weight)).full_tensor()


def build_model(path: str | Path, *, dtype: torch.dtype, is_critic: bool) -> PackedModel:
    """The model of a folder on the meta device: weights are still to come."""
    read_hf_config(path)  # says what is wrong with a folder that is none
    config = _read_config(path)
    family = AutoModelForSequenceClassification if is_critic else AutoModelForCausalLM
    if is_critic:
        config.num_labels = 1
    with torch.device("meta"):
        hf = family.from_config(config, dtype=dtype, attn_implementation="eager")
    _refuse_unfit(hf, is_critic)
    hf.set_attn_implementation(PACKED_ATTENTION)
    embedding = hf.get_input_embeddings()
    if not is_critic and hf.get_output_embeddings().weight is embedding.weight:
        hf.set_output_embeddings(TiedHead(embedding))
    for module in hf.modules():
        if isinstance(module, nn.Embedding):
            # Packed rows hold no padding: a pad token in them (often the EOS) is learned like all.
            module.padding_idx = None
    # Dropout would make log-probabilities differ from those the tokens were sampled with.
    return PackedModel(hf.eval(), is_critic)


def _read_config(path: str | Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{path}: this model brings code of its own, which areal does not run; use one that "
            "transformers has itself"
        ) from None


def _refuse_unfit(hf: PreTrainedModel, is_critic: bool) -> None:
    name = type(hf).__name__
    if not hf._supports_attention_backend:
        raise ValueError(
            f"{name} has attention of its own, which lets packed sequences see each other: use "
            "another model"
        )
    if is_critic and not isinstance(getattr(hf, "score", None), nn.Linear):
        raise ValueError(f"{name} has no linear `score`, which a critic needs: use another model")
    if not is_critic and hf.get_output_embeddings() is None:
        raise ValueError(f"{name} has no LM head: use another model")


@torch.no_grad()
def check_model(model: PackedModel, device: torch.device) -> None:
    """Packed sequences do not see each other and give what the model itself gives for each, or
    ValueError."""
    embedding = cast(nn.Embedding, model.hf.get_input_embeddings())
    vocab_size = embedding.num_embeddings
    sequences = [torch.arange(1, n + 1, device=device) % vocab_size for n in (3, 4)]
    labels = torch.cat([sequence.roll(-1) for sequence in sequences])
    name = type(model.hf).__name__
    with _poisoned(embedding, num_tokens=3):
        if not model(*_pack(sequences), labels)[0][3:].isfinite().all():
            raise ValueError(
                f"{name} mixes tokens other than by attention, so that packed sequences see each "
                "other: use another model"
            )
    packed = model(*_pack(sequences), labels)[0]
    alone = torch.cat([_alone(model, sequence) for sequence in sequences])
    # Loose: it tells a wrong formula, not another order of sums.
    tolerance = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.2
    if not torch.allclose(packed, alone, rtol=tolerance, atol=tolerance):
        raise ValueError(
            f"{name} makes other logits than its hidden states times a matrix (difference "
            f"{(packed - alone).abs().max().item():.2g}), which is what is computed here: use "
            "another model"
        )


@contextmanager
def _poisoned(embedding: nn.Module, num_tokens: int) -> Iterator[None]:
    """Meanwhile the first tokens are embedded as NaN, which spreads to whatever sees them."""

    def poison(module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[0, :num_tokens] = float("nan")
        return output

    hook = embedding.register_forward_hook(poison)
    try:
        yield
    finally:
        hook.remove()


def _alone(model: PackedModel, tokens_T: torch.Tensor) -> torch.Tensor:
    says = model(*_pack([tokens_T]))[0]
    if model.is_critic:
        return says
    return says.log_softmax(-1).gather(1, tokens_T.roll(-1)[:, None]).squeeze(1)


def _pack(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, PackedAttention]:
    lengths = torch.tensor([0, *(len(s) for s in sequences)], device=sequences[0].device)
    attend = PackedAttention(lengths.cumsum(0), int(lengths.max()))
    return torch.cat(sequences), attend.positions_T, attend


def one_rank_mesh(device: torch.device) -> ParallelMesh:
    """A mesh of this process alone, for what FSDP does also there: offload."""
    join_alone(device)
    return ParallelDims().build_mesh(device.type)


def recompute_blocks(model: PackedModel) -> None:
    """Keep only the inputs of each block and run it again in the backward pass."""
    for block in model.blocks():
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )


def shard_model(
    model: PackedModel, mesh: ParallelMesh, *, compute_dtype: torch.dtype, offload: bool
) -> None:
    """Make the weights sharded ones, still on the meta device."""
    options = {
        "mesh": mesh["dp_replicate", "fsdp"] if mesh["dp_replicate"].size() > 1 else mesh["fsdp"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32),
    }
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for block in model.blocks():
        fully_shard(block, **options)
    fully_shard(model, **options)
    # The loss of a rank is its share of the whole one: gradients are summed, not averaged.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def materialise(model: PackedModel, device: torch.device, *, offload: bool) -> None:
    """Give the model memory, undefined but for the buffers that are computed."""
    model.to_empty(device="cpu" if offload else device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    fill_buffers(model.hf)


PACKED_ATTENTION = "areal_packed"

# Arguments of transformers' attention functions that change the result, beside those we compute.
_NOT_COMPUTED = ("softcap", "s_aux", "position_bias")


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, N, T, H]
    key: torch.Tensor,  # [1, K, T, H]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attend: Attend | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`[1, T, N, H]`, as transformers' attention functions return it."""
    if attend is None or attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} does not hand keyword arguments to its attention, so it "
            "cannot be trained on packed sequences: use another model"
        )
    asked = [name for name in _NOT_COMPUTED if options.get(name) is not None]
    if asked:
        raise ValueError(
            f"{type(module).__name__} needs {', '.join(asked)} in its attention, which packed "
            "attention does not compute: use another model"
        )
    q_TNH, k_TKH, v_TKH = (x[0].transpose(0, 1) for x in (query, key, value))
    layer = cast(int, module.layer_idx)
    out_TNH = attend(layer, q_TNH, k_TKH, v_TKH, window=sliding_window, scale=scaling)
    return out_TNH[None], None


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)
