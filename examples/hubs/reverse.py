"""A taskset of verifiers, as its own command line runs it: write three digits backwards."""

from __future__ import annotations

import random

import verifiers.v1 as vf


class ReverseData(vf.TaskData):
    digits: str


class ReverseTask(vf.Task[ReverseData]):
    @vf.reward
    async def right_places(self, trace: vf.Trace) -> float:
        """The share of digits in their right places."""
        wanted, said = self.data.digits[::-1], trace.last_reply
        same = sum(a == b for a, b in zip(wanted, said, strict=False))
        return same / max(len(wanted), len(said))


class ReverseTaskset(vf.Taskset[ReverseTask, vf.TasksetConfig]):
    def load(self):
        for number in range(2000):
            digits = "".join(random.Random(number).choices("1234", k=3))
            yield ReverseTask(ReverseData(prompt=f"{digits}=", digits=digits), self.config.task)


__all__ = ["ReverseTaskset"]
