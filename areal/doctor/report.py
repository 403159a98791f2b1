"""The stages of training in order, what was found of each, and the one verdict.

Tokens pass the stages from first to last, so a fault of one is seen in all that follow: the verdict
is the first stage with a fault. Loads no torch.

    chart = Chart()
    chart.ok("reward", "16 rewards, computed again, are equal")
    chart.fault("optimizer", "the learning rate is 0", change="set actor.optimizer.lr above 0")
    print(chart.table()); print(chart.verdict()); sys.exit(chart.exit_code)
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any, Literal

STAGES = (
    "tokenizer",
    "template",
    "tokens",
    "weights",
    "logits",
    "sampling",
    "routing",
    "parser",
    "reward",
    "advantages",
    "loss_mask",
    "optimizer",
)
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Finding:
    stage: str
    state: Literal["ok", "fault", "doubt", "unseen"]
    found: str
    change: str = ""  # of a fault: what to do


class Chart:
    """One finding per stage. The first fault of a stage stays; otherwise what was seen counts more
    than what could not be seen, and the last of equals."""

    def __init__(self) -> None:
        self._findings: dict[str, Finding] = {}

    def ok(self, stage: str, found: str) -> None:
        self._add(Finding(stage, "ok", found))

    def unseen(self, stage: str, why: str) -> None:
        """This stage is not used here, or does not show itself."""
        self._add(Finding(stage, "unseen", why))

    def doubt(self, stage: str, found: str) -> None:
        """It may be at fault, which nobody can prove: the verdict mentions it and stays healthy."""
        self._add(Finding(stage, "doubt", found))

    def fault(self, stage: str, found: str, *, change: str) -> None:
        self._add(Finding(stage, "fault", found, change))

    def _add(self, finding: Finding) -> None:
        assert finding.stage in STAGES, finding.stage
        ranks = {"unseen": 0, "ok": 1, "doubt": 2, "fault": 3}
        known = self._findings.get(finding.stage)
        if known is not None and known.state == "fault":
            return
        if known is None or ranks[finding.state] >= ranks[known.state]:
            self._findings[finding.stage] = finding

    @property
    def findings(self) -> list[Finding]:
        return [
            self._findings.get(stage, Finding(stage, "unseen", "not looked at")) for stage in STAGES
        ]

    @property
    def first_fault(self) -> Finding | None:
        return next((one for one in self.findings if one.state == "fault"), None)

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 a fault, 2 nothing could be looked at."""
        if self.first_fault is not None:
            return 1
        return 0 if any(one.state in ("ok", "doubt") for one in self.findings) else 2

    def table(self) -> str:
        width = max(map(len, STAGES)) + 2
        marks = {"ok": "ok", "fault": "FAULT", "doubt": "doubt", "unseen": "-"}
        lines = []
        for one in self.findings:
            head = f"{one.stage:<{width}}{marks[one.state]:<7}"
            text = textwrap.wrap(one.found, _WIDTH - len(head)) or [""]
            lines += [head + text[0], *(" " * len(head) + more for more in text[1:])]
        return "\n".join(lines)

    def verdict(self) -> str:
        fault = self.first_fault
        if fault is not None:
            return f"{fault.stage} is wrong: {fault.found}. To do: {fault.change}"
        seen = [one.stage for one in self.findings if one.state in ("ok", "doubt")]
        if not seen:
            return "nothing could be looked at"
        healthy = f"healthy: no fault in {len(seen)} of {len(STAGES)} stages"
        doubts = [f"{one.stage} ({one.found})" for one in self.findings if one.state == "doubt"]
        return f"{healthy}; but look at {'; '.join(doubts)}" if doubts else healthy

    def as_dict(self) -> dict[str, Any]:
        fault = self.first_fault
        return {
            "healthy": self.exit_code == 0,
            "stage": None if fault is None else fault.stage,
            "verdict": self.verdict(),
            "stages": [asdict(one) for one in self.findings],
        }
