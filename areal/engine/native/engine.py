"""The native inference engine: continuous batching over a paged cache, one token per step.

    engine = NativeEngine.from_pretrained("path/to/model")
    engine.add(GenRequest("a", prompt_ids, gconfig))
    while engine.has_work:
        for done in engine.step(): ...
    engine.load_weights(named_tensors, version=1, recompute_kv=True)     # between two steps

A step is one packed forward: a row for the next token of each decoding sequence, and up to
`max_prefill_tokens` rows of prompts (and of outputs to compute again after a preemption). Requests
with the same prompt share its computation: it is a `Prefix` with rows of its own, and each of them
draws its first token from the prefix's last hidden state.

Invariant (CPU): tokens and log-probabilities of a request are, bit for bit, a function of weights,
prompt, seed and options. All row functions are independent of the other rows: matrix products
because every forward has whole tiles of rows (rows.py), attention as attention.py tells.

Not thread-safe: one thread owns it (loop.py). Shapes: T rows, R sampled rows, D model dim.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from areal.api.io_struct import StopReason
from areal.engine.native.attention import KVCache, PagedAttention
from areal.engine.native.pages import PagePool, Prefix
from areal.engine.native.rows import Rows, padded
from areal.engine.native.sampler import sample
from areal.engine.native.scheduler import Scheduler
from areal.engine.native.sequence import Finished, GenRequest, Sequence
from areal.models.common.decoder import Decoder
from areal.models.hf_io import build_model, check_hf_shapes, load_hf, read_hf_config
from areal.utils.cpu_matmul import use_plain_blas

_DEFAULT_CACHE_BYTES = 1 << 30


class NativeEngine:
    def __init__(
        self,
        model: Decoder,
        *,
        eos_ids: Iterable[int] = (),
        page_size: int = 16,
        num_pages: int | None = None,
        max_running: int = 512,
        max_prefill_tokens: int = 4096,
        seed: int = 0,
    ) -> None:
        """`num_pages=None`: enough for `max_running` full contexts, within 1 GiB.

        `seed` draws the seeds of requests that bring none.
        """
        args, weight = model.args, model.tok_embeddings.weight
        self.device = weight.device
        if self.device.type == "cpu":
            use_plain_blas()
        token_bytes = 2 * args.n_layers * args.n_kv_heads * args.head_dim * weight.itemsize
        if num_pages is None:
            context_pages = -(-args.max_position_embeddings // page_size) + 1
            affordable = max(_DEFAULT_CACHE_BYTES // (token_bytes * page_size), context_pages)
            num_pages = 1 + min(max_running * context_pages, affordable)
        self.model = model.eval()
        self.version = 0
        self._pool = PagePool(num_pages, page_size)
        self._max_prefill_tokens = max_prefill_tokens
        self._max_context = min(args.max_position_embeddings, self._pool.num_usable * page_size)
        self._scheduler = Scheduler(
            self._pool,
            max_running=max_running,
            max_pages=self._pool.pages_for(self._max_context),
        )
        self._cache = KVCache(
            num_layers=args.n_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=args.n_kv_heads,
            head_dim=args.head_dim,
            dtype=weight.dtype,
            device=self.device,
        )
        self._eos_ids = frozenset(eos_ids)
        self._seeds = random.Random(seed)
        self._by_rid: dict[str, Sequence] = {}
        self._counts = {"tokens_generated": 0, "tokens_prefilled": 0, "steps": 0, "finished": 0}

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        max_running: int = 512,
        seed: int = 0,
    ) -> NativeEngine:
        """A Hugging Face folder. `dtype=None`: float32 on the CPU, bfloat16 elsewhere."""
        if dtype is None:
            dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
        model = build_model(path, device=device, dtype=dtype)
        load_hf(model, path)
        return cls(
            model,
            eos_ids=read_eos_ids(path),
            page_size=page_size,
            num_pages=num_pages,
            max_running=max_running,
            seed=seed,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._by_rid)

    def add(self, request: GenRequest) -> None:
        """Queue a request. ValueError, naming the field, when it could never run."""
        options = request.gconfig
        self._check(request)
        eos_ids = frozenset() if options.ignore_eos else self._eos_ids
        seed = self._seeds.getrandbits(64) if options.seed is None else options.seed
        sequence = Sequence(
            rid=request.rid,
            prompt=tuple(request.input_ids),
            gconfig=options,
            seed=seed % 2**64,
            stop_ids=eos_ids | frozenset(options.stop_token_ids),
            max_output=min(
                options.max_new_tokens, self._max_tokens(request) - len(request.input_ids)
            ),
        )
        self._by_rid[sequence.rid] = sequence
        self._scheduler.waiting.append(sequence)

    def abort(self, rid: str) -> Finished | None:
        """End a request now with the tokens it has; None when it is not here."""
        sequence = self._by_rid.pop(rid, None)
        if sequence is None:
            return None
        if sequence.slot is None:
            self._scheduler.waiting.remove(sequence)
        else:
            self._scheduler.release(sequence)
        return sequence.finish("abort")

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """One token for every sequence that can draw one; returns those that ended."""
        if not self._by_rid:
            return []
        self._counts["steps"] += 1
        self._scheduler.grow()
        self._scheduler.admit()
        drawing, hidden = self._compute()
        return self._draw(drawing, torch.cat(hidden)) if drawing else []

    def load_weights(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        *,
        recompute_kv: bool,
    ) -> None:
        """Take new weights between two steps; running requests go on with them.

        `recompute_kv` computes their cache again; otherwise they keep what older weights wrote.
        Names and shapes are checked first: on ValueError the old weights are whole.
        """
        tensors = list(named_tensors)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
        check_hf_shapes(self.model, shapes, source=f"version {version}")
        for name, tensor in tensors:
            self.model.load_hf_tensor(name, tensor)
        self.version = version
        if recompute_kv:
            self._scheduler.send_all_back()
        self._scheduler.prefixes.forget()

    def stats(self) -> dict[str, float]:
        scheduler = self._scheduler
        return {
            **self._counts,
            "version": self.version,
            "running": scheduler.num_running,
            "waiting": len(scheduler.waiting),
            "preemptions": scheduler.num_preemptions,
            "prefixes": len(scheduler.prefixes),
            "pages_in_use": self._pool.num_usable - self._pool.num_free,
            "pages_total": self._pool.num_usable,
        }

    def _check(self, request: GenRequest) -> None:
        ids, vocab_size = request.input_ids, self.model.args.vocab_size
        if request.rid in self._by_rid:
            raise ValueError(f"rid {request.rid!r} is already running: give each request its own")
        if not ids:
            raise ValueError("input_ids is empty: a prompt needs at least one token")
        stop_ids = request.gconfig.stop_token_ids
        for field, tokens in (("input_ids", ids), ("stop_token_ids", stop_ids)):
            if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
                raise ValueError(
                    f"{field} must lie in [0, {vocab_size}), the model's vocabulary, "
                    f"got {min(tokens)} to {max(tokens)}"
                )
        if len(ids) >= self._max_tokens(request):
            raise ValueError(
                f"input_ids has {len(ids)} tokens, which leaves no room for output: the limit of "
                f"prompt and output is {self._max_tokens(request)}, the smallest of "
                f"gconfig.max_tokens ({request.gconfig.max_tokens}), the model's context "
                f"({self.model.args.max_position_embeddings}) and the cache "
                f"({self._pool.num_usable} pages of {self._pool.page_size}: raise num_pages)"
            )

    def _max_tokens(self, request: GenRequest) -> int:
        """Most tokens of prompt and output: what one request can hold with the cache to itself."""
        size = self._pool.page_size
        # The prefix's partial page is held once by the prefix and copied once by the sequence.
        cache_pages = self._pool.num_usable - (1 if len(request.input_ids) % size else 0)
        return min(request.gconfig.max_tokens, self._max_context, cache_pages * size)

    def _compute(self) -> tuple[list[Sequence], list[torch.Tensor]]:
        """Run this step's rows. Returns who draws a token now, and their hidden states [.., D]."""
        rows = Rows()
        self._add_decode_rows(rows)
        complete = self._add_prefill_rows(rows)
        drawing, hidden = list(self._scheduler.decoding), []
        if rows.count:
            hidden_TD = self._run_model(rows)
            hidden.append(hidden_TD[: len(drawing)])
            for item, row in complete.items():
                if isinstance(item, Prefix):
                    self._scheduler.prefixes.complete(item, hidden_TD[row].clone())
                else:
                    drawing.append(item)
                    hidden.append(hidden_TD[row : row + 1])
        for sequence, hidden_D in self._attach():
            drawing.append(sequence)
            hidden.append(hidden_D[None])
        return drawing, hidden

    def _add_decode_rows(self, rows: Rows) -> None:
        if not self._scheduler.decoding:
            return
        table, slots = self._scheduler.slots, self._scheduler.decoding_slots()
        positions = table.num_tokens[slots] - 1
        width = int(positions.max()) // self._pool.page_size + 1
        rows.add(table.last_token[slots], positions, table.pages[slots, :width])

    def _add_prefill_rows(self, rows: Rows) -> dict[Prefix | Sequence, int]:
        """Add what the budget allows; returns those that get complete, with their last row."""
        scheduler, budget = self._scheduler, self._max_prefill_tokens
        complete: dict[Prefix | Sequence, int] = {}
        refilling = (s for s in scheduler.filling if s.prefix is None)
        for item in (*scheduler.prefixes.pending, *refilling):
            start, end = item.num_cached, min(item.num_tokens, item.num_cached + budget)
            if start == end:
                break
            rows.add(
                np.array(item.token_slice(start, end)), np.arange(start, end), np.array(item.pages)
            )
            item.num_cached = end
            budget -= end - start
            if end == item.num_tokens:
                complete[item] = rows.count - 1
        self._counts["tokens_prefilled"] += self._max_prefill_tokens - budget
        return complete

    def _run_model(self, rows: Rows) -> torch.Tensor:
        """Hidden states [T, D] of all rows; their keys and values are in the cache then."""
        tokens_T, positions_T, pages_TP = rows.build()
        return self.model(
            torch.from_numpy(tokens_T).to(self.device),
            torch.from_numpy(positions_T).to(self.device),
            PagedAttention(self._cache, positions_T, pages_TP),
        )

    def _attach(self) -> list[tuple[Sequence, torch.Tensor]]:
        """Hand computed prefixes to the sequences that wait for them.

        Returns those that draw their first token now, with the hidden state they draw it from. The
        others (preempted before) still have their output to compute again.
        """
        size, scheduler = self._pool.page_size, self._scheduler
        starting, sources, targets = [], [], []
        for sequence in scheduler.filling:
            prefix = sequence.prefix
            if prefix is None or not prefix.is_ready:
                continue
            if prefix.num_tokens % size:
                sources.append(prefix.pages[-1])
                targets.append(sequence.pages[prefix.num_tokens // size])
            if not sequence.output_tokens:
                starting.append((sequence, prefix.last_hidden))
            scheduler.prefixes.attach(prefix)
            sequence.prefix, sequence.num_cached = None, prefix.num_tokens
        if sources:
            self._cache.copy_pages(sources, targets)
        return starting

    def _draw(self, drawing: list[Sequence], hidden_RD: torch.Tensor) -> list[Finished]:
        """Sample one token for each of `drawing`; take out those that end with it."""
        table = self._scheduler.slots
        slots = np.fromiter((s.slot for s in drawing), np.int64, len(drawing))
        options = table.sampling_options(slots)
        for row in np.flatnonzero(options.index < table.min_output[slots]).tolist():
            options.banned[row] = sorted(drawing[row].stop_ids)
        num_padding = padded(len(drawing)) - len(drawing)
        logits_RV = self.model.logits(F.pad(hidden_RD, (0, 0, 0, num_padding)))[: len(drawing)]
        tokens, logprobs = sample(logits_RV, options)
        table.append(slots, tokens)
        self._counts["tokens_generated"] += len(tokens)
        return self._record(drawing, tokens, logprobs)

    def _record(
        self, drawing: list[Sequence], tokens: list[int], logprobs: list[float]
    ) -> list[Finished]:
        scheduler, version = self._scheduler, self.version
        ended: list[tuple[Sequence, StopReason]] = []
        now = time.monotonic()
        for sequence, token, logprob in zip(drawing, tokens, logprobs, strict=True):
            if not sequence.output_tokens:
                sequence.first_token_time = now
            sequence.output_tokens.append(token)
            sequence.output_logprobs.append(logprob)
            sequence.output_versions.append(version)
            if token in sequence.stop_ids:
                ended.append((sequence, "stop"))
            elif len(sequence.output_tokens) >= sequence.max_output:
                ended.append((sequence, "length"))
        for sequence, _ in ended:
            scheduler.release(sequence)
            del self._by_rid[sequence.rid]
        for sequence in drawing:
            if sequence in scheduler.filling:
                scheduler.promote(sequence)
        self._counts["finished"] += len(ended)
        return [sequence.finish(reason) for sequence, reason in ended]


def read_eos_ids(path: str | Path) -> list[int]:
    """End tokens of a model folder: those of generation_config.json, or else of config.json."""
    file = Path(path) / "generation_config.json"
    generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    eos = generation.get("eos_token_id", read_hf_config(path).get("eos_token_id"))
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
