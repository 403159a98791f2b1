"""Grammars: which tokens may come next in an output.

    compiler = GrammarCompiler(tokenizer, eos_ids=[1])
    state = compiler.state(Grammar(regex="yes|no"))   # of one output; ValueError: a bad grammar
    mask = state.allowed(vocab_size, stop_ids)        # the sampler draws one of these
    state.accept([token])

llguidance (the extra `grammar`) does the parsing. A grammar is compiled once and its states share
the compiled tables, which grow as outputs visit more of it. Everything is bounded: the text
(`Grammar`), the time to compile, the tables, and the work of one mask. Compiling runs on threads of
its own, so that a slow grammar delays other grammars at most; masks are computed by the thread that
owns the engine, about 50 us each.

Invariant: what `allowed` returns depends on the grammar and the accepted tokens alone. Only whether
a limit is reached depends on the states beside it: see tensor_parallel.py.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from areal.api.io_struct import Grammar
from areal.openai.text_stream import marks_of, token_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher

COMPILE_TIMEOUT_S = 10.0
_MAX_COMPILED = 32
_NUM_THREADS = 2
_MAX_REASON = 200  # characters
# llguidance's defaults, but for memory: a state takes 1 to 2 kB.
_LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}
# Enough for indented JSON; without a bound a model can write white space to the end of its budget.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
_DEAD_ENDS = ("NoExtension", "NoExtensionBias")  # errors of llguidance


class GrammarState:
    """The position of one output in its grammar."""

    def __init__(self, compiled: _Compiled) -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._num_accepted = 0
        self.fault = ""  # why no further token can be drawn, unless the grammar is at its end

    def allowed(
        self, vocab_size: int, stop_ids: frozenset[int], *, may_end: bool = True
    ) -> np.ndarray | None:
        """int32 [ceil(V / 32)]: token t may come next if bit t % 32 of word t // 32 is 1.

        Stop tokens may come where the output can end; `may_end` False bans them. Where the next
        bytes are certain, the tokenizer's own token for them is the only one. None where nothing
        can follow, or after a fault.
        """
        mask = np.zeros(-(-vocab_size // 32), np.uint32)
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._note_error()
            return None
        count = min(len(bits), mask.nbytes)
        mask.view(np.uint8)[:count] = np.frombuffer(bits, np.uint8, count)
        if vocab_size % 32:
            mask[-1] &= np.uint32((1 << vocab_size % 32) - 1)
        # The tokenizer's end tokens need not end this output.
        _clear_bits(mask, self._compiled.eos_ids - stop_ids)
        if not may_end:
            _clear_bits(mask, stop_ids)
        elif self._matcher.is_accepting():
            _set_bits(mask, stop_ids)
        return mask.view(np.int32) if np.count_nonzero(mask) else None

    def accept(self, tokens: list[int]) -> None:
        """`tokens` come next; `fault` says if the grammar does not allow them."""
        count = self._matcher.try_consume_tokens(tokens)
        self._num_accepted += count
        if self._matcher.is_error():
            self._note_error()
        elif count < len(tokens):
            self._fail(f"it does not allow token {tokens[count]}")

    def _note_error(self) -> None:
        """A limit that was reached, unless it is a dead end."""
        reason = _reason_of(self._matcher.get_error())
        if reason not in _DEAD_ENDS:
            self._compiled.is_broken = True  # so are the tables, for all states that share them
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        where = f"after {self._num_accepted} tokens of the output"
        self.fault = f"grammar.{self._compiled.kind}: cannot be followed {where}: {reason}"


class _Compiled:
    def __init__(self, kind: str, matcher: LLMatcher, eos_ids: frozenset[int]) -> None:
        self.kind = kind
        self.matcher = matcher  # at the start; only copied
        self.eos_ids = eos_ids
        self.is_broken = False


class _TokenTexts:
    """A tokenizer as llguidance asks for it: the bytes of each token, and how text is split."""

    def __init__(self, tokenizer: Any, eos_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0] if eos_ids else tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        special = {*tokenizer.all_special_ids, *marks_of(tokenizer).values(), *eos_ids}
        self.special_token_ids = sorted(special)
        self.tokens = [token_bytes(tokenizer, token) or b"" for token in range(len(tokenizer))]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


class GrammarCompiler:
    """Compiled grammars of one tokenizer; blocking, from any thread."""

    def __init__(
        self, tokenizer: Any, eos_ids: list[int], *, timeout_s: float | None = COMPILE_TIMEOUT_S
    ) -> None:
        """ValueError if grammars cannot be used here at all."""
        try:
            import llguidance.hf
        except ImportError as err:
            raise ValueError(
                "grammar: constrained output needs llguidance: pip install 'areal[grammar]'"
            ) from err
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, eos_token=eos_ids or None)
        except ValueError:  # a kind it cannot read: token by token
            wrapper = llguidance.TokenizerWrapper(_TokenTexts(tokenizer, eos_ids))
            self._tokenizer = llguidance.LLTokenizer(wrapper, eos_token=eos_ids or None)
        self._eos_ids = frozenset(self._tokenizer.eos_tokens)
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, str], Future[_Compiled]] = OrderedDict()

    def state(self, grammar: Grammar) -> GrammarState:
        """At the start of an output. ValueError names the field and what is wrong with it."""
        future = self._find(grammar)
        try:
            return GrammarState(future.result(self._timeout_s))
        except (TimeoutError, CancelledError):
            future.cancel()  # if it still waits for a thread
            raise ValueError(
                f"grammar.{grammar.kind}: not compiled within {self._timeout_s:g} s; make it "
                "smaller"
            ) from None

    def _find(self, grammar: Grammar) -> Future[_Compiled]:
        key = grammar.kind, grammar.text
        with self._lock:
            future = self._compiled.pop(key, None)
            if future is None or _is_broken(future):
                future = self._threads.submit(self._compile, *key)
            self._compiled[key] = future
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return future

    def _compile(self, kind: str, text: str) -> _Compiled:
        from llguidance import LLMatcher, LLParserLimits

        if kind == "json_schema":
            options: Any = {"whitespace_pattern": _WHITESPACE}
            try:
                source = LLMatcher.grammar_from_json_schema(text, defaults=options)
            except ValueError as err:  # too many levels
                raise ValueError(f"grammar.{kind}: {_reason_of(str(err))}") from None
        elif kind == "regex":
            source = LLMatcher.grammar_from_regex(text)
        else:
            source = LLMatcher.grammar_from_lark(text)
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LLParserLimits(**_LIMITS))
        if matcher.is_error():
            raise ValueError(f"grammar.{kind}: {_reason_of(matcher.get_error())}")
        first = matcher.deep_copy()  # its mask also builds the tables that every output needs
        first.compute_bitmask()
        if first.is_error():
            reason = _reason_of(first.get_error())
            nothing = "no text of this model's tokens fits it"
            raise ValueError(f"grammar.{kind}: {nothing if reason in _DEAD_ENDS else reason}")
        return _Compiled(kind, matcher, self._eos_ids)


def _is_broken(future: Future[_Compiled]) -> bool:
    return future.done() and (
        future.cancelled() or (future.exception() is None and future.result().is_broken)
    )


def _set_bits(mask: np.ndarray, tokens: Iterable[int]) -> None:
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)


def _clear_bits(mask: np.ndarray, tokens: Iterable[int]) -> None:
    for token in tokens:
        if token < 32 * len(mask):  # a tokenizer may know more tokens than the model
            mask[token // 32] &= ~np.uint32(1 << token % 32)


def _reason_of(error: str) -> str:
    """One line of an error of llguidance, which draws where in the grammar it is."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["unknown error"]
    reason = next((line[7:] for line in lines if line.startswith("error: ")), lines[0])
    return reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."
