"""The inference engine against the trainer: weights by tensor, logits by layer, routing.

    look = EngineLook(chart, trainer)
    look.compare("before training")
    ...                                 # a training step; the weights are published
    look.compare("after an update")

Native engines show checksums of their tensors and what each layer computes; of stock servers the
log-probabilities of sampled tokens are compared, and whether these change with an update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from areal.api.engine_api import TrainEngine
from areal.api.io_struct import ModelResponse
from areal.api.routed_experts import ROUTED_KEY
from areal.doctor.report import Chart
from areal.trainer.probe import (
    NOT_SHOWN,
    as_batch,
    compare_logprobs,
    differing_weights,
    sample_replies,
    tolerance_of,
)

if TYPE_CHECKING:
    from areal.trainer.rl_trainer import PPOTrainer

_RESEND = (
    "look at the transport (actor.weight_update_mode) and at what else gives this server weights"
)
# Of the tolerance of log-probabilities: what two numbers of a layer trace may differ by.
_TRACE_SHARE = 0.2
_MIN_ROUTED = 0.8  # rounding flips the last of a token's experts now and then


@dataclass(frozen=True, slots=True)
class _Shown:
    """By server, or why it is not shown."""

    weights: dict[str, Any] | str
    layers: dict[str, Any] | str
    replies: list[ModelResponse]


def _shown(ask: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
    try:
        return ask()
    except NOT_SHOWN as error:
        return str(error)


class EngineLook:
    def __init__(self, chart: Chart, trainer: PPOTrainer, prompts: Sequence[list[int]]) -> None:
        """`prompts`: token ids to ask the engine with."""
        self._chart = chart
        self._trainer = trainer
        self._prompts = prompts
        self._tolerance = tolerance_of(trainer.config)
        self._longest = max(prompts, key=len)
        self._before: list[ModelResponse] = []  # replies to the same prompts and seeds, last time

    def compare(self, when: str) -> None:
        shown = self._ask_servers()
        same_weights = self._compare_weights(when, shown)
        same_forward = self._compare_layers(shown)
        self._check_update(shown, same_weights)
        self._compare_samples(when, shown, same_forward)
        self._before = shown.replies

    def _ask_servers(self) -> _Shown:
        """All at once: a server that shares its device with the trainer leaves it afterwards."""
        trainer = self._trainer
        trainer.device.to_generation()
        shown = _Shown(
            weights=_shown(trainer.inference.weight_checksums),
            layers=_shown(lambda: trainer.inference.layer_trace(self._longest)),
            replies=sample_replies(
                trainer.runner,
                trainer.inference,
                self._prompts,
                temperature=trainer.config.actor.temperature,
                timeout_s=trainer.config.rollout.request_timeout,
            ),
        )
        trainer.device.to_training()
        return shown

    def _compare_weights(self, when: str, shown: _Shown) -> bool | None:
        """Whether all tensors are equal; None if they are not shown."""
        chart = self._chart
        if isinstance(shown.weights, str):
            chart.unseen("weights", f"by tensor: {shown.weights}")
            return None
        if self._trainer.config.actor.use_lora and not self._before:
            chart.unseen("weights", "no adapter was sent yet")
            return True
        for server, names in differing_weights(self._trainer.engine, shown.weights).items():
            if names:
                chart.fault(
                    "weights",
                    f"{when}, {names[0]} on {server} is not the trainer's tensor "
                    f"({len(names)} differ)",
                    change=_RESEND,
                )
                return False
        chart.ok(
            "weights", f"{when}, all tensors of {len(shown.weights)} server(s) are the trainer's"
        )
        return True

    def _compare_layers(self, shown: _Shown) -> bool | None:
        """Whether engine and trainer compute the same; None if one does not show it."""
        chart, theirs = self._chart, shown.layers
        own = _shown(lambda: self._trainer.engine.layer_trace(self._longest))
        config = self._trainer.config
        if config.server.dtype == "fp8" and not config.actor.archon.fp8_forward:
            theirs = "the server rounds to FP8, the trainer only with actor.archon.fp8_forward"
        if isinstance(theirs, str) or isinstance(own, str):
            why = theirs if isinstance(theirs, str) else own
            chart.unseen("logits", f"by layer: {why}")
            chart.unseen("routing", f"by layer: {why}")
            return None
        for server, trace in theirs.items():
            limit = self._tolerance * _TRACE_SHARE
            layer = first_difference(own["layers"], trace["layers"], limit)
            if layer is not None:
                self._accuse_layer(server, layer, own, trace)
                return False
        num_tokens = len(self._longest)
        chart.ok("logits", f"{len(own['layers'])} layers compute the same for {num_tokens} tokens")
        if own["experts"]:
            chart.ok("routing", f"the routers of {len(own['experts'])} layers choose alike")
        elif any(trace["experts"] for trace in theirs.values()):
            chart.unseen("routing", "the trainer's back end does not show its routers")
        else:
            chart.unseen("routing", "not used: the model has no experts")
        return True

    def _accuse_layer(
        self, server: str, layer: str, own: Mapping[str, Any], trace: Mapping[str, Any]
    ) -> None:
        args = [name for name, value in own["args"].items() if trace["args"].get(name) != value]
        cause, change = "", "look for other code or settings of this layer on one of the two sides"
        if args:
            values = f"{trace['args'].get(args[0])} there, {own['args'][args[0]]} in the trainer"
            cause = f": {args[0]} is {values}"
            change = "start the server from the config.json of actor.path"
        # The layers before agree, so other experts are the router's own doing.
        chosen = own["experts"].get(layer)
        is_routing = chosen is not None and chosen != trace["experts"].get(layer)
        self._chart.fault(
            "routing" if is_routing else "logits",
            f"{layer} is the first layer where {server} and the trainer differ"
            f"{' in the experts they choose' if is_routing else ''}{cause}",
            change=change,
        )

    def _check_update(self, shown: _Shown, same_weights: bool | None) -> None:
        """Of servers without checksums: the same seeds give other log-probabilities after it."""
        if same_weights is not None or not self._before:
            return
        if _are_equal(self._before, shown.replies):
            self._chart.fault(
                "weights",
                "the servers give the same tokens with the same log-probabilities as before the "
                "update: they did not load the new weights",
                change=_RESEND,
            )
        else:
            self._chart.ok("weights", "replies to the same seeds changed with the update")

    def _compare_samples(self, when: str, shown: _Shown, same_forward: bool | None) -> None:
        """Log-probabilities of freshly sampled tokens: the engine's own path, cache and sampler."""
        chart, temperature = self._chart, self._trainer.config.actor.temperature
        batch = as_batch(shown.replies)
        agreement = compare_logprobs(self._trainer.engine, batch, self._tolerance)
        text = f"{when}, {agreement}"
        if agreement.holds:
            chart.ok("sampling", f"{text}, at temperature {temperature:g}")
            if same_forward is None:
                chart.ok("logits", text)
        elif same_forward:
            chart.fault(
                "sampling",
                f"{text}, though all layers agree: they are of another distribution than "
                f"softmax(logits / {temperature:g})",
                change="let the server report log-probabilities of what it samples from, at the "
                "temperature it is asked for (vLLM: --logprobs-mode processed_logprobs)",
            )
        elif same_forward is None:
            chart.fault(
                "logits",
                text,
                change="compare the server's model, dtype and config.json with actor.path; with "
                "vLLM check --logprobs-mode processed_logprobs",
            )


