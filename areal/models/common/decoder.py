"""The decoder of every model family, used by training and by decoding alike.

    hidden_TD = model(tokens_T, positions_T, attend)   # after the final norm
    logits_TV = model.logits(hidden_TD)                # or chunks of it, with model.output_weight
    values_T = model.values(hidden_TD)                 # of a critic, which has no LM head

    sight = model.look(images)                         # of a model with a vision tower
    hidden_TD = model(tokens_T, positions_3T, attend, sight, sight_rows_I)

Tokens are one flat row of T, whatever sequences they belong to: only `attend` and the positions
depend on it. Weights are loaded and exported under Hugging Face names by the family's adapter.

Logits are float32, from hidden states and a head in the model's dtype (`float32_logits`): a sum
rounded to bfloat16 would cost a log-probability two of its digits, so the matrix product itself
writes float32 if the device can.

Shape legend: T tokens, D model dim, V vocabulary, R = head dim / 2, I image tokens among T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from areal.models.common.args import DecoderArgs, share_of
from areal.models.common.attention import Attend, Attention, AttentionLayer
from areal.models.common.fp8 import FP8, dequantize
from areal.models.common.fp8_linear import Fp8Linear, rounded_to_fp8, stored_in_fp8
from areal.models.common.gated_layers import GatedAttention, GatedDelta, Tensors
from areal.models.common.latent_attention import LatentAttention
from areal.models.common.moe import Experts, FeedForward, MoE, Router, TokenGate
from areal.models.common.norm import make_norm
from areal.models.common.rope import RotaryEmbedding
from areal.models.common.state_dict_adapter import StateDictAdapter
from areal.models.common.tensor_parallel import Ranks, Share, SummedLinear, SummedMoE
from areal.models.vision.tower import (
    Images,
    InputProjection,
    PatchEmbedding,
    Sight,
    VisionTower,
)

# The output of blocks, by their input, the rotation of each, and attend.
Chain = Callable[[Sequence["DecoderBlock"], torch.Tensor, Sequence[Tensors], Attend], torch.Tensor]


def softcap(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap * tanh(logits / cap), in (-cap, cap); None leaves them unchanged."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def float32_logits(hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    if weight_VD.is_cuda and weight_VD.dtype != torch.float32:
        return torch.mm(hidden_TD, weight_VD.t(), out_dtype=torch.float32)
    return F.linear(hidden_TD, weight_VD).float()


class DecoderBlock(nn.Module):
    """Norms before attention and feed-forward, and after them by `args.out_norms`.

    The computations before and after `attend` are two functions of tensors only, so that they can
    be compiled (models/parallelize.py) whatever `attend` does.
    """

    def __init__(self, args: DecoderArgs, layer: int):
        super().__init__()
        self.attention_norm = make_norm(args, args.dim)
        self.attention = _make_attention(args, layer)
        self.attention_out_norm = make_norm(args, args.dim) if args.out_norms else None
        self.ffn_norm = make_norm(args, args.dim)
        self.feed_forward = (
            MoE(args) if args.is_sparse(layer) else FeedForward(args, args.hidden_dim)
        )
        self.ffn_out_norm = make_norm(args, args.dim) if args.out_norms else None

    def forward(
        self, x_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        return self.after(x_TD, *self.mix(attend, *self.before(x_TD, cos_TR, sin_TR)))

    def before(self, x_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> Tensors:
        """What `mix` reads: queries, keys and values."""
        return self.attention.heads(self.attention_norm(x_TD), cos_TR, sin_TR)

    def mix(
        self, attend: Attend, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> Tensors:
        """What `after` reads besides the block's input: the output of attention."""
        return (attend(self.attention.spec, q_TNH, k_TKH, v_TKH),)

    def after(self, x_TD: torch.Tensor, out_TNH: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        out_TD = self.attention.output(out_TNH)
        if self.attention_out_norm is not None:
            out_TD = self.attention_out_norm(out_TD)
        x_TD = x_TD + out_TD
        out_TD = self.feed_forward(self.ffn_norm(x_TD))
        if self.ffn_out_norm is not None:
            out_TD = self.ffn_out_norm(out_TD)
        return x_TD + out_TD


def _has_hooks(block: nn.Module) -> bool:
    return bool(block._forward_hooks or block._forward_pre_hooks)


def _make_attention(args: DecoderArgs, layer: int) -> AttentionLayer:
    if args.latent is not None:
        return LatentAttention(args, layer)
    if args.delta is None:
        return Attention(args, layer)
    return (GatedDelta if layer in args.delta.layers else GatedAttention)(args, layer)


class TokenEmbedding(nn.Embedding):
    """An embedding that is not initialized on construction: weights are loaded, or drawn later.

    Initializing one on the meta device makes torch import its compiler, which takes two seconds.
    """

    def __init__(self, num_embeddings: int, dim: int, scale: float):
        super().__init__(num_embeddings, dim)
        self.scale = scale

    def reset_parameters(self) -> None:
        pass

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        x_TD = super().forward(tokens_T)
        if self.scale == 1.0:
            return x_TD
        # Rounded to the dtype first, as checkpoints were trained.
        return x_TD * torch.tensor(self.scale, dtype=x_TD.dtype, device="cpu").item()


class Decoder(nn.Module):
    """Families subclass this to set their adapter; their architecture is in their args, or, where
    these cannot express it, in a block of their own (which the CUDA kernels do not compute)."""

    adapter_class: ClassVar[type[StateDictAdapter]]
    block_class: ClassVar[type[DecoderBlock]] = DecoderBlock
    tower_class: ClassVar[type[VisionTower] | None] = None  # of families whose args have `vision`

    def __init__(self, args: DecoderArgs):
        super().__init__()
        self.args = args
        self.share: Share | None = None  # set if this is one rank's shard of a model
        self.chain: Chain | None = None  # runs all blocks, past their `forward`: parallelize.py
        # Copies an unsharded tensor into a weight; parallelize() replaces it with a sharding one.
        self.write: Callable[..., None] = write_whole
        self.adapter = self.adapter_class(args)
        # Of pipeline stages (models/pipeline.py) only the first embeds, only the last has the norm.
        self.tok_embeddings: TokenEmbedding | None = TokenEmbedding(
            args.vocab_size, args.dim, args.embedding_scale
        )
        self.rope = RotaryEmbedding(args.rope, args.rope_dim)
        self.window_rope = (
            None if args.window_rope is None else RotaryEmbedding(args.window_rope, args.rope_dim)
        )
        # Keyed by layer index: a pipeline stage has some of them.
        self.layers = nn.ModuleDict(
            {str(i): self.block_class(args, i) for i in range(args.n_layers)}
        )
        self.norm: nn.RMSNorm | None = make_norm(args, args.dim)
        has_own_head = not (args.tie_word_embeddings or args.is_critic)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False) if has_own_head else None
        # Last, so that a critic's trunk draws the same initial weights as the language model.
        self.score = nn.Linear(args.dim, 1, bias=False) if args.is_critic else None
        self.tower = None if self.tower_class is None else self.tower_class(args.vision_args)

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend,
        sight: Sight | Images | None = None,
        sight_rows_I: torch.Tensor | None = None,
        sight_source_I: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """In pipeline stages after the first, `tokens_T` is the previous stage's output.

        positions_T: [3, T] with M-RoPE, or [T] for text alone.
        sight: has embeddings for the tokens `sight_rows_I`: those at `sight_source_I`, or all in
        order. Images are looked at first, as a model that FSDP shards must do it in its forward.
        """
        x_TD = tokens_T if self.tok_embeddings is None else self.tok_embeddings(tokens_T)
        deepstack: tuple[torch.Tensor, ...] = ()
        if sight is not None:
            assert sight_rows_I is not None, "a sight belongs to rows"
            seen = self.look(sight) if isinstance(sight, Images) else sight
            if sight_source_I is not None:
                seen = seen.take(sight_source_I)
            x_TD = x_TD.index_copy(0, sight_rows_I, seen.tokens_ID.to(x_TD.dtype))
            deepstack = seen.deepstack
        rotation = window_rotation = self.rope(positions_T, x_TD.dtype)
        if self.window_rope is not None:
            window_rotation = self.window_rope(positions_T, x_TD.dtype)
        blocks = list(self.blocks)
        windows = [block.attention.spec.window for block in blocks]
        rotations = [rotation if window is None else window_rotation for window in windows]
        if self.chain is not None and not deepstack and not any(map(_has_hooks, blocks)):
            x_TD = self.chain(blocks, x_TD, rotations, attend)
        else:
            for layer, (block, cos_sin) in enumerate(zip(blocks, rotations, strict=True)):
                x_TD = block(x_TD, *cos_sin, attend)
                if layer < len(deepstack):
                    x_TD = x_TD.index_add(0, cast(torch.Tensor, sight_rows_I), deepstack[layer])
        return x_TD if self.norm is None else self.norm(x_TD)

    def look(self, images: Images) -> Sight:
        """What the tower makes of images; of a model that is not sharded by FSDP."""
        assert self.tower is not None, f"this {self.args.model_type} has no vision tower"
        return self.tower(images)

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        logits_TV = self.whole_logits(F.linear(hidden_TD, self.output_weight))
        return softcap(logits_TV, self.args.logit_softcap)

    def whole_logits(self, logits_TW: torch.Tensor) -> torch.Tensor:
        """[T, V] from the product with `output_weight`, gathered over ranks.

        `args.logit_softcap` is not applied yet."""
        return logits_TW if self.share is None else self.share.gather_logits(logits_TW)

    def values(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """One float32 number per token, of a model built with `is_critic`."""
        return self.score_head(hidden_TD).float().squeeze(-1)

    @property
    def blocks(self) -> Iterable[DecoderBlock]:
        """The values of `layers`, in order."""
        return cast("Iterable[DecoderBlock]", self.layers.values())

    @property
    def tower_blocks(self) -> Iterable[nn.Module]:
        """Of the vision tower; empty without one."""
        return () if self.tower is None else self.tower.blocks

    @property
    def has_fp8_cache(self) -> bool:
        return any(block.attention.has_fp8_cache for block in self.blocks)

    @property
    def score_head(self) -> nn.Linear:
        assert self.score is not None, "built without is_critic, or another stage has it"
        return self.score

    @property
    def embedding_weight(self) -> torch.Tensor:
        """[V, D]"""
        assert self.tok_embeddings is not None, "a pipeline stage but the first embeds nothing"
        return self.tok_embeddings.weight

    @property
    def output_weight(self) -> torch.Tensor:
        """The LM head [V, D] (or this rank's rows): its own parameter, or the tied embedding."""
        if self.output is not None:
            return self.output.weight
        embedding = self.embedding_weight
        return embedding if self.share is None else self.share.ranks.own_part(embedding, 0)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fresh weights: a function of (args, seed) alone, rounded to the dtype."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.RMSNorm | nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding | PatchEmbedding | InputProjection):
                self._write(module, module.weight, self._drawn(module.weight, generator))
                if not isinstance(module, nn.Embedding) and module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, Router | Experts | TokenGate):
                for weight in module.parameters(recurse=False):  # adapters are drawn elsewhere
                    self._write(module, weight, self._drawn(weight, generator))
            elif isinstance(module, GatedDelta):
                for weight, drawn in module.drawn_weights(generator):
                    self._write(module, weight, drawn)

    @torch.no_grad()
    def init_score(self) -> None:
        """Initialize the score head of a critic that starts from a language model.

        Zeros: a random head gives meaningless values larger than the rewards, and advantages from
        them would degrade the policy before the critic has learned anything.
        """
        self.score_head.weight.zero_()

    def store_in_fp8(self) -> None:
        """Linear layers and the cache of keys and values become FP8 (fp8.py); for generation."""
        self._use_fp8(stored_in_fp8)

    def round_to_fp8(self) -> None:
        """Compute as after `store_in_fp8`, from weights as they are; for training."""
        self._use_fp8(rounded_to_fp8)

    def _use_fp8(self, replace: Callable[[Sequence[nn.Linear]], Sequence[nn.Linear]]) -> None:
        refused = {
            "experts": self.args.moe is not None,
            "latent attention": self.args.latent is not None,
            "layers with a recurrent state": self.args.delta is not None,
            "tensor parallelism": self.share is not None,
        }
        if any(refused.values()):
            found = next(name for name, is_there in refused.items() if is_there)
            raise ValueError(
                f"dtype fp8: it stores the weights of dense models on one device, and this model "
                f"has {found}; use bfloat16"
            )
        self.replace_linears(replace)
        for block in self.blocks:
            block.attention.has_fp8_cache = True

    def replace_linears(
        self, replace: Callable[[Sequence[nn.Linear]], Sequence[nn.Linear]]
    ) -> None:
        """Replace the linear layers of all blocks; `replace` gets those that read the same input.

        Not the experts' and not the LM head."""
        for block in self.blocks:
            attention, mlp = block.attention, block.feed_forward
            read_alike = [(attention, ("wq", "wk", "wv")), (attention, ("wo",))]
            if isinstance(mlp, FeedForward):
                read_alike += [(mlp, ("w1", "w3")), (mlp, ("w2",))]
            for owner, names in read_alike:
                replaced = replace([getattr(owner, name) for name in names])
                for name, linear in zip(names, replaced, strict=True):
                    setattr(owner, name, linear)

    def _drawn(self, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        drawn = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
        return drawn.normal_(0.0, self.args.initializer_range, generator=generator)

    def named_hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight once, detached; not copied unless FP8, a tied head only as the embedding."""
        for name, tensor in self.state_dict().items():
            owner, _ = self._owner(name)
            if isinstance(owner, Fp8Linear) and tensor.dtype == FP8:
                tensor = dequantize(tensor, owner.scale, self.embedding_weight.dtype)
            yield from self.adapter.convert_single_to_hf(name, tensor)

    def fp8_block_rows(self) -> dict[str, int]:
        """Rows that share a scale, of each weight that is stored in FP8; by Hugging Face name."""
        return {
            self.adapter.to_hf_name(f"{name}.weight"): len(module.weight) // len(module.scale)
            for name, module in self.named_modules()
            if isinstance(module, Fp8Linear)
        }

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of `named_hf_tensors`; unsharded shapes, also for one rank's shard."""
        own_shapes = {name: tensor.shape for name, tensor in self.state_dict().items()}
        return {
            hf_name: tuple(tensor.shape)
            for name, shape in (
                own_shapes if self.share is None else self.share.whole_shapes
            ).items()
            for hf_name, tensor in self.adapter.convert_single_to_hf(
                name, torch.empty(shape, device="meta")
            )
        }

    def _owner(self, name: str) -> tuple[nn.Module, torch.Tensor]:
        """A parameter, or a buffer that is saved, and its module."""
        path, _, leaf = name.rpartition(".")
        owner = self.get_submodule(path)
        return owner, getattr(owner, leaf)

    def holds(self, hf_name: str) -> bool:
        """Whether this model stores it: not of another pipeline stage, not derived."""
        name = self.adapter.from_hf_name(hf_name)
        return name is not None and not self._owner(name)[1].is_meta

    @torch.no_grad()
    def load_hf_tensor(self, hf_name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor in; names without a parameter here are skipped."""
        name = self.adapter.from_hf_name(hf_name)
        if name is None:
            return
        (owner, own), share = self._owner(name), self.share
        expected = own.shape if share is None else share.whole_shapes[name]
        index = self.adapter.stack_index(hf_name)
        if index is not None:  # one slice of a stacked tensor
            expected = expected[1:]
        if expected != tensor.shape:
            raise ValueError(f"{hf_name} has shape {list(tensor.shape)}, expected {list(expected)}")
        whole = tensor if index is None else tensor[None]
        self._write(owner, own, whole if share is None else share.cut(name, whole), index)

    def _write(
        self, owner: nn.Module, own: torch.Tensor, whole: torch.Tensor, index: int | None = None
    ) -> None:
        if isinstance(owner, Fp8Linear) and own is owner.weight:
            owner.load(whole)
        else:
            self.write(own, whole, index)


def write_whole(own: torch.Tensor, whole: torch.Tensor, index: int | None = None) -> None:
    """Copy `whole` into a weight, or into its row `index` alone, then with shape [1, ...]."""
    (own if index is None else own[index : index + 1]).copy_(whole)


def build_share(model_class: type[Decoder], args: DecoderArgs, ranks: Ranks) -> Decoder:
    """This rank's model. Call it under the meta device: builds the full model for its shapes."""
    whole = model_class(args)
    own_args = share_of(args, ranks.size)
    model = model_class(own_args)
    for block in model.blocks:
        block.attention.wo = SummedLinear(block.attention.wo, ranks)
        if isinstance(block.feed_forward, MoE):
            block.feed_forward = SummedMoE(own_args, ranks)
        else:
            block.feed_forward.w2 = SummedLinear(block.feed_forward.w2, ranks)
    if model.output is not None:
        own_rows = ranks.own_part(model.output.weight, 0)
        model.output = nn.Linear(args.dim, len(own_rows), bias=False)
    shapes = {name: tensor.shape for name, tensor in whole.state_dict().items()}
    model.share = Share(ranks, shapes, args.vocab_size)
    return model
