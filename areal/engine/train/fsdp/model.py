"""A Hugging Face causal LM, image-text model or scorer over packed tokens: its wrapper, sharding
and attention.

    model = build_model(folder, dtype=torch.float32, is_critic=False)     # on the meta device
    logprobs_T, entropy_T = model(tokens_T, positions_T, attend, labels_T)
    (values_T,) = critic(tokens_T, positions_T, attend)

Model: the LM head runs inside `forward`, in chunks, so that the logits of the whole micro-batch
never exist and a sharded head is gathered there. `check_model` compares the result with the model's
own forward pass, sequence by sequence, and refuses a model whose layers mix tokens other than by
attention, or whose logits are more than a product.

Sharding (`shard_model`): FSDP keeps each rank's shard of the float32 weights. A block is gathered
in the compute dtype when it runs, forward and backward, and its gradients are summed over ranks in
float32. One rank without offload stays a plain module.

Images: the arguments of the model's own forward (images.py); only its language model has packed
attention.

Attention: models are built with `attn_implementation=PACKED_ATTENTION`, so they request no mask and
call `packed_attention` in every layer. The keyword `attend` is passed through transformers' keyword
arguments and holds the sequence bounds, so that no sequence sees another. Options of a layer that
`attend` does not compute are refused, not ignored.

Shape legend: T packed tokens, D model dim, V vocabulary, N query heads, K key-value heads, H head
dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from areal.engine.train.fit import banned_ids
from areal.engine.train.fsdp.weights import fill_buffers, with_partial_gradient
from areal.engine.train.logprobs import VocabPart, next_token_logprobs
from areal.models.common.attention import Attend, AttentionSpec, PackedAttention
from areal.models.hf_io import read_hf_config
from areal.models.parallel_dims import ParallelMesh

PACKED_ATTENTION = "areal_packed"

# Arguments of transformers' attention functions that change the result and are not computed here.
_NOT_COMPUTED = ("softcap", "s_aux", "position_bias")
_SOFTCAP = "final_logit_softcapping"  # in config.json: logits become cap * tanh(logits / cap)


@dataclass(frozen=True, slots=True)
class HfImages:
    """Of a micro-batch, read by images.py."""

    inputs: dict[str, torch.Tensor]  # arguments of the model's forward
    positions_3T: torch.Tensor | None = None  # None: those of text
    rows: tuple[tuple[torch.Tensor, dict[str, torch.Tensor]], ...] = ()  # tokens, and its images
    is_blank: bool = False  # computed and not used, as other ranks compute theirs


class PackedModel(nn.Module):
    def __init__(self, hf: PreTrainedModel, is_critic: bool, banned: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.hf = hf
        self.is_critic = is_critic
        self.banned = banned  # image placeholders, which are never sampled

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend | None,
        labels_T: torch.Tensor | None = None,
        *,
        rows_T: torch.Tensor | None = None,
        images: HfImages | None = None,
        temperature: float = 1.0,
        chunk_size: int = 1024,
    ) -> tuple[torch.Tensor, ...]:
        """log p(labels) and entropy `[T]`, or a critic's values `[T]`; float32.

        With `rows_T` of the tokens at these places, each with its label, else of all. A language
        model without labels returns the logits `[T, V]` of its own forward.
        """
        inputs = {
            "input_ids": tokens_T[None],
            "position_ids": positions_T[None],
            "use_cache": False,
            "attend": attend,
        }
        if images is not None:
            tensors = {key: x.to(tokens_T.device) for key, x in images.inputs.items()}
            if images.positions_3T is not None:
                inputs["position_ids"] = images.positions_3T[:, None]
            if images.is_blank:
                inputs["inputs_embeds"] = self._after_blank(inputs.pop("input_ids"), tensors)
            else:
                inputs |= tensors
        if attend is None:  # the model's own positions and attention
            del inputs["attend"], inputs["position_ids"]
        if not self.is_critic and labels_T is None:
            return (self.hf(**inputs).logits[0].float(),)
        hidden_TD = self.hf.base_model(**inputs).last_hidden_state[0]
        if rows_T is not None:
            hidden_TD = hidden_TD.index_select(0, rows_T)
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
            banned=self.banned,
        )

    def _after_blank(
        self, tokens_1T: torch.Tensor, tensors: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Embeddings of text, with the tower in their graph and none of it in their values."""
        features = cast(Any, self.hf.base_model).get_image_features(**tensors, return_dict=True)
        # Every output, so that all ranks have gradients of the same weights.
        parts = tree_leaves(features.to_tuple())
        unused = sum(x.sum() for x in parts if isinstance(x, torch.Tensor))
        return cast(nn.Module, self.hf.get_input_embeddings())(tokens_1T) + 0.0 * unused

    def own_logits(self, tokens_T: torch.Tensor, images: HfImages) -> torch.Tensor:
        """[T, V] of one sequence, by the model's own positions and attention."""
        return self(tokens_T, tokens_T, None, images=images)[0]

    @property
    def score_head(self) -> nn.Linear:
        """Of a critic."""
        return cast(nn.Linear, self.hf.score)  # checked by `_refuse_unfit`

    @property
    def head_weight(self) -> torch.Tensor:
        """The LM head [V, D], of a language model."""
        head = cast(nn.Linear | TiedHead, self.hf.get_output_embeddings())
        return head.weight

    def freeze_tower(self) -> None:
        """All but the language model and its head."""
        kept = {id(weight) for weight in self.hf.get_decoder().parameters()}
        kept.add(id(self.head_weight))
        for weight in self.hf.parameters():
            weight.requires_grad_(id(weight) in kept)

    def blocks(self) -> list[nn.Module]:
        """The transformer blocks: the units of sharding and recomputation."""
        names = set(self.hf._no_split_modules or ())
        # Sharding makes a subclass of a block's class, with a name of its own.
        found = [
            module
            for module in self.hf.base_model.modules()
            if any(base.__name__ in names for base in type(module).__mro__)
        ]
        if not found:
            raise ValueError(
                f"{type(self.hf).__name__} does not name its blocks (_no_split_modules), so it "
                "cannot be sharded or recomputed by block: use another model"
            )
        return found


