"""mini-swe-agent, as its own first example has it: `python mini_swe.py PROMPT`."""

import os
import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

agent = DefaultAgent(
    LitellmModel(
        model_name="openai/policy",
        model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"]},
        cost_tracking="ignore_errors",
    ),
    LocalEnvironment(),
    system_template="You answer with calls of bash.",
    instance_template="{{task}}",
    step_limit=8,
)
print(agent.run(sys.argv[1]))
