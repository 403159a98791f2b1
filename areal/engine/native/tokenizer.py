"""The tokenizer of a model folder, loaded when the first request needs it, and its images' reader.

The engine itself uses only token ids. Text appears in stop strings, in grammars and in the OpenAI
routes; a folder without a tokenizer serves everything else. Images are decoded and cut here
(prompt_images.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from areal.engine.native.grammar import COMPILE_TIMEOUT_S, GrammarCompiler
from areal.engine.native.sequence import GenRequest, StopWatch
from areal.models.hf_io import read_hf_config
from areal.models.vision.prompt_images import ImageReader, PromptImages
from areal.utils import logging

logger = logging.getLogger("NativeModelText")

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class ModelText:
    """Loads once, from any thread; blocking, so not for an event loop."""

    def __init__(
        self,
        folder: str | Path,
        *,
        compile_timeout_s: float | None = COMPILE_TIMEOUT_S,
        image_folders: Sequence[str | Path] = (),
    ) -> None:
        """`compile_timeout_s`: longest wait for a grammar. `image_folders`: `file:` URLs of images
        below these are read."""
        self._folder = Path(folder)
        self._images = ImageReader(folder, image_folders, self.tokenizer)
        self._compile_timeout_s = compile_timeout_s
        self._lock = threading.RLock()
        self._tokenizer: Any = None
        self._compiler: GrammarCompiler | None = None

    def tokenizer(self) -> Any:
        """ValueError when the folder has none."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            return self._tokenizer

    @cached_property
    def eos_ids(self) -> list[int]:
        """The model's end tokens, which are not part of the text."""
        return read_eos_ids(self._folder)

    def prepare(self, request: GenRequest) -> GenRequest:
        """The request with what its images, its stop strings and its grammar need. ValueError names
        the field that cannot be used."""
        gconfig, grammar = request.gconfig, request.grammar
        if request.image_data and request.images is None:
            tokens, images = self.read_images(request.input_ids, request.image_data)
            request = replace(request, input_ids=tokens, images=images)
        if gconfig.stop:
            try:
                tokenizer = self.tokenizer()
            except ValueError as err:
                raise ValueError(f"gconfig.stop: {err}") from err
            watch = StopWatch(tokenizer, gconfig.stop, min_tokens=gconfig.min_new_tokens)
            request = replace(request, stop_watch=watch)
        if grammar is not None:
            request = replace(request, grammar_state=self._grammar_compiler().state(grammar))
        return request

    def read_images(
        self, input_ids: list[int], image_data: list[str]
    ) -> tuple[list[int], PromptImages]:
        """The prompt with a token for each merged patch of its images, and these. ValueError names
        the image that cannot be used."""
        return self._images.read(input_ids, image_data)

    @staticmethod
    def has_to_prepare(request: GenRequest) -> bool:
        return bool(request.gconfig.stop or request.grammar or request.image_data)

    def _grammar_compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                try:
                    tokenizer = self.tokenizer()
                except ValueError as err:
                    raise ValueError(f"grammar: {err}") from err
                self._compiler = GrammarCompiler(
                    tokenizer, self.eos_ids, timeout_s=self._compile_timeout_s
                )
            return self._compiler

    def _load(self) -> Any:
        # transformers would create an empty tokenizer from config.json.
        if not any((self._folder / name).is_file() for name in _FILES):
            raise ValueError(
                f"the model folder {self._folder} has no tokenizer, so texts cannot be read or "
                "written: put its tokenizer.json there, or send token ids to /generate, without "
                "stop strings and grammars"
            )
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(self._folder), trust_remote_code=False)
        except (OSError, ValueError, KeyError) as err:
            first_line = str(err).strip().partition("\n")[0]
            raise ValueError(f"cannot read the tokenizer in {self._folder}: {first_line}") from err
        tokenizer("")  # initializes lazy state, after which threads may share it
        logger.info("read the tokenizer in %s", self._folder)
        return tokenizer


def read_eos_ids(path: str | Path) -> list[int]:
    """End tokens of a model folder, from generation_config.json, or else config.json."""
    file = Path(path) / "generation_config.json"
    generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    eos = generation.get("eos_token_id", read_hf_config(path).get("eos_token_id"))
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
