"""The dense decoder every family is made of, used by training and by decoding alike.

    hidden_TD = model(tokens_T, positions_T, attend)   # after the final norm
    logits_TV = model.logits(hidden_TD)                # or chunks of it, with model.output_weight
    values_T = model.values(hidden_TD)                 # of a critic, which has no LM head

Tokens are one flat row of T, whatever sequences they belong to: only `attend` and the positions
know. Weights go in and out under their Hugging Face names through the family's adapter.

Shape legend: T tokens, D model dim, V vocabulary, R = head dim / 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from areal.models.common.args import DecoderArgs
from areal.models.common.attention import Attend, Attention
from areal.models.common.feed_forward import FeedForward
from areal.models.common.rope import RotaryEmbedding
from areal.models.common.state_dict_adapter import StateDictAdapter

if TYPE_CHECKING:
    from areal.models.common.tensor_parallel import Share


class DecoderBlock(nn.Module):
    def __init__(self, args: DecoderArgs, layer: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, args.norm_eps)
        self.attention = Attention(args, layer)
        self.ffn_norm = nn.RMSNorm(args.dim, args.norm_eps)
        self.feed_forward = FeedForward(args)

    def forward(
        self, x_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), cos_TR, sin_TR, attend)
        return x_TD + self.feed_forward(self.ffn_norm(x_TD))


class TokenEmbedding(nn.Embedding):
    """An embedding that is not filled when it is made: weights are loaded, or drawn later.

    Filling one on the meta device makes torch import its compiler, two seconds of every start.
    """

    def reset_parameters(self) -> None:
        pass


class Decoder(nn.Module):
    """Families subclass this to name their adapter; their architecture is in their args."""

    adapter_class: ClassVar[type[StateDictAdapter]]

    def __init__(self, args: DecoderArgs):
        super().__init__()
        self.args = args
        self.share: Share | None = None  # set when this is one rank's part of a model
        self.adapter = self.adapter_class(args)
        self.tok_embeddings = TokenEmbedding(args.vocab_size, args.dim)
        self.rope = RotaryEmbedding(args.rope, args.head_dim)
        # Keyed by the layer's number: a pipeline stage that drops layers keeps the others' names.
        self.layers = nn.ModuleDict({str(i): DecoderBlock(args, i) for i in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim, args.norm_eps)
        has_own_head = not (args.tie_word_embeddings or args.is_critic)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False) if has_own_head else None
        # Last of the modules: a critic's trunk gets the initial weights of the language model's.
        self.score = nn.Linear(args.dim, 1, bias=False) if args.is_critic else None

    def forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        x_TD = self.tok_embeddings(tokens_T)
        cos_TR, sin_TR = self.rope(positions_T, x_TD.dtype)
        for block in self.layers.values():
            x_TD = block(x_TD, cos_TR, sin_TR, attend)
        return self.norm(x_TD)

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return self.whole_logits(F.linear(hidden_TD, self.output_weight))

    def whole_logits(self, logits_TW: torch.Tensor) -> torch.Tensor:
        """[T, V] from the product with `output_weight`: the other ranks' columns come along."""
        return logits_TW if self.share is None else self.share.gather_logits(logits_TW)

    def values(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """One float32 number per token, of a model built with `is_critic`."""
        return self.score(hidden_TD).float().squeeze(-1)

    @property
    def output_weight(self) -> torch.Tensor:
        """The LM head [V, D] (a rank's rows of it): its own parameter, or the tied embedding."""
        if self.output is not None:
            return self.output.weight
        embedding = self.tok_embeddings.weight
        return embedding if self.share is None else self.share.ranks.own_part(embedding, 0)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fresh weights: a function of (args, seed) alone, rounded to the dtype."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, nn.Linear | nn.Embedding):
                self._draw(module.weight, generator)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()

    @torch.no_grad()
    def init_score(self) -> None:
        """A fresh score head alone: what a critic that starts from a language model lacks.

        Zeros: a drawn head gives values that are larger than the rewards and mean nothing, and
        the advantages made of them unlearn the policy before the critic has learned anything.
        """
        self.score.weight.zero_()

    def _draw(self, weight: torch.Tensor, generator: torch.Generator) -> None:
        drawn = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
        weight.copy_(drawn.normal_(0.0, self.args.initializer_range, generator=generator))

    def named_hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight once, detached and not copied; a tied head is the embedding alone."""
        for name, parameter in self.named_parameters():
            yield from self.adapter.convert_single_to_hf(name, parameter.detach())

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of `named_hf_tensors`, those of the whole model also for a share."""
        if self.share is None:
            return {name: tuple(tensor.shape) for name, tensor in self.named_hf_tensors()}
        return {
            hf_name: tuple(tensor.shape)
            for name, shape in self.share.whole_shapes.items()
            for hf_name, tensor in self.adapter.convert_single_to_hf(
                name, torch.empty(shape, device="meta")
            )
        }

    @torch.no_grad()
    def load_hf_tensor(self, hf_name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor in; names that carry nothing to learn are passed over."""
        name = self.adapter.from_hf_name(hf_name)
        if name is None:
            return
        parameter, share = self.get_parameter(name), self.share
        expected = parameter.shape if share is None else share.whole_shapes[name]
        if expected != tensor.shape:
            raise ValueError(f"{hf_name} has shape {list(tensor.shape)}, expected {list(expected)}")
        parameter.copy_(tensor if share is None else share.cut(name, tensor))
