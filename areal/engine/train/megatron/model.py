"""A megatron-core decoder over packed sequences: its modules and forward pass.

megatron-core supplies the parallel linear layers, the experts and the pipeline; areal's own modules
fill the open slots of its layer spec: norm, rotation, attention, the router's product. So neither
TransformerEngine nor apex is needed, sequences stay packed (megatron-core's own attention needs
TransformerEngine for that), and numerics are those of Archon and of the native engine.

    stages = build_stages(args, layout, config, dtype=..., device=...)   # this rank's, not filled
    outputs = stages[-1](mb)   # hidden states for the next one, or log-probabilities and entropy

A rank of a pipeline has one stage, or with a virtual pipeline several: of four layers on two ranks
with two stages each, the first rank computes layers 0 and 2, the second 1 and 3.

Shape legend: T tokens of a micro-batch, t a rank's shard of them (padded) over cp, s over cp and
tp, D model dim, N query heads, K key-value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from areal.api.config.train_engine import TrainEngineConfig
from areal.engine.train.logprobs import VocabPart, next_token_logprobs
from areal.engine.train.megatron.layout import Layout
from areal.engine.train.packing import pack_rows
from areal.models.common.args import DecoderArgs
from areal.models.common.attention import Attend, AttentionSpec
from areal.models.common.rope import RotaryEmbedding, rotate


def build_stages(
    args: DecoderArgs,
    layout: Layout,
    config: TrainEngineConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> list[MegatronStage]:
    """This rank's pipeline stages, in the order of their layers, with undefined weights."""
    num_stages = config.megatron.virtual_pipeline_parallel_size
    transformer = _transformer_config(args, layout, num_stages, dtype, device)
    if config.gradient_checkpointing:
        transformer.recompute_granularity = "full"
        transformer.recompute_method = "uniform"
        transformer.recompute_num_layers = 1
    # `.to`, because megatron-core creates the router's weight on the CPU.
    return [
        MegatronStage(args, layout, config, transformer, n).to(device) for n in range(num_stages)
    ]


