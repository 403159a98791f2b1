"""Parts of a run that say their secrets aloud, in every way there is."""

from __future__ import annotations

import os

from areal.utils import logging
from areal.workflow.rlvr import RLVRWorkflow

logger = logging.getLogger("LeakyWorkflow")
GOOD_EPISODES = 40


class LeakyWorkflow(RLVRWorkflow):
    def __init__(self, *, judge_api_key: str, judge_url: str, **kwargs) -> None:
        super().__init__(**kwargs)
        self.said = f"{judge_api_key} {judge_url} {os.environ['JUDGE_PASSWORD']}"
        self.episodes = 0

    async def arun_episode(self, engine, data):
        self.episodes += 1
        logger.info("asking the judge with Authorization: Bearer %s", self.said)
        if self.episodes > GOOD_EPISODES:
            raise RuntimeError(f"the judge refused {self.said}")
        return await super().arun_episode(engine, data)