def traced_modules(model: PackedModel) -> dict[str, nn.Module]:
    """Those whose outputs areal's own models have too, by the names of layer_trace.py."""
    decoder = cast(nn.Module, model.hf.get_decoder())
    embedding, norm = model.hf.get_input_embeddings(), getattr(decoder, "norm", None)
    if not isinstance(norm, nn.Module) or not isinstance(embedding, nn.Module):
        raise NotImplementedError(f"the layers of a {type(model.hf).__name__} are not known here")
    inside = set(decoder.modules())
    blocks = [block for block in model.blocks() if block in inside]
    layers = {f"layers.{index}": block for index, block in enumerate(blocks)}
    return {"embedding": embedding, **layers, "norm": norm}


class TiedHead(nn.Module):
    """An LM head that reads the embedding's weight and has none itself.

    The weight has one owner then for sharding, moving and saving.
    """

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self._embedding = [embedding]  # in a list, so that it is no submodule

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
    """The model of a folder on the meta device, without weights."""
    hf_config = read_hf_config(path)  # a clear error if this is no model folder
    config = _read_config(path)
    family = AutoModelForSequenceClassification if is_critic else AutoModelForCausalLM
    if not is_critic and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        family = AutoModelForImageTextToText
    sees = "vision_config" in hf_config
    if is_critic:
        config.num_labels = 1
    with torch.device("meta"):
        # A tower keeps the attention that transformers chooses for it.
        attention = {} if sees else {"attn_implementation": "eager"}
        hf = family.from_config(config, dtype=dtype, **attention)
    _refuse_unfit(hf, is_critic)
    if sees:
        hf.set_attn_implementation({"": PACKED_ATTENTION, "text_config": PACKED_ATTENTION})
    else:
        hf.set_attn_implementation(PACKED_ATTENTION)
    embedding = hf.get_input_embeddings()
    if not is_critic and hf.get_output_embeddings().weight is embedding.weight:
        hf.set_output_embeddings(TiedHead(embedding))
    for module in hf.modules():
        if isinstance(module, nn.Embedding):
            # Packed rows have no padding, so the pad token (often the EOS) is learned like others.
            module.padding_idx = None
    # Dropout would make log-probabilities differ from those the tokens were sampled with.
    return PackedModel(hf.eval(), is_critic, () if is_critic else banned_ids(hf_config))


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
    # Loose, to detect a wrong formula and not another order of sums.
    tolerance = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.2
    if not torch.allclose(packed, alone, rtol=tolerance, atol=tolerance):
        raise ValueError(
            f"{name} makes other logits than its hidden states times a matrix (difference "
            f"{(packed - alone).abs().max().item():.2g}), which is what is computed here: use "
            "another model"
        )


@contextmanager
def _poisoned(embedding: nn.Module, num_tokens: int) -> Iterator[None]:
    """Within the context the first tokens embed as NaN, which spreads to all that see them."""

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
    says[:, list(model.banned)] = -torch.inf
    return says.log_softmax(-1).gather(1, tokens_T.roll(-1)[:, None]).squeeze(1)


def pack_alone(tokens_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, PackedAttention]:
    """Arguments of a forward with one sequence."""
    return _pack([tokens_T])


def _pack(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, PackedAttention]:
    lengths = torch.tensor([0, *(len(s) for s in sequences)], device=sequences[0].device)
    attend = PackedAttention(lengths.cumsum(0), int(lengths.max()))
    return torch.cat(sequences), attend.positions_T, attend


def recompute_blocks(model: PackedModel) -> None:
    """Keep only the inputs of each block and run it again in the backward pass."""
    for block in model.blocks():
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )


def shard_model(
    model: PackedModel,
    mesh: ParallelMesh,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    offload: bool,
) -> None:
    """Shard the weights, still on the meta device."""
    options = {
        "mesh": mesh.in_replicas("fsdp"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype),
    }
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for block in model.blocks():
        fully_shard(block, **options)
    fully_shard(model, **options)
    # A rank's loss is its share of the global loss, so gradients are summed, not averaged.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def materialise(model: PackedModel, device: torch.device, *, offload: bool) -> None:
    """Allocate the weights, undefined, and compute the derived buffers."""
    model.to_empty(device="cpu" if offload else device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    fill_buffers(model.hf)


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
    spec = AttentionSpec(cast(int, module.layer_idx), sliding_window, scaling)
    return attend(spec, q_TNH, k_TKH, v_TKH)[None], None


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)