def padded_vocab_size(args: DecoderArgs, layout: Layout) -> int:
    """Rows of the embedding: the vocabulary, up to a multiple of the tensor ranks."""
    tp = layout.tp.size()
    return -(-args.vocab_size // tp) * tp


def _transformer_config(
    args: DecoderArgs, layout: Layout, num_stages: int, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    strategy = layout.strategy
    is_interleaved = num_stages > 1
    return TransformerConfig(
        num_layers=args.n_layers,
        hidden_size=args.dim,
        ffn_hidden_size=args.hidden_dim,
        num_attention_heads=args.n_heads,
        num_query_groups=args.n_kv_heads,
        kv_channels=args.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=args.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=args.qkv_bias,
        qk_layernorm=args.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=strategy.tensor_parallel_size,
        pipeline_model_parallel_size=strategy.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=num_stages if is_interleaved else None,
        context_parallel_size=strategy.context_parallel_size,
        expert_model_parallel_size=strategy.expert_parallel_size,
        expert_tensor_parallel_size=strategy.expert_tensor_parallel_size,
        sequence_parallel=strategy.tensor_parallel_size > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Micro-batches differ in length, so stages exchange shapes, which needs a GPU; a CPU only
        # builds the model and holds its weights. With two interleaved ranks, each precedes and
        # follows the other, and batched messages would mix up hidden states and gradients: there
        # shapes are fixed and messages are sent one by one.
        variable_seq_lengths=device.type == "cuda" and not is_interleaved,
        batch_p2p_comm=not is_interleaved,
        overlap_p2p_comm=is_interleaved,
        moe_token_dispatcher_type="alltoall" if device.type == "cuda" else "allgather",
        # Gradients are summed over micro-batches and ranks, as engine/train/base.py asks.
        calculate_per_token_loss=True,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        # Kernels of optional packages.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **_expert_options(args),
    )


def _expert_options(args: DecoderArgs) -> dict[str, Any]:
    if args.moe is None:
        return {}
    return {
        "num_moe_experts": args.moe.num_experts,
        "moe_router_topk": args.moe.top_k,
        "moe_ffn_hidden_size": args.moe.hidden_dim,
        "moe_layer_freq": [int(args.is_sparse(layer)) for layer in range(args.n_layers)],
        # A softmax over the chosen experts only makes their weights sum to 1.
        "moe_router_pre_softmax": not args.moe.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


class Norm(nn.RMSNorm):
    """RMSNorm as megatron-core's layers build one."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps, device=device, dtype=config.params_dtype)
        # Tokens are sharded over tensor ranks; megatron-core sums gradients of marked weights.
        _mark(self.weight, sequence_parallel=config.sequence_parallel)


class Router(TopKRouter):
    """megatron-core's router with a plain matrix product; its own needs TransformerEngine."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input.float(), self.weight.float())


@dataclass
class PackedTokens(PackedSeqParams):
    """Attention's inputs for a micro-batch, passed through megatron-core's layers."""

    attend: Attend = field(kw_only=True)
    rotation: tuple[torch.Tensor, torch.Tensor] = field(kw_only=True)  # cos and sin, [t, H / 2]


class CoreAttention(nn.Module):
    """Rotation and attention, between megatron-core's projections."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.spec = AttentionSpec(layer_number - 1)

    def forward(
        self,
        q_tNH: torch.Tensor,
        k_tKH: torch.Tensor,
        v_tKH: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedTokens,
        **_: Any,
    ) -> torch.Tensor:
        q_tNH, k_tKH = (rotate(x, *packed_seq_params.rotation) for x in (q_tNH, k_tKH))
        return packed_seq_params.attend(self.spec, q_tNH, k_tKH, v_tKH).flatten(1)


class MegatronStage(GPTModel):
    """Stage `number` of this rank's stages; the model's first stage has the embedding, its last
    one the head."""

    def __init__(
        self,
        args: DecoderArgs,
        layout: Layout,
        options: TrainEngineConfig,
        transformer: TransformerConfig,
        number: int,
    ) -> None:
        last = (transformer.virtual_pipeline_model_parallel_size or 1) - 1
        is_last = layout.has_last_stage and number == last
        # megatron-core expects None for a rank with a single stage.
        vp_stage = number if last else None
        super().__init__(
            config=transformer,
            transformer_layer_spec=_block_spec(transformer, vp_stage),
            vocab_size=padded_vocab_size(args, layout),
            max_sequence_length=args.max_position_embeddings,
            pre_process=layout.has_first_stage and number == 0,
            post_process=is_last,
            share_embeddings_and_output_weights=args.tie_word_embeddings and not args.is_critic,
            position_embedding_type="none",  # CoreAttention rotates
            vp_stage=vp_stage,
        )
        self.args, self.layout, self.options = args, layout, options
        self.rope = RotaryEmbedding(args.rope, args.head_dim)
        if args.is_critic and is_last:
            weight = self.output_layer.weight
            assert weight is not None, "a critic has no head that is the embedding"
            del self.output_layer
            self.score = nn.Linear(
                args.dim, 1, bias=False, device=weight.device, dtype=weight.dtype
            )
            _mark(self.score.weight, sequence_parallel=transformer.sequence_parallel)

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark the weights that two stages share; both load them from the same checkpoint."""
        embedding = self.embedding.word_embeddings.weight if self.pre_process else None
        head = self.output_layer.weight if self.post_process else None
        for weight in (embedding, head):
            if weight is not None:
                _mark(weight, is_embedding_or_output_parameter=True)
        shared = self.share_embeddings_and_output_weights and (
            self.config.pipeline_model_parallel_size > 1
        )
        if shared and embedding is not None:
            _mark(embedding, shared_embedding=True)
        elif shared and head is not None:
            # Marked as shared, so that the gradient norm counts it once.
            _mark(head, shared=True, shared_embedding=True)

    def forward(
        self, mb: dict[str, Any], min_tokens: int = 0
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Hidden states `[s, 1, D]` of a packed micro-batch, padded to `min_tokens` over all ranks
        together; on the last stage log p of the next token and entropy `[T]`, or a critic's values
        `[T]`."""
        layout = self.layout
        laid = pack_rows(mb, multiple=layout.token_multiple, cp=layout.cp, min_tokens=min_tokens)
        packed = PackedTokens(
            qkv_format="thd",
            attend=laid.attend,
            rotation=self.rope(laid.positions_t, self.config.params_dtype),
        )
        embedded = self.embedding(laid.tokens_t[None], None) if self.pre_process else None
        hidden_s1D = self.decoder(
            hidden_states=embedded, attention_mask=None, packed_seq_params=packed
        )
        if not self.post_process:
            return hidden_s1D
        return laid.whole(self._heads(hidden_s1D, laid.labels_t))

    def _heads(self, hidden_s1D: torch.Tensor, labels_t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.args.is_critic:
            values_s = self.score(hidden_s1D.squeeze(1)).float().squeeze(-1)
            return (self._gather_tokens(values_s, partial_grad=False),)
        tp = self.layout.tp
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        assert weight is not None, "the last stage has the head, or the embedding"
        rows = min(len(weight), self.args.vocab_size - len(weight) * tp.rank())
        return next_token_logprobs(
            self._gather_tokens(hidden_s1D.squeeze(1), partial_grad=True),
            weight[:rows],  # without the padding of the vocabulary
            labels_t,
            temperature=self.options.temperature,
            chunk_size=self.options.logprobs_chunk_size,
            part=None if tp.size() == 1 else VocabPart(len(weight) * tp.rank(), tp),
        )

    def _gather_tokens(self, x_s: torch.Tensor, *, partial_grad: bool) -> torch.Tensor:
        """Gather tokens over tensor ranks. `partial_grad`: gradients are summed over them."""
        if not self.config.sequence_parallel:
            return x_s
        return gather_from_sequence_parallel_region(
            x_s, tensor_parallel_output_grad=partial_grad, group=self.layout.tp
        )


def _mark(parameter: torch.Tensor, **marks: bool) -> None:
    """Set attributes that megatron-core reads from a parameter."""
    for name, value in marks.items():
        setattr(parameter, name, value)


def _block_spec(transformer: TransformerConfig, vp_stage: int | None) -> Any:
    """megatron-core's layer spec with areal's modules. It accepts more kinds of specs than its
    types declare."""
    block: Any = get_gpt_decoder_block_spec(
        transformer, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    block.layer_norm = Norm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CoreAttention
        if transformer.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
        if isinstance(layer.submodules.mlp.submodules, MoESubmodules):
            layer.submodules.mlp.submodules.router = Router
    return block
