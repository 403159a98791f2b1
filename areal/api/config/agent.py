"""The `rollout.agent` section: how agents run that talk to the model over HTTP."""

from __future__ import annotations

from typing import Literal

from areal.api.config.checks import require, require_above, require_at_least, require_fraction
from areal.api.config.limits import ProcessLimits
from areal.api.config.section import config_section


@config_section
class AgentConfig:
    """Where an agent's code runs, and how its completions become samples."""

    mode: Literal["inline", "subproc", "online"] = "inline"
    """Where an agent runs: `inline` in the controller's event loop, `subproc` in processes of its
    own, `online` outside: clients drive the sessions and `workflow` is not used."""
    export_style: Literal["individual", "concat"] = "individual"
    """What a sample is: `individual` every completion, `concat` a whole chat."""
    chat_template_type: Literal["hf", "concat"] | None = None
    """How the next turn's prompt is made: `hf` by the chat template alone, `concat` from the
    tokens of the turn before, as they were sampled. Default: hf for `individual`, or concat."""
    turn_discount: float = 1.0
    """Share of a completion's reward that the completion before it gets as well."""
    tool_call_parser: str = "qwen"
    """How tool calls are read from a reply."""
    drop_retry_orphans: bool = False
    """Leave out completions that were requested again with the same messages."""
    prefix_matcher: str | None = None
    """Import path of a function (prefix, messages) -> bool that says whether a chat goes on.
    Default: equal roles, texts and tool calls."""
    session_timeout_seconds: float = 3600.0
    """An episode that takes longer has failed."""
    subproc_max_workers: int = 4
    """Processes of `subproc`; each runs one episode at a time."""
    limits: ProcessLimits | None = None
    """What a process of `subproc` may use. Default: whatever you may."""
    port: int = 0
    """Port of the server that agents talk to, on this machine only. 0 is a free one."""

    def __post_init__(self) -> None:
        if self.chat_template_type is None:
            self.chat_template_type = "hf" if self.export_style == "individual" else "concat"
        require(
            self.export_style == "individual" or self.chat_template_type == "concat",
            "chat_template_type must be concat for export_style: concat (or leave it out)",
            self.chat_template_type,
        )
        require_fraction(turn_discount=self.turn_discount)
        require_above(0, session_timeout_seconds=self.session_timeout_seconds)
        require_at_least(1, subproc_max_workers=self.subproc_max_workers)
        require(
            self.limits is None or self.limits.network,
            "limits.network must be true: an agent talks to the model over HTTP",
            False,
        )
        require(0 <= self.port < 65536, "port must lie between 0 and 65535", self.port)
