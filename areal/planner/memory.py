"""How much memory does a process need? Peak bytes of a training rank and of a server, by part.

A phase is a moment at which memory may peak; its parts add up, and the largest phase counts. What
is held throughout (weights, optimizer) is part of every phase.

Training, one rank: weights in the dtype of products, float32 masters, two moments. Gradients come
in the dtype of the weights and are collected in float32 after each micro-batch, which is a phase:
both exist then. Several ranks (FSDP): float32 shards, which are the masters, with moments and
gradients beside them; the root (embedding, head) is gathered throughout, of the blocks the one that
runs and the next. Megatron: whole weights and float32 gradient buffers, sharded masters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from areal.planner.devices import GIB, Device
from areal.planner.shapes import TORCH_PREFILL, Shape
from areal.planner.speed import Layout
from areal.planner.towers import tower_backward, tower_forward, tower_kept

Parts = dict[str, float]
_BUCKET_BYTES = 1 << 30  # of weights sent by weight_update_mode xccl
_PREFILL_TOKENS = {"cuda": 16384, "cpu": TORCH_PREFILL}
_CPU_CACHE_BYTES = 1 << 30
_FREE_SHARE = 0.5  # of the free memory, for a cache without native.num_pages
_FP8_BLOCK = 128 * 128
# Recurrent states that the native engine keeps: of each request with its prompt, and at least.
_STATES_OF_REQUEST, _MIN_STATES = 5, 7


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one process: phase -> part -> bytes."""

    process: str
    phases: dict[str, Parts] = field(default_factory=dict)

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> float:
        return sum(self.phases[self.peak_phase].values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRank:
    """One rank of a training engine; `tokens` is its largest micro-batch, before c divides it."""

    shape: Shape
    device: Device
    engine: str = "archon"  # archon, fsdp or megatron
    layout: Layout = Layout()
    tokens: float
    longest: float = 0.0  # sequence of it
    image_tokens: float = 0.0  # of images that the tower computes for it
    num_micro_batches: int = 1
    mode: str = "none"  # what is kept: none, selective, full or compiled
    full_share: float = 0.0  # of the blocks, that keep only their input
    extra_kept: float = 0.0  # numbers per token, beyond those of our own blocks
    is_compiled: bool = False
    itemsize: int = 2
    logits_chunk: int = 2048
    trains: bool = True
    num_moments: int = 2
    trained_weights: float | None = None  # LoRA: of the adapters
    is_offloaded: bool = False
    sends_buckets: bool = False

    def memory(self, process: str) -> Memory:
        held = self._held()
        if not self.trains:
            return Memory(process, {"forward": held | self._forward()} | self._looking(held))
        summed = self._summed_gradients() if self.num_micro_batches > 1 else {}
        kept = held | summed | {"activations": self._kept()} | self._images()
        phases = {
            "loss": kept | self._head(),
            "backward": kept | self._one_block(),
            "collect": held | self._collect(),
        }
        if not self._is_sharded and self.engine != "megatron":
            phases["end of backward"] = held | self._first_block() | self._images()
        phases |= self._tower_backward(held)
        if self.sends_buckets:
            phases["update"] = held | {"buckets": 2.0 * _BUCKET_BYTES}
        return Memory(process, phases)

    @property
    def _own(self) -> float:
        """Weights of this rank's stage and tensor-parallel part, not sharded over d."""
        shape, layout = self.shape, self.layout
        if layout.pp == 1:
            return self._cut(shape.num_weights, shape.all_expert_weights)
        # The ends have the embedding and the head, and fewer layers for it.
        body = (shape.num_weights - shape.root_weights) / layout.pp
        return self._cut(body + shape.root_weights / 2, shape.all_expert_weights / layout.pp)

    def _cut(self, weights: float, experts: float) -> float:
        layout = self.layout
        spread = layout.ep * layout.etp if layout.ep * layout.etp > 1 else layout.tp
        return (weights - experts) / layout.tp + experts / spread

    @property
    def _is_sharded(self) -> bool:
        return self.layout.world > 1 and self.engine != "megatron"

    @property
    def _shard(self) -> float:
        """Weights that FSDP leaves on this rank; those of experts are sharded over all ranks."""
        return self.shape.num_weights / (self.layout.shards * self.layout.tp * self.layout.pp)

    @property
    def _trained(self) -> float:
        """Trained numbers on this rank."""
        if self.trained_weights is not None:
            return self.trained_weights / (self.layout.shards if self._is_sharded else 1)
        return self._shard if self._is_sharded else self._own

    def _held(self) -> Parts:
        item, layout = self.itemsize, self.layout
        library = {"libraries": self.device.library_gib * GIB}
        if self.is_offloaded:
            return {"weights": self._gathered() * item, **library}
        if self.engine == "megatron":
            masters = self._own / (layout.dp * layout.cp) * 4 * (1 + self.num_moments)
            held = {"weights": self._own * item, "gradients": self._own * 4.0}
            return held | {"optimizer": masters, **library} if self.trains else held | library
        if self._is_sharded:
            frozen_item = 4 if self.engine == "archon" or self.trained_weights is None else item
            held = {"weights": self._shard * frozen_item, "gathered": self._gathered() * item}
            optimizer = self._trained * 4 * self.num_moments
            if self.trained_weights is not None:
                optimizer += self._trained * 4
        else:
            held = {"weights": self._own * item}
            is_master = item == 4 and self.trained_weights is None
            optimizer = self._trained * 4 * (self.num_moments + (not is_master))
            if self.trained_weights is not None:
                optimizer += self._trained * item
        return held | ({"optimizer": optimizer} if self.trains else {}) | library

    def _gathered(self) -> float:
        """Numbers that FSDP has gathered: the root, the block that runs and the next. A pipeline
        keeps all blocks of its stages, for all micro-batches of a step."""
        shape, layout = self.shape, self.layout
        root = shape.root_weights / layout.tp
        if layout.pp > 1:
            return max(self._own, root / 2)
        return root + sum(self._blocks[-2:])

    @property
    def _blocks(self) -> list[float]:
        """Weights of each block on this rank, not sharded over d; smallest first."""
        shape = self.shape
        layers = range(shape.num_layers)
        return sorted(self._cut(shape.block_weights(i), shape.expert_weights(i)) for i in layers)

    def _summed_gradients(self) -> Parts:
        """Of earlier micro-batches; float32."""
        if self.engine == "megatron" or self.is_offloaded:
            return {}
        return {"gradients": self._trained * 4.0}

    def _first_block(self) -> Parts:
        """While the first block goes backward, all others have their gradients. The embedding gets
        its own last; a tied one has that of the head."""
        shape, item = self.shape, self.itemsize
        numbers = self._trained
        if self.trained_weights is None:
            numbers -= self._blocks[0] + (self.shape.tower_weights if self.image_tokens else 0)
            if not shape.args.tie_word_embeddings:
                numbers -= shape.args.vocab_size * shape.args.dim / self.layout.tp
        is_summed = item != 4 and self.num_micro_batches > 1
        gradients = numbers * item + (self._trained * 4.0 if is_summed else 0.0)
        kept = self._kept() / shape.num_layers
        return {"gradients": gradients, "activations": kept + self._block_again()}

    def _collect(self) -> Parts:
        if self.engine == "megatron" or self.is_offloaded:
            return {}
        if not self._is_sharded:
            # AdamW's kernels read the gradients of one micro-batch as backward has left them.
            is_read_as_is = self.device.kind == "cuda" and self.num_moments == 2
            if self.itemsize == 4 or (is_read_as_is and self.num_micro_batches == 1):
                return {"gradients": self._trained * self.itemsize}
            return {"gradients": self._trained * (4.0 + self.itemsize)}
        layout = self.layout
        block = self._blocks[-1]
        root = self.shape.root_weights / layout.tp if layout.pp == 1 else 0.0
        # The last gradients to be reduced are the root's, as a float32 copy of all of it.
        reduced = max(block, root) * (self.itemsize + 4.0)
        if self.trained_weights is not None:
            reduced = 0.0
        return {"gradients": self._trained * 4.0, "reduction": reduced}

    @property
    def _tokens(self) -> float:
        return self.tokens / self.layout.cp

    def _kept(self) -> float:
        """Activations of the micro-batches in flight, of this rank's layers."""
        layout, item = self.layout, self.itemsize
        inputs = self.shape.kept("full")
        kept = self.shape.kept(self.mode)
        numbers = kept + self.full_share * (inputs - kept)
        if self.mode != "full":
            numbers += self.extra_kept * (1 - self.full_share)
        per_token = numbers / layout.tp * item + self._attention_sums()
        if self.mode != "full":
            per_token += self._scores * len(self.shape.args.attention_layers)
        # Embedded tokens, last norm's input and output.
        per_token += 2 * self.shape.args.dim * item / layout.tp
        # The first stage of a pipeline holds as many micro-batches as there are stages.
        in_flight = 1.0
        if layout.pp > 1:
            in_flight += (layout.pp - 1) / (layout.pp * layout.stages_per_rank)
            in_flight *= min(self.num_micro_batches / layout.pp, 1.0)
        return per_token * self._tokens * in_flight

    def _images(self) -> Parts:
        """What a vision tower keeps. Ranks of t and c all run all of it."""
        vision = self.shape.args.vision
        if vision is None or not self.image_tokens:
            return {}
        kept = tower_kept(vision, self.mode)
        kept += self.full_share * (tower_kept(vision, "full") - kept)
        return {"images": self.image_tokens * kept * self.itemsize}

    def _looking(self, held: Parts) -> dict[str, Parts]:
        """The tower's own phase, without gradients."""
        vision = self.shape.args.vision
        if vision is None or not self.image_tokens:
            return {}
        numbers = self.image_tokens * tower_forward(vision)
        return {"images": held | {"images": numbers * self.itemsize}}

    def _tower_backward(self, held: Parts) -> dict[str, Parts]:
        """Its last block goes backward when all of the decoder has its gradients."""
        vision = self.shape.args.vision
        if vision is None or not self.image_tokens:
            return {}
        gradients = self._trained
        if self.trained_weights is None:
            part = self.layout.shards * self.layout.tp * self.layout.pp if self._is_sharded else 1
            gradients -= self.shape.tower_weights / part
        item = 4 if self._is_sharded or self.num_micro_batches > 1 else self.itemsize
        mode = "full" if self.full_share > 0 else self.mode
        block = self.image_tokens * tower_backward(vision, mode) * self.itemsize
        parts = {"gradients": gradients * item, "block": block}
        return {"images": held | parts | self._images()}

    @property
    def _scores(self) -> float:
        """Bytes of a token's attention scores and of its keys and values for each query head, in a
        layer: no fused kernel takes float32 with shared heads on a GPU."""
        args = self.shape.args
        if self.itemsize != 4 or self.device.kind == "cpu" or args.n_heads == args.n_kv_heads:
            return 0.0
        return 4.0 * (args.n_heads * self.longest + 2 * self.shape.query_width) / self.layout.tp

    def _attention_sums(self) -> float:
        """float32 sums of each head and layer, and of the norms."""
        if self.mode == "full":
            return 0.0
        return 4.0 * self.shape.num_layers * (self.shape.args.n_heads + 2) / self.layout.tp

    def _head(self) -> Parts:
        """A chunk of float32 logits with their gradients, the float32 gradient of the head's
        weight, and the gradient of the hidden states."""
        shape, layout = self.shape, self.layout
        hidden = self._tokens * shape.args.dim * self.itemsize
        if shape.args.is_critic:
            return {"head": hidden}
        rows = min(self.logits_chunk, self._tokens)
        logits = rows * shape.args.vocab_size / layout.tp * (4 + self.itemsize)
        weight = 0.0
        if self.trained_weights is None:
            weight = shape.head_weights / layout.tp * 4
        return {"head": logits + weight + hidden}

    def _one_block(self) -> Parts:
        """While the last block goes backward, the head's weight has its gradient."""
        head = 0.0 if self.trained_weights is not None else self.shape.head_weights
        return {"block": self._block_again() + head / self.layout.tp * self.itemsize}

    def _block_again(self) -> float:
        """Bytes that backward computes again of a block, with the gradients of its activations."""
        shape = self.shape
        again, mode = 0.0, "full" if self.full_share > 0 else self.mode
        if mode in ("full", "selective"):
            again = shape.recomputed(mode, "compiled" if self.is_compiled else "none")
        width, dim = shape.widest_feed_forward, shape.args.dim
        # A compiled half has the gradients of gate, up and product at once; else the product and
        # its gradient are gone when those of gate and up are complete. What a compiled half has
        # computed again is freed for them.
        gradients = 3 * width + 3 * dim if self.is_compiled else 2 * width + dim
        if self.is_compiled and mode == "full":
            gradients = width
        numbers = (again + gradients) / self.layout.tp * self.itemsize
        return self._tokens * (numbers + (3 * self._scores if mode == "full" else 0.0))

    def _forward(self) -> Parts:
        """Without gradients: one block, or one chunk of logits, whichever is more."""
        shape, layout, item = self.shape, self.layout, self.itemsize
        args, tokens = shape.args, self._tokens
        width = shape.widest_feed_forward
        # Residual before and after attention, and its norm. Not compiled, also what attention
        # added, and the gate's activation has a place of its own.
        numbers = 3 * args.dim + 2 * shape.query_width + 2 * shape.kv_width + 2 * width
        if not self.is_compiled:
            numbers += args.dim + width
        elif not self._is_sharded:
            numbers += 2 * args.dim  # blocks run in a chain, which keeps its input and theirs
        block = tokens * numbers * item / layout.tp
        rotation = tokens * args.head_dim * item  # cos and sin
        logits = 0.0
        if not args.is_critic:
            logits = min(self.logits_chunk, tokens) * args.vocab_size / layout.tp * 4
        head = logits + 2 * tokens * args.dim * item
        return {"activations": rotation + max(block, head)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRank:
    """One device of a native inference server."""

    shape: Shape
    device: Device
    tp: int = 1
    itemsize: int = 2
    is_fp8: bool = False
    page_size: int = 16
    num_pages: int | None = None
    max_running: int = 512
    reserved_bytes: float = 0.0  # of the device, by others
    stages_weights: bool = False  # a new version arrives on the device while the old one serves

    def memory(self, process: str) -> Memory:
        held = self._held()
        held["cache"] = self.cache_bytes
        phases = {"decode": held | self._graphs(), "prefill": held | self._prefill()}
        if self.stages_weights:
            # Of a server over several devices the first receives all.
            staged = self.shape.num_weights * self.itemsize
            phases["update"] = held | self._graphs() | {"staged": float(staged)}
        return Memory(process, phases)

    def _held(self) -> Parts:
        args = self.shape.args
        context = args.max_position_embeddings
        num_tables = 1 if args.window_rope is None else 2
        tables = num_tables * context * args.head_dim * self.itemsize
        words = 2 + args.vocab_size / 32 * 3 / context
        slots = (self.max_running + 1) * (context * (1 + 1 / self.page_size) + words * context) * 4
        return {
            "weights": self.weight_bytes,
            **({} if args.delta is None else {"states": self.num_states * self.state_bytes}),
            "tables": tables + (slots if self.device.kind == "cuda" else 0.0),
            "libraries": self.device.library_gib * GIB,
        }

    @property
    def weight_bytes(self) -> float:
        shape = self.shape
        if not self.is_fp8:
            # The embedding is whole on every rank, a head of its own is cut.
            args = shape.args
            embedding = args.vocab_size * args.dim * (self.tp - 1) / self.tp
            return (shape.num_weights / self.tp + embedding) * self.itemsize
        blocks = shape.used_by_token
        rest = shape.num_weights - blocks
        return blocks * (1 + 4 / _FP8_BLOCK) + rest * self.itemsize

    @property
    def token_bytes(self) -> float:
        shape = self.shape
        cached = shape.cached_per_token(self.tp, self.device.kind)
        if self.is_fp8:
            return cached + 4 * shape.kv_heads_in_layers / self.tp
        moe = shape.args.moe
        routed = 0 if moe is None else len(moe.layers) * moe.top_k
        return cached * self.itemsize + routed

    @property
    def pages(self) -> int:
        if self.num_pages is not None:
            return self.num_pages
        context_pages = -(-self.shape.args.max_position_embeddings // self.page_size) + 1
        affordable = int(self._cache_budget() // (self.token_bytes * self.page_size))
        return 1 + min(self.max_running * context_pages, max(affordable, context_pages))

    @property
    def state_bytes(self) -> float:
        """Of one state of all recurrent layers: float32 matrices, and rows of a convolution."""
        delta = self.shape.args.delta
        if delta is None:
            return 0.0
        rows = (delta.conv_size - 1) * sum(delta.widths) * self.itemsize
        matrices = delta.num_value_heads * delta.key_dim * delta.value_dim * 4
        return len(delta.layers) * (rows + matrices) / self.tp

    @property
    def num_states(self) -> int:
        """0 without recurrent layers."""
        if self.shape.args.delta is None:
            return 0
        affordable = int(self._cache_budget() // self.state_bytes)
        return max(_MIN_STATES, min(1 + self.max_running * _STATES_OF_REQUEST, affordable))

    def _cache_budget(self) -> float:
        """As the engine takes it: half of what is free once the weights are there, and half of that
        where there are states, which get the other half."""
        share = 1.0 if self.shape.args.delta is None else 0.5
        if self.device.kind == "cpu":
            return _CPU_CACHE_BYTES * share
        free = self.device.memory_bytes - self.reserved_bytes - self.weight_bytes
        return max(free, 0.0) * _FREE_SHARE * share

    @property
    def cache_bytes(self) -> float:
        return self.pages * self.page_size * self.token_bytes

    @property
    def cache_tokens(self) -> int:
        return (self.pages - 1) * self.page_size

    def _graphs(self) -> Parts:
        """The memory all captured steps share: the logits and activations of the largest."""
        if self.device.kind == "cpu":
            return {}
        args = self.shape.args
        rows = self.max_running
        logits = rows * args.vocab_size * 4
        return {"graphs": logits + rows * self._row_numbers() * self.itemsize}

    def _prefill(self) -> Parts:
        has_kernels = self.shape.has_kernels(self.tp, self.is_fp8)
        tokens = _PREFILL_TOKENS[self.device.kind] if has_kernels else TORCH_PREFILL
        return {"activations": tokens * self._row_numbers() * self.itemsize}

    def _row_numbers(self) -> float:
        """Numbers of a row that exist at once: residual, norm, heads, gate, up and product. By
        kernels a head of latent attention has a query and a result of the cache's width, too."""
        shape, latent = self.shape, self.shape.args.latent
        width = shape.widest_feed_forward
        heads = 2 * shape.query_width + 2 * shape.kv_width
        if latent is not None and self.device.kind == "cuda":
            widths = latent.cached_dim + latent.kv_rank + latent.value_dim
            heads = shape.query_width + shape.args.n_heads * widths
        return 3 * shape.args.dim + (heads + 3 * width) / self.tp