def first_difference(
    own: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]], limit: float
) -> str | None:
    """The first layer whose numbers differ by more than `limit`, or that only one has."""
    for layer, numbers in own.items():
        others = theirs.get(layer, ())
        if len(others) != len(numbers):
            return layer
        if not all(abs(a - b) <= limit for a, b in zip(numbers, others, strict=True)):
            return layer
    return None


def _are_equal(before: Sequence[ModelResponse], after: Sequence[ModelResponse]) -> bool:
    return all(
        a.output_tokens == b.output_tokens and a.output_logprobs == b.output_logprobs
        for a, b in zip(before, after, strict=True)
    )


def check_recorded(chart: Chart, engine: TrainEngine, row: Mapping[str, torch.Tensor]) -> None:
    """Router replay: the experts on record are those that the trainer's routers choose.

    `row` is one row of a trajectory without padding, sampled by the trainer's present weights.
    """
    if ROUTED_KEY not in row:
        return
    trace = _shown(lambda: engine.layer_trace(row["input_ids"].tolist()))
    if isinstance(trace, str):
        return chart.unseen("routing", f"by layer: {trace}")
    # Without the last token, which was sampled and never computed.
    recorded_TLK = row[ROUTED_KEY][:-1].long().sort(-1).values
    own_TLK = torch.tensor(list(trace["experts"].values())).transpose(0, 1)[:-1].sort(-1).values
    share = (recorded_TLK == own_TLK).all(-1).float().mean().item()
    text = f"{share:.0%} of the experts on record are those that the trainer's routers choose"
    if share < _MIN_ROUTED:
        return chart.fault(
            "routing",
            text,
            change="keep routed_experts with the tokens they belong to; turn "
            "rollout.return_routed_experts off until they fit",
        )
    chart.ok("routing", text)
