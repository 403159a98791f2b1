"""The native inference engine: continuous batching over a paged cache.

    engine = NativeEngine.from_pretrained("path/to/model")
    engine.add(GenRequest("a", prompt_ids, gconfig))
    while engine.has_work:
        for done in engine.step(): ...
    engine.load_weights(named_tensors, version=1, recompute_kv=True)     # between two steps

A step *launches* work on the device and *records* what an earlier launch has drawn:

    launch   decode: the next tokens of all decoding sequences (one, or a few on a GPU)
             prefill: up to `max_prefill_tokens` of prompts, and of outputs to compute again
             draw: the first token of sequences whose prompt is now computed
    record   read tokens and log-probabilities of the oldest launch; end complete sequences

A GPU runs ahead: while the host records one launch, the next one runs. A sequence that turns out to
have ended drew a few extra tokens, which are dropped. Its pages can be reused at once: all device
work is ordered, so new writes come after its last ones. Operations that need every token (abort,
preemption, new weights) first *drain*: record all launches in flight. So does every launch while a
running request has a grammar: which tokens it allows next depends on the last one. Such launches
are of one step.

Requests with the same prompt share its computation: it is a `Prefix` with its own pages, and each
request draws its first token from the prefix's last hidden state. A prompt that begins like one
computed before, as the next turn of a dialogue does, is computed from its first new page on.

Not thread-safe: one thread owns it (loop.py). Shapes: C chunks, R sampled rows, D model dim.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from areal.api.io_struct import StopReason
from areal.engine.native.adapters import AdapterBank, merged, read_adapter
from areal.engine.native.admission import Limits
from areal.engine.native.drafts import Drafts
from areal.engine.native.kv_cache import PagePool, Prefix
from areal.engine.native.make_runner import checked_num_states, default_num_pages, make_runner
from areal.engine.native.runner import Drawn, Runner
from areal.engine.native.scheduler import Scheduler
from areal.engine.native.scoring import ScoredTokens, check_tokens, score
from areal.engine.native.sequence import Finished, GenRequest, Progress, Sequence
from areal.engine.native.sights import SightCache
from areal.engine.native.tokenizer import read_eos_ids
from areal.models.common.decoder import Decoder
from areal.models.common.tensor_parallel import Ranks
from areal.models.hf_io import build_model, check_hf_shapes, default_dtype, load_hf
from areal.models.lora_files import read_peft
from areal.utils.hub import model_folder

DEVICE_PARTS = frozenset({"weights", "kv_cache"})  # can be offloaded


@dataclass(slots=True)
class _Launch:
    """A launch in flight: tokens for these sequences, drawn by the weights of `version`."""

    sequences: list[Sequence]
    drawn: Drawn
    version: int


class NativeEngine:
    loads_files = False  # `load_weights` takes tensors from anywhere

    def __init__(
        self,
        model: Decoder,
        *,
        eos_ids: Iterable[int] = (),
        page_size: int = 16,
        num_pages: int | None = None,
        num_states: int | None = None,
        max_running: int = 512,
        max_prefill_tokens: int | None = None,
        batch_invariant: bool = False,
        drafts: bool = True,
        seed: int = 0,
        folder: Path | None = None,
    ) -> None:
        """`num_pages=None`: enough for `max_running` full contexts, bounded by memory; likewise
        `num_states`, of a model with recurrent layers.

        `seed` draws the seeds of requests without one. `batch_invariant`: tokens and
        log-probabilities of a request do not depend, bit for bit, on the requests beside it.
        `drafts`: check guesses of several tokens at once where that is faster (drafts.py).
        `folder`: of the model, from which adapters are merged where they cannot be added by row.
        """
        args, weight = model.args, model.embedding_weight
        if num_pages is None:
            num_pages = default_num_pages(model, page_size=page_size, max_running=max_running)
        num_states = checked_num_states(model, num_states, max_running=max_running)
        self.model = model.eval()
        self.version = 0
        self._pool = PagePool(num_pages, page_size)
        self._limits = Limits(args, self._pool, frozenset(eos_ids))
        self._scheduler = Scheduler(
            self._pool,
            max_running=max_running,
            max_pages=self._pool.pages_for(self._limits.max_context),
            states=None if num_states is None else PagePool(num_states, 1),
        )
        self.adapters = AdapterBank(model)
        self._folder, self.is_merged = folder, False
        self._make_runner = partial(
            make_runner,
            model,
            self._scheduler.slots,
            self.adapters,
            num_pages=num_pages,
            num_states=num_states,
            page_size=page_size,
            max_prefill_tokens=max_prefill_tokens,
            batch_invariant=batch_invariant,
        )
        self._runner: Runner | None = self._make_runner()  # None: its cache is offloaded
        self._adapted_weights = self._present_runner.adapted_weights
        self.device = weight.device
        self._sights = SightCache(weight.device)
        self.offloaded: frozenset[str] = frozenset()
        self._batch_invariant = batch_invariant
        self._under_way: deque[_Launch] = deque()
        self._drained: list[Finished | Progress] = []  # while draining; the next step returns them
        self._eos_ids = frozenset(eos_ids)
        self._seeds = random.Random(seed)
        self._by_rid: dict[str, Sequence] = {}
        self._drafts, self._has_drafts = Drafts(), drafts
        self._silent: set[str] = set()  # rids of streams whose first token is not reported yet
        self._counts = {
            "tokens_generated": 0,
            "tokens_prefilled": 0,
            "tokens_drafted": 0,
            "drafts_accepted": 0,
            "steps": 0,
            "finished": 0,
        }

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
        batch_invariant: bool = False,
        drafts: bool = True,
        seed: int = 0,
        ranks: Ranks | None = None,
    ) -> NativeEngine:
        """A folder or hub name. `dtype=None`: float32 on the CPU, bfloat16 elsewhere.

        With `ranks` it holds a shard of the model, and all ranks make the same calls
        (tensor_parallel.py).
        """
        path = model_folder(path)
        dtype = dtype or default_dtype(device)
        model = build_model(path, device=device, dtype=dtype, ranks=ranks)
        load_hf(model, path)
        return cls(
            model,
            eos_ids=read_eos_ids(path),
            page_size=page_size,
            num_pages=num_pages,
            max_running=max_running,
            batch_invariant=batch_invariant,
            drafts=drafts,
            seed=seed,
            folder=path,
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do; requests wait while parts are offloaded."""
        return bool(self._drained or (self._by_rid and not self.offloaded))

    def add(self, request: GenRequest) -> None:
        """Queue a request. ValueError, naming the field, if it could never run."""
        options = request.gconfig
        if request.rid in self._by_rid:
            raise ValueError(f"rid {request.rid!r} is already running: give each request its own")
        self._limits.check(request)
        adapter = self.adapters.number_of(options.lora_name)
        eos_ids = frozenset() if options.ignore_eos else self._eos_ids
        seed = self._seeds.getrandbits(64) if options.seed is None else options.seed
        sequence = Sequence(
            rid=request.rid,
            prompt=tuple(request.input_ids),
            gconfig=options,
            seed=seed % 2**64,
            stop_ids=eos_ids | frozenset(options.stop_token_ids),
            max_output=self._limits.max_output(request),
            images=request.images,
            adapter=adapter,
            pinned_version=self.adapters.version_of(adapter),
            progress_tokens=request.progress_tokens,
            return_routed_experts=request.return_routed_experts,
            stop_watch=request.stop_watch,
            grammar=request.grammar_state,
        )
        if request.so_far is not None:
            sequence.go_on_from(request.so_far)
        elif sequence.grammar is not None:
            self._check_can_begin(sequence)
        self._by_rid[sequence.rid] = sequence
        if self._has_drafts:
            self._drafts.join(sequence)
        if sequence.progress_tokens == 1:
            self._silent.add(sequence.rid)
        self._scheduler.waiting.append(sequence)

    def abort(self, rid: str) -> Finished | None:
        """End a request now with its tokens so far; None if it is unknown or has ended."""
        self._drain()
        sequence = self._by_rid.pop(rid, None)
        if sequence is None:
            return None
        self._silent.discard(rid)
        self._drafts.leave(sequence)
        if sequence.slot is None:
            self._scheduler.waiting.remove(sequence)
        else:
            self._scheduler.retire(sequence)
        return sequence.finish("abort")

    @torch.inference_mode()
    def step(self) -> list[Finished | Progress]:
        """Launch what can run and record drawn tokens; returns ended requests and progress."""
        launched = bool(self._by_rid) and not self.offloaded and self._launch()
        finished, self._drained = self._drained, []
        ahead = self._present_runner.launches_ahead if launched else 0
        while len(self._under_way) > ahead:
            finished += self._record(self._under_way.popleft())
        if not self._by_rid:
            self._under_way.clear()  # only tokens of requests that have ended
        return finished

    def load_weights(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        *,
        recompute_kv: bool,
    ) -> None:
        """Load new weights between two steps; running requests continue with them.

        `recompute_kv` recomputes their cache; otherwise they keep entries of older weights.
        Names and shapes are checked first: on ValueError the old weights are unchanged.
        """
        tensors = list(named_tensors)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
        check_hf_shapes(self.model, shapes, source=f"version {version}")
        self._drain()
        self.adapters.clear_live()
        self._sights.clear()
        self._write(tensors)
        self._go_on_with(version, recompute_kv)

    def load_adapter(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        *,
        alpha: float,
        name: str,
        recompute_kv: bool,
    ) -> None:
        """As `load_weights`, of an adapter of the weights the engine started with, which requests
        without a `lora_name` get; where several can be served, also as `NAME-vVERSION`."""
        adapter = read_adapter(self.model, named_tensors, alpha=alpha, version=version)
        self._drain()
        if self.adapters.takes(adapter, self._adapted_weights):
            self.adapters.set_live(adapter)
            in_use = {sequence.adapter for sequence in self._by_rid.values()}
            self.adapters.keep_version(name, adapter, in_use)
        elif self._folder is None or self.adapters.names:
            raise ValueError(
                "the adapter has to be merged here: the engine needs the model's folder, and no "
                f"named adapter beside it, got {self._folder} and {self.adapters.names}"
            )
        else:
            self.is_merged = True
            self._write(list(merged(adapter, self._folder)))
        self._go_on_with(version, recompute_kv)

    def add_adapter(self, name: str, folder: Path) -> None:
        """Serve the adapter of a PEFT folder to requests with this `lora_name`."""
        tensors, alpha = read_peft(folder)
        adapter = read_adapter(self.model, tensors.items(), alpha=alpha)
        if self.is_merged or not self.adapters.takes(adapter, self._adapted_weights):
            raise ValueError(
                "lora_name: named adapters are not served over several ranks, for experts, in FP8, "
                "beside a merged one, and on a GPU not batch-invariant, above rank 128 or for "
                "kv_b_proj: see areal merge"
            )
        self.adapters.add(name, adapter)

    def remove_adapter(self, name: str) -> None:
        number = self.adapters.number_of(name)
        if used := sum(sequence.adapter == number for sequence in self._by_rid.values()):
            raise ValueError(f"lora_name: {used} requests still use {name!r}; abort them first")
        self.adapters.remove(name)

    def _write(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        if self._runner is None:
            for name, tensor in tensors:
                self.model.load_hf_tensor(name, tensor)
        else:
            self._runner.load(tensors)

    def _go_on_with(self, version: int, recompute_kv: bool) -> None:
        self.version = version
        if recompute_kv:
            self._scheduler.send_all_back()
        self._scheduler.forget_prefixes()

    def score(self, sequences: list[list[int]], num_top: int = 0) -> list[ScoredTokens]:
        """Log-probabilities of given tokens (scoring.py), between two steps."""
        self.check_score(sequences)
        self.adapters.begin(np.zeros(1, np.int64))
        return score(self.model, sequences, num_top, batch_invariant=self._batch_invariant)

    def check_score(self, sequences: list[list[int]]) -> None:
        """ValueError if `score` cannot run."""
        if "weights" in self.offloaded:
            raise ValueError("the weights are offloaded: call onload first")
        check_tokens(sequences, self.model.args.vocab_size, self.model.args.vision)

    def offload(self, tags: Iterable[str] | None = None) -> None:
        """Free the device memory of these parts; running requests recompute their cache later."""
        leaving = parts_that_leave(tags)
        self._drain()
        self._scheduler.send_all_back()
        self._scheduler.forget_prefixes()
        self._sights.clear()
        self._runner = None
        if "weights" in leaving:
            self.model.to("cpu")
        self.offloaded |= leaving
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, tags: Iterable[str] | None = None) -> None:
        """Restore these parts; requests continue once nothing is offloaded."""
        back = device_parts(tags) & self.offloaded
        if "weights" in back:
            self.model.to(self.device)
        self.offloaded -= back
        if not self.offloaded and self._runner is None:
            self._runner = self._make_runner()

    def stats(self) -> dict[str, float]:
        scheduler = self._scheduler
        return {
            **self._counts,
            "version": self.version,
            "running": scheduler.num_running,
            "waiting": len(scheduler.waiting),
            "preemptions": scheduler.num_preemptions,
            "prefixes": len(scheduler.prefixes),
            "pages_shared": scheduler.prefixes.num_pages,
            "pages_in_use": self._pool.num_usable - self._pool.num_free,
            "pages_total": self._pool.num_usable,
            "states_in_use": scheduler.num_states_in_use,
            "images_seen": self._sights.num_looks,
        }

    @property
    def _present_runner(self) -> Runner:
        assert self._runner is not None, "nothing is launched while something is offloaded"
        return self._runner

    def _check_can_begin(self, sequence: Sequence) -> None:
        """An output has at least one token."""
        if sequence.allowed(self.model.args.vocab_size) is None:
            assert sequence.grammar is not None
            raise ValueError(
                sequence.grammar.fault
                or "grammar: allows no first token; with ignore_eos or min_new_tokens the text "
                "cannot be empty"
            )

    def _launch(self) -> bool:
        """Start this step's work; False when there is nothing to start."""
        self._counts["steps"] += 1
        scheduler = self._scheduler
        is_constrained = bool(scheduler.slots.constrained.any())
        if is_constrained:
            self._drain()
        # While prompts wait, one token at a time, so that their samples join soon; and until a
        # stream has begun, so that it begins with its first token.
        busy = is_constrained or scheduler.waiting or scheduler.filling or self._silent
        draft_length = 0 if busy else self._draft_length()
        if draft_length:
            self._drain()  # a draft follows the newest token
        num_steps = self._present_runner.steps_per_launch
        if busy or draft_length:
            num_steps = 1 + draft_length
        if self._under_way:
            num_lacking = int(scheduler.num_lacking(num_steps).sum())
            if not scheduler.prefixes.make_room(num_lacking):
                self._drain()  # a sequence must be preempted, with all its tokens
        scheduler.grow(num_steps)
        scheduler.admit()
        if draft_length:
            decoded = self._launch_drafts(draft_length)
        else:
            decoded = self._launch_decode(num_steps)
        started = self._launch_prefill()
        return decoded or started

    def _draft_length(self) -> int:
        """Tokens to draft for each decoding sequence; 0 while that is not worthwhile."""
        decoding, runner = self._scheduler.decoding, self._present_runner
        limit = runner.draft_length(len(decoding)) if decoding else 0
        if not limit:
            return 0
        cost = partial(runner.draft_cost, self._scheduler.decoding_slots())
        return self._drafts.best_length(decoding, limit, cost)

    def _launch_decode(self, num_steps: int) -> bool:
        self._constrain(self._scheduler.decoding)
        decoding, slots, remaining = self._still_drawing()
        if not decoding:
            return False
        num_steps = min(num_steps, int(remaining.max()))
        drawn = self._present_runner.decode(slots, num_steps)
        self._scheduler.slots.advance(slots, num_steps)
        self._under_way.append(_Launch(decoding, drawn, self.version))
        return True

    def _launch_drafts(self, length: int) -> bool:
        """Like a decode, but how far each sequence got is known only when it is recorded."""
        decoding, slots, remaining = self._still_drawing()
        if not decoding:
            return False
        drafts = [
            self._drafts.draft(sequence, min(length, room - 1))
            for sequence, room in zip(decoding, remaining.tolist(), strict=True)
        ]
        drawn = self._present_runner.verify(slots, drafts)
        counts = np.array([len(tokens) for tokens in drawn.read()[0]])
        self._scheduler.slots.advance(slots, counts)
        self._counts["tokens_drafted"] += sum(map(len, drafts))
        self._counts["drafts_accepted"] += int(counts.sum()) - len(counts)
        self._drained += self._record(_Launch(decoding, drawn, self.version))
        return True

    def _still_drawing(self) -> tuple[list[Sequence], np.ndarray, np.ndarray]:
        """Decoding sequences that have not drawn all their tokens, their slots and how many they
        have left."""
        decoding, slots = list(self._scheduler.decoding), self._scheduler.decoding_slots()
        table = self._scheduler.slots
        remaining = table.max_cached[slots] + 1 - table.num_tokens[slots]
        if (remaining <= 0).any():  # all drawn, not all read
            rows = np.flatnonzero(remaining > 0)
            decoding, slots, remaining = [decoding[r] for r in rows], slots[rows], remaining[rows]
        return decoding, slots, remaining

    def _launch_prefill(self) -> bool:
        """Prefill prompts and preempted outputs within the budget; draw for complete prompts."""
        spans = self._scheduler.next_to_prefill(self._present_runner.max_prefill_tokens)
        self._counts["tokens_prefilled"] += sum(span.end - span.start for span in spans)
        drawing: list[Sequence] = []
        hidden: list[torch.Tensor] = []
        if spans:
            runner = self._present_runner
            hidden_CD = runner.prefill([self._sights.chunk(span, runner.look) for span in spans])
            for (item, *_), hidden_D in zip(spans, hidden_CD, strict=True):
                if item.num_cached < item.num_tokens:
                    continue
                if isinstance(item, Prefix):
                    self._scheduler.prefixes.complete(item, hidden_D)
                else:
                    drawing.append(item)
                    hidden.append(hidden_D)
        for sequence, hidden_D in self._attach():
            drawing.append(sequence)
            hidden.append(hidden_D)
        if not self._constrain(drawing):
            hidden = [h for s, h in zip(drawing, hidden, strict=True) if not s.has_ended]
            drawing = [sequence for sequence in drawing if not sequence.has_ended]
        if drawing:
            slots = np.fromiter((s.slot for s in drawing), np.int64, len(drawing))
            drawn = self._present_runner.draw(slots, hidden)
            self._scheduler.slots.advance(slots, 1)
            for sequence in drawing:
                self._scheduler.promote(sequence)
            self._under_way.append(_Launch(drawing, drawn, self.version))
        return bool(spans or drawing)

    def _constrain(self, sequences: Iterable[Sequence]) -> bool:
        """Before they draw: masks of those with a grammar. False if some have ended instead, for
        want of a token that may follow."""
        table, all_can = self._scheduler.slots, True
        if not table.constrained.any():
            return True
        for sequence in [s for s in sequences if s.grammar is not None]:
            assert sequence.slot is not None, "only running sequences draw"
            mask = sequence.allowed(self.model.args.vocab_size)
            if mask is None:
                self._drained.append(self._end(sequence, "stop"))
                all_can = False
            else:
                table.allowed[sequence.slot] = mask
        return all_can

    def _attach(self) -> list[tuple[Sequence, torch.Tensor]]:
        """Attach waiting sequences to their computed prefixes.

        Returns those that draw their first token now, with the hidden state to draw it from. The
        others (preempted before) still have to recompute their output.
        """
        size, scheduler = self._pool.page_size, self._scheduler
        starting, sources, targets, states = [], [], [], []
        for sequence in scheduler.filling:
            prefix = sequence.prefix
            if prefix is None or not prefix.is_ready:
                continue
            if prefix.num_tokens % size:
                sources.append(prefix.pages[-1])
                targets.append(sequence.pages[prefix.num_tokens // size])
            if prefix.state is not None:
                states.append((prefix.state, sequence.state))
            if not sequence.output_tokens:
                starting.append((sequence, prefix.last_hidden))
            scheduler.prefixes.attach(prefix)
            sequence.prefix, sequence.num_cached = None, prefix.num_tokens
            sequence.cache_age = scheduler.prefixes.num_updates
        if sources:
            self._present_runner.copy_pages(sources, targets)
        if states:
            self._present_runner.copy_states(*map(list, zip(*states, strict=True)))
        return starting

    def _drain(self) -> None:
        """Record all launches in flight: afterwards the host knows every token drawn."""
        while self._under_way:
            self._drained += self._record(self._under_way.popleft())

    def _record(self, launch: _Launch) -> list[Finished | Progress]:
        tokens, logprobs = launch.drawn.read()
        now = time.monotonic()
        finished = []
        # With many rows no draft is worthwhile, and none is watched.
        is_watched = self._present_runner.draft_length(len(tokens)) > 0
        for sequence, drawn, its_logprobs in zip(launch.sequences, tokens, logprobs, strict=True):
            if sequence.has_ended:
                continue  # ended before this launch was recorded
            if is_watched:
                self._drafts.learn(sequence, drawn)
            kept, reason = sequence.take(drawn, its_logprobs, launch.version, now)
            self._counts["tokens_generated"] += kept
            if reason is not None:
                finished.append(self._end(sequence, reason))
            elif (progress := sequence.progress()) is not None:
                self._silent.discard(sequence.rid)
                finished.append(progress)
        return finished

    def _end(self, sequence: Sequence, reason: StopReason) -> Finished:
        routed = None
        if sequence.return_routed_experts:
            # The last token was drawn, and never computed.
            num_computed = sequence.num_tokens - 1
            routed = self._present_runner.routed_experts(sequence.pages, num_computed)
        self._scheduler.retire(sequence)
        del self._by_rid[sequence.rid]
        self._silent.discard(sequence.rid)
        self._drafts.leave(sequence)
        self._counts["finished"] += 1
        return sequence.finish(reason, routed)


def device_parts(tags: Iterable[str] | None) -> frozenset[str]:
    """The parts named by `tags`; None is all."""
    wanted = frozenset(DEVICE_PARTS if tags is None else tags)
    if unknown := wanted - DEVICE_PARTS:
        known = ", ".join(sorted(DEVICE_PARTS))
        raise ValueError(f"tags: expected some of {known}, got {min(unknown)!r}")
    return wanted


def parts_that_leave(tags: Iterable[str] | None) -> frozenset[str]:
    """Offloading weights implies the cache: CUDA graphs hold both."""
    return device_parts(tags) | {"kv_cache"}
