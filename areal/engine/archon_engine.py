"""Archon on one rank: our own models trained on the CPU or on one GPU.

The model is the module the native engine decodes with, so log-probabilities of both agree to
float rounding. Given one torch thread on a CPU, training is a function of (weights, batches): two
equal runs, or a run resumed from `save(dcp)`, end with the same bits.

    engine = ArchonEngine(config)
    engine.initialize(ft_spec)
    engine.train_batch(batch, loss_fn, loss_weight_fn); engine.step_lr_scheduler()

With `config.is_critic` the model has a score head in place of the LM head, and values take the
place of log-probabilities; one that starts from a language model says 0 of every token at first.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from areal.api.config.train_engine import TrainEngineConfig
from areal.api.engine_api import InferenceEngine, TrainEngine
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from areal.engine import base, checkpoint
from areal.engine.invariant_attention import InvariantPackedAttention
from areal.engine.logprobs import next_token_logprobs
from areal.engine.optim import MasterOptimizer
from areal.models.common.attention_varlen import PackedAttention
from areal.models.common.decoder import Decoder
from areal.models.common.invariant import make_invariant
from areal.models.hf_io import (
    SCORE_HEAD,
    build_model,
    critic_config,
    has_score_head,
    load_hf,
    read_hf_config,
    save_hf,
)
from areal.utils.cpu_matmul import use_plain_blas
from areal.utils.device import best_device
from areal.weight_sync.transports import send_weights


class ArchonEngine(TrainEngine):
    def __init__(self, config: TrainEngineConfig, *, seed: int = 1) -> None:
        """`seed` draws the weights with `config.init_from_scratch`."""
        self.config = config
        self.mb_spec = config.mb_spec
        self.device = torch.device(best_device())
        self._seed = seed
        self._version = 0
        self._model: Decoder | None = None
        self._optimizer: MasterOptimizer | None = None
        self._receiver: tuple[InferenceEngine, WeightUpdateMeta] | None = None

    def initialize(self, ft_spec: FinetuneSpec | None = None) -> None:
        """Load the model; with `config.optimizer` and `ft_spec` it can also be trained."""
        if self.device.type == "cpu":
            use_plain_blas()
        self._hf_config = read_hf_config(self.config.path)
        self._model = build_model(
            self._hf_config,
            device=self.device,
            dtype=self._dtype(),
            is_critic=self.config.is_critic,
        )
        self._fill_model(self._model)
        if self.config.batch_invariant:
            make_invariant(self._model)
        if self.config.optimizer is not None and ft_spec is not None:
            self._optimizer = MasterOptimizer(
                self._model, self.config.optimizer, ft_spec.total_train_steps
            )

    def _fill_model(self, model: Decoder) -> None:
        path = self.config.path
        if self.config.init_from_scratch:
            model.init_weights(self._seed)
        elif self.config.is_critic and not has_score_head(path):
            model.init_score()
            load_hf(model, path, without=[SCORE_HEAD])
        else:
            load_hf(model, path)

    def destroy(self) -> None:
        self._model = self._optimizer = self._receiver = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def model(self) -> Decoder:
        if self._model is None:
            raise RuntimeError("the engine has no model yet: call initialize() first")
        return self._model

    @property
    def optimizer(self) -> MasterOptimizer:
        if self._optimizer is None:
            raise RuntimeError(
                "the engine cannot train: give its config an optimizer section and initialize() "
                "a FinetuneSpec"
            )
        return self._optimizer

    def train_batch(self, input_, loss_fn, loss_weight_fn, *, rows_per_unit=1) -> dict[str, float]:
        _ = self.optimizer  # refuse before the work, not after it
        return base.train_batch(self, input_, loss_fn, loss_weight_fn, rows_per_unit)

    def eval_batch(self, input_, loss_fn, loss_weight_fn, *, rows_per_unit=1) -> torch.Tensor:
        return base.eval_batch(self, input_, loss_fn, loss_weight_fn, rows_per_unit)

    def forward_batch(self, input_: dict[str, Any]) -> torch.Tensor:
        return base.forward_batch(self, input_)

    def forward_backward_batch(
        self, mbs: list[base.MicroBatch], output_fn: base.OutputFn, forward_only: bool
    ) -> list[torch.Tensor]:
        outputs = []
        with torch.set_grad_enabled(not forward_only):
            for index, mb in enumerate(mbs):
                output = output_fn(index, *self._outputs(mb.data))
                if not forward_only:
                    output.backward()
                    self.optimizer.collect_gradients()
                outputs.append(output.detach())
        return outputs

    def _outputs(self, mb: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """log p of the next token and entropy, `[T]`, or a critic's values `[T]`.

        At a sequence's last token, log p and entropy are junk.
        """
        tokens_T = mb["input_ids"].long()
        packed = InvariantPackedAttention if self.config.batch_invariant else PackedAttention
        attend = packed(mb["cu_seqlens"], mb["max_seqlen"])
        hidden_TD = self.model(tokens_T, attend.positions_T, attend)
        if self.config.is_critic:
            return (self.model.values(hidden_TD),)
        labels_T = tokens_T.roll(-1)
        # Junk that does not depend on which sequence happens to come next.
        labels_T[mb["cu_seqlens"][1:].long() - 1] = 0
        return next_token_logprobs(
            hidden_TD,
            self.model.output_weight,
            labels_T,
            temperature=self.config.temperature,
            chunk_size=self.config.logprobs_chunk_size,
            batch_invariant=self.config.batch_invariant,
        )

    def optimizer_step(self) -> dict[str, float]:
        return self.optimizer.step()

    def step_lr_scheduler(self) -> None:
        self.optimizer.set_lr_step(self.optimizer.lr_step + 1)

    def save(self, meta: SaveLoadMeta) -> None:
        """Write into the folder `meta.path`; for all-or-nothing give a scratch folder."""
        if meta.weight_format == "dcp":
            checkpoint.save(
                meta.path, self.model, self._optimizer_if(meta.with_optim), self._version
            )
            return
        _refuse_optimizer(meta)
        config = critic_config(self._hf_config) if self.config.is_critic else self._hf_config
        save_hf(self.hf_weights(), config, meta.path)
        base_model = Path(meta.base_model_path or self.config.path)
        generation_config = base_model / "generation_config.json"
        if generation_config.is_file():
            shutil.copy(generation_config, meta.path)
        if meta.tokenizer is not None:
            meta.tokenizer.save_pretrained(meta.path)
        if meta.processor is not None:
            meta.processor.save_pretrained(meta.path)

    def load(self, meta: SaveLoadMeta) -> None:
        if meta.weight_format == "dcp":
            self._version = checkpoint.load(
                meta.path, self.model, self._optimizer_if(meta.with_optim)
            )
            return
        _refuse_optimizer(meta)
        load_hf(self.model, meta.path)
        if self._optimizer is not None:
            self._optimizer.read_model()

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.model.named_hf_tensors()

    def connect_engine(self, engine: InferenceEngine, meta: WeightUpdateMeta) -> None:
        self._receiver = (engine, meta)

    def update_weights(self, version: int) -> None:
        if self._receiver is None:
            raise RuntimeError("no inference engine is connected: call connect_engine() first")
        engine, meta = self._receiver
        send_weights(engine, meta.with_version(version), self.hf_weights())

    def set_version(self, version: int) -> None:
        self._version = version

    def get_version(self) -> int:
        return self._version

    def _dtype(self) -> torch.dtype:
        default = "bfloat16" if self.device.type == "cuda" else "float32"
        return getattr(torch, self.config.dtype or default)

    def _optimizer_if(self, wanted: bool) -> MasterOptimizer | None:
        return self.optimizer if wanted else None


def _refuse_optimizer(meta: SaveLoadMeta) -> None:
    if meta.with_optim:
        raise ValueError(
            "weight_format='hf' holds weights only: use weight_format='dcp' for the optimizer"
        )
