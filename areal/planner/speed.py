"""How long does work take? Seconds of a micro-batch, an optimizer step, a decode step, a prefill.

Rooflines: operations at the rate and bytes at the bandwidth that the device reaches (devices.py),
plus latencies of kernels. Parts that a device does one after the other are added, those that run at
the same time take as long as the longer one.

Conventions: lengths in tokens; a product with a weight is 2 operations per token and number;
backward is twice forward; causal attention is 4 operations per (query, key) pair and number of the
queries' width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal.models.vision.args import VisionArgs
from areal.planner.devices import Device
from areal.planner.shapes import TORCH_PREFILL, Shape
from areal.planner.towers import tower_kept, tower_pairs, tower_products

_LOGIT_BYTES_TRAINING = 24  # float32 logits written and read, twice, and their gradients
_LOGIT_BYTES_FORWARD = 8
_LOGIT_BYTES_SAMPLING = 15  # the passes of a draw
# Bytes of a number of a recurrent state, float32, read and written by a kernel that reaches 63 % of
# the bandwidth.
_STATE_TRAFFIC = 8 / 0.63
# Per weight: gradients and their norm; masters and moments read and written. On a GPU in one pass,
# elsewhere gradients are gathered and clipped before.
_OPTIMIZER_BYTES = {"cuda": 34, "cpu": 48}
_FULL_RATE_HEAD = 128  # dims of a head: attention of smaller ones spends its time on exponentials
_FITTED_DIM, _TILE_DIM = 1536, 400  # model dim that matrix_share was fitted to; what tiles cost
_SCORE_BYTES = 4 * 14  # passes over the float32 scores of attention without a fused kernel
_ADAPTER_TRAFFIC = 4  # passes over the outputs of layers with an adapter, in a forward or backward
# Operations of a block's forward pass, and what norms in float32 add. Backward has twice as many.
_BLOCK_OPS, _FLOAT_NORM_OPS = 50, 30
_RECURRENT_OPS = 20  # of a token in a recurrent layer
_ROW_TRAFFIC = 1.5  # passes over a row's activations in a decode step
# The host takes a prompt and finds its pages in the cache while the device waits: 52 ms for 128
# prompts of 2,944 tokens, most of them cached, on the host of an H200.
_PROMPT_TOKEN_S = 0.14e-6
_REDUCE_LATENCY_S = 10e-6  # of an all-reduce of a few rows
_MIN_SHARED_PROMPT = 512  # tokens: shorter prompts are read by each sample for itself


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of a training engine along each axis."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    replicas: int = 1  # copies of the weights among dp
    stages_per_rank: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def shards(self) -> int:
        """Ranks over which FSDP shards a tensor that one rank of tp holds."""
        return self.dp // self.replicas * self.cp


def tower_s(vision: VisionArgs, image_tokens: float, device: Device, flops: float) -> float:
    """Forward pass over one image: products, and attention among its patches."""
    patches = vision.merge_size**2 * image_tokens
    rate = device.attention_tflops * 1e12 * patches / (patches + device.attention_half_length)
    if device.kind == "cuda":
        rate *= min(1.0, vision.dim / vision.n_heads / _FULL_RATE_HEAD)
    attention = 4 * vision.dim * tower_pairs(vision, image_tokens) / rate
    return 2 * image_tokens * tower_products(vision) / flops + attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Speed of one training engine: of one of its ranks, all of which do the same."""

    shape: Shape
    device: Device
    layout: Layout = Layout()
    recompute: str = "none"  # none, selective or full
    compiled: bool = False
    itemsize: int = 2
    has_adapters: bool = False  # LoRA: other weights have no gradient

    def micro_batch_s(
        self, lengths: Sequence[float], *, copies: float = 1.0, trains: bool = True
    ) -> float:
        """One packed micro-batch of a data-parallel rank, with `copies` sequences of each length;
        of a pipeline its share of one."""
        layout, device = self.layout, self.device
        # Ranks of t and c divide its work evenly, those of p its layers.
        share = 1 / (layout.tp * layout.cp * layout.pp)
        compute = self._compute_s(lengths, trains) * copies * share
        host = (
            device.train_layer_us * self.shape.num_layers / layout.pp
            + device.train_row_us * len(lengths) * copies
        ) * 1e-6
        if not trains:
            host /= 3
        moved = self._exchange_s(sum(lengths) * copies, trains)
        return max(compute + host + moved, self._gather_s(trains), self._launch_s(trains))

    def look_s(self, images: float, image_tokens: float, *, trains: bool) -> float:
        """Of a vision tower over `images`, each of so many tokens; every rank of t and c does."""
        vision = self.shape.args.vision
        if vision is None or not image_tokens:
            return 0.0
        passes = (4 if self.recompute == "full" else 3) if trains else 1
        kept = tower_kept(vision, "none") * image_tokens * self.itemsize
        moved = self._traffic(trains) * kept / self.device.bandwidth
        one = passes * tower_s(vision, image_tokens, self.device, self._flops) + moved
        return images * one

    def _launch_s(self, trains: bool) -> float:
        """The host starts operations ahead of the device."""
        device, args = self.device, self.shape.args
        if self.compiled:
            return 0.0
        ops = _BLOCK_OPS + _FLOAT_NORM_OPS * args.zero_centered_norms
        passes = (4 if self.recompute == "full" else 3) if trains else 1
        block_us = passes * ops * device.train_op_us
        if trains and self.recompute == "selective":
            block_us = 2 * ops * (device.train_op_us + device.selective_op_us)
        return block_us * 1e-6 * self.shape.num_layers / self.layout.pp

    def _compute_s(self, lengths: Sequence[float], trains: bool) -> float:
        shape, device, tokens = self.shape, self.device, sum(lengths)
        passes = (4 if self.recompute == "full" else 3) if trains else 1
        products = passes - (self.has_adapters and trains)
        head = (4 if trains else 1) - (self.has_adapters and trains)
        flop = 2 * tokens * (products * self._body() + head * shape.head_weights)
        recurrent = 2 * tokens * shape.mixing / (device.recurrent_tflops * 1e12 or self._flops)
        logits = tokens * shape.head_weights / shape.args.dim
        logit_bytes = _LOGIT_BYTES_TRAINING if trains else _LOGIT_BYTES_FORWARD
        moved = self._traffic(trains) * tokens * shape.kept("compiled") * self.itemsize
        if self.has_adapters:
            outputs = tokens * shape.kept("selective") * self.itemsize
            moved += _ADAPTER_TRAFFIC * passes * outputs
        mixed = passes * (self._attention_s(lengths) + recurrent)
        return flop / self._flops + mixed + (moved + logit_bytes * logits) / device.bandwidth

    @property
    def _is_plain_float32(self) -> bool:
        """On a GPU: no tensor cores, and attention without a fused kernel."""
        return self.itemsize == 4 and self.device.matrix_float32_tflops > 0

    @property
    def _flops(self) -> float:
        device = self.device
        if self._is_plain_float32:
            return device.matrix_float32_tflops * 1e12
        if device.kind == "cpu":
            return device.flops
        # Products over few numbers spend much of their time at the start and the end of a tile.
        dim = self.shape.args.dim
        reached = dim / (dim + _TILE_DIM) * (_FITTED_DIM + _TILE_DIM) / _FITTED_DIM
        return device.flops * min(reached, 1.0)

    def _traffic(self, trains: bool) -> float:
        """Passes over the kept activations."""
        device = self.device
        traffic = device.traffic_compiled if self.compiled else device.traffic_eager
        if not trains:
            return traffic / 3
        again = self.recompute == "full" or (self.recompute == "selective" and not self.compiled)
        return traffic * 4 / 3 if again else traffic

    def _attention_s(self, lengths: Sequence[float]) -> float:
        """Of a forward pass; backward takes twice as long."""
        shape, device = self.shape, self.device
        width = 4 * shape.attention_width
        if self._is_plain_float32:
            pairs = sum(length**2 for length in lengths)
            scores = pairs * len(shape.args.attention_layers) * shape.args.n_heads
            return width * pairs / self._flops + scores * _SCORE_BYTES / 3 / device.bandwidth
        pairs = [(length, shape.attention_pairs(length)) for length in lengths]
        return sum(width * p / self._attention_rate(length) for length, p in pairs)

    def _body(self) -> float:
        """Weights a token is multiplied with; those of experts count for their lower rate."""
        shape = self.shape
        if shape.args.moe is None:
            return shape.used_by_token
        experts = shape.args.moe.top_k * len(shape.args.moe.layers) * shape.one_expert
        return shape.used_by_token + experts * (1 / self.device.expert_share - 1)

    def _attention_rate(self, length: float) -> float:
        device, rate = self.device, self.device.attention_tflops * 1e12
        if device.kind == "cuda":
            rate *= min(1.0, self.shape.args.head_dim / _FULL_RATE_HEAD)
        return rate * length / (length + device.attention_half_length)

    def _exchange_s(self, tokens: float, trains: bool) -> float:
        """What waits for other ranks within a layer: tensor, context and expert parallelism."""
        shape, layout, device = self.shape, self.layout, self.device
        layers = shape.num_layers / layout.pp
        times = 3 if trains else 1
        seconds = 0.0
        rows = tokens / layout.cp * self.itemsize
        if layout.tp > 1:
            # Two gathers and two scatters of all rows a layer.
            part = (layout.tp - 1) / layout.tp
            seconds += 4 * rows * shape.args.dim * part / device.link(layout.tp)
        if layout.cp > 1:
            width = 2 * (shape.query_width + shape.kv_width) / layout.tp
            seconds += rows * width / device.link(layout.tp * layout.cp)
        if layout.ep > 1 and shape.args.moe is not None:
            chosen = 2 * shape.args.moe.top_k * shape.args.dim / layout.tp
            seconds += rows * chosen / device.link(layout.ep * layout.etp)
        return times * layers * seconds

    def _gather_s(self, trains: bool) -> float:
        """FSDP moves weights while it computes: gathered forward and backward, in the dtype of
        products, and gradients scattered in float32."""
        layout, shape = self.layout, self.shape
        if layout.shards == 1:
            return 0.0
        numbers = shape.num_weights / (layout.tp * layout.pp)
        if layout.ep > 1:
            experts = shape.all_expert_weights / layout.pp
            numbers += experts / (layout.ep * layout.etp) - experts / layout.tp
        bytes_each = 2 * self.itemsize + 4 if trains else self.itemsize
        part = (layout.shards - 1) / layout.shards
        return numbers * bytes_each * part / self.device.link(layout.shards * layout.tp)

    def bubble(self, num_micro_batches: int) -> float:
        """Factor on the time of a step: a pipeline fills and drains."""
        layout = self.layout
        return 1 + (layout.pp - 1) / (max(num_micro_batches, 1) * layout.stages_per_rank)

    def optimizer_s(self) -> float:
        layout = self.layout
        own = self.shape.num_weights / (layout.shards * layout.tp * layout.pp)
        return own * _OPTIMIZER_BYTES[self.device.kind] / self.device.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Speed of one inference server (the native engine) over `tp` devices."""

    shape: Shape
    device: Device
    tp: int = 1
    itemsize: int = 2
    is_fp8: bool = False

    def step_s(self, rows: float, cached: float, *, is_shared: bool = False) -> float:
        """A decode step of `rows` sequences that read `cached` tokens of cache together;
        `is_shared`: some of them a prompt that they share."""
        if rows <= 0:
            return 0.0
        shape, device = self.shape, self.device
        body_item = 1 if self.is_fp8 else self.itemsize
        head = shape.head_weights
        read = shape.read_by_rows(rows) * body_item + head * self.itemsize
        bandwidth = device.bandwidth * device.read_share
        flop = 2 * rows * shape.used_by_token / self._flops()
        flop += 2 * rows * head / device.flops
        products = max(read / bandwidth, flop)
        cache = cached * self._cache_bytes_per_token / bandwidth
        if is_shared:
            cache /= device.shared_share
        moved = _ROW_TRAFFIC * rows * shape.kept("compiled") * self.itemsize
        moved += _LOGIT_BYTES_SAMPLING * rows * shape.args.vocab_size
        moved += _STATE_TRAFFIC * rows * shape.state_per_sequence
        work = (products + moved / device.bandwidth) / self.tp + cache
        return work + self._latency_s(rows) + device.row_us * rows * 1e-6

    @property
    def _cache_bytes_per_token(self) -> float:
        """Of one rank."""
        shape, cached = self.shape, self.shape.cached_per_token(self.tp, self.device.kind)
        if self.is_fp8:
            return cached + 4 * shape.kv_heads_in_layers / self.tp  # a scale for each head
        return cached * self.itemsize

    def _flops(self) -> float:
        device = self.device
        if self.is_fp8 and device.matrix_fp8_tflops:
            return device.matrix_fp8_tflops * 1e12 * device.fp8_matrix_share
        return device.flops

    @property
    def _has_kernels(self) -> bool:
        return self.shape.has_kernels(self.tp, self.is_fp8)

    def _latency_s(self, rows: float) -> float:
        shape, device = self.shape, self.device
        is_few = rows <= (4 if shape.args.moe is not None else 8) and self.tp == 1
        is_few &= shape.args.latent is None
        layer_us = device.layer_us_few if is_few else device.layer_us_many
        layer_us += device.layer_us_fp8 * self.is_fp8
        if not self._has_kernels:
            layer_us = max(layer_us, device.layer_us_torch)
        seconds = shape.num_layers * layer_us * 1e-6
        if shape.args.moe is not None:
            seconds += len(shape.args.moe.layers) * device.layer_us_expert * 1e-6
        if self.tp > 1:
            sent = 2 * rows * shape.args.dim * self.itemsize / device.link(self.tp)
            seconds += shape.num_layers * 2 * (_REDUCE_LATENCY_S + sent)
        return seconds

    def prefill_s(self, tokens: float, length: float, cached: float = 0.0) -> float:
        """Prompts with `tokens` in all, in sequences of `length` of which `cached` are in the
        cache already."""
        if tokens <= 0:
            return 0.0
        shape, device = self.shape, self.device
        seconds = 2 * tokens * shape.used_by_token / self._flops()
        pairs = shape.attention_pairs(length) - shape.attention_pairs(cached)
        rate = device.attention_tflops * 1e12 * length / (length + device.attention_half_length)
        width = 4 * shape.attention_width
        prompts = tokens / max(length - cached, 1)
        seconds += prompts * width * pairs / rate
        kept = tokens * shape.kept("compiled") * self.itemsize
        seconds += _ROW_TRAFFIC * kept / device.bandwidth
        if not self._has_kernels:
            seconds += self._position_s * max(tokens / TORCH_PREFILL, 1.0) * (length - cached)
        return seconds / self.tp + prompts * length * _PROMPT_TOKEN_S

    def look_s(self, image_tokens: float) -> float:
        """Of a vision tower over one image; every rank does."""
        vision = self.shape.args.vision
        if vision is None or not image_tokens:
            return 0.0
        moved = image_tokens * tower_kept(vision, "none") * self.itemsize
        seconds = tower_s(vision, image_tokens, self.device, self.device.flops)
        return seconds + _ROW_TRAFFIC * moved / self.device.bandwidth

    @property
    def _position_s(self) -> float:
        """Recurrent layers compute a prompt token by token; all prompts of a batch together."""
        delta = self.shape.args.delta
        layers = 0 if delta is None else len(delta.layers)
        return layers * _RECURRENT_OPS * self.device.train_op_us * 1e-6

    def batch_s(
        self, lengths: Sequence[int], prompt: int, num_prompts: float, *, copies: float = 1.0
    ) -> float:
        """All of these outputs, `copies` of each, started together; each of the `num_prompts`
        prompts of `prompt` tokens has equally many of them."""
        ends = sorted(lengths)
        seconds, start = self.prefill_s(prompt * num_prompts, prompt), 0
        for done, end in enumerate(ends):
            if end > start:
                rows = (len(ends) - done) * copies
                output = (start + end) / 2
                seconds += (end - start) * self.step_of_s(rows, prompt, output, num_prompts)
                start = end
        return seconds

    def step_of_s(self, rows: float, prompt: float, output: float, num_prompts: float) -> float:
        """A step of `rows` sequences that have drawn `output` tokens each. Samples of one long
        prompt read it together."""
        whole = self.shape.cached_tokens_read(prompt + output)
        if num_prompts >= rows or prompt < _MIN_SHARED_PROMPT:
            return self.step_s(rows, rows * whole)
        own = self.shape.cached_tokens_read(output)
        return self.step_s(rows, rows * own + num_prompts * (whole - own), is_shared=True)
