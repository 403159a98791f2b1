"""The `saver`, `evaluator` and `recover` sections: things done every so often.

Each has up to three clocks; any one that fires is enough, and none set means never.
"""

from __future__ import annotations

from typing import Literal

from areal.api.config.checks import require, require_above, require_at_least
from areal.api.config.section import config_section


@config_section
class TimerConfig:
    """Three clocks."""

    freq_epochs: int | None = None
    """Every this many epochs."""
    freq_steps: int | None = None
    """Every this many steps."""
    freq_secs: float | None = None
    """When this many seconds have passed since the last time."""

    def __post_init__(self) -> None:
        require_at_least(1, freq_epochs=self.freq_epochs, freq_steps=self.freq_steps)
        require_above(0, freq_secs=self.freq_secs)

    @property
    def ever_fires(self) -> bool:
        return any(f is not None for f in (self.freq_epochs, self.freq_steps, self.freq_secs))


@config_section
class SaverConfig(TimerConfig):
    """Checkpoints in Hugging Face format."""

    keep: int | None = None
    """Newest checkpoints kept of each model. Default: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, keep=self.keep)


@config_section
class EvaluatorConfig(TimerConfig):
    """Evaluation on `valid_dataset` during training."""

    eval_before_train: bool = False
    """Evaluate the starting weights too."""


@config_section
class RecoverConfig(TimerConfig):
    """Points a killed run goes on from."""

    mode: Literal["disabled", "on", "off", "auto"] = "disabled"
    """`on`: write recover points and go on from the newest. `off` and `auto` are older names of
    `disabled` and `on`, and are stored as those."""
    retries: int = 3
    """Times in a row, without a new recover point between, that `areal train` starts a training
    process again that died. 0: never."""
    keep: int = 2
    """Newest recover points kept."""
    on_damage: Literal["stop", "previous"] = "stop"
    """When the newest recover point is damaged or does not belong to the run's ledger: stop and say
    so, or go on from the point before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mode = "disabled" if self.mode == "off" else "on" if self.mode == "auto" else self.mode
        require_at_least(1, keep=self.keep)
        require_at_least(0, retries=self.retries)
        if self.mode == "on":
            require(
                self.ever_fires,
                "freq_steps (or freq_epochs, freq_secs) must be set with mode 'on'",
                None,
            )
