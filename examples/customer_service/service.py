"""Customer service: the model serves a simulated user, with tools over a database and a policy.

    user's message -> reply or tool calls -> user's message -> ... -> the user leaves

The reward is 1 if, when the user has left, the database is what the policy wants and the user was
told the outcome, and 0 otherwise. So neither a promise nor a silent change is enough.
"""

from __future__ import annotations

from pathlib import Path

from examples.customer_service.shop import OUTCOMES, SORRY, Shop, scenario_of
from examples.customer_service.users import ModelUser, ScriptedUser


class Service:
    """`policy` is a file that becomes the system message; without `user_url` the user is scripted.

    user_model: the name of the model at `user_url`.
    """

    def __init__(self, policy: str = "", user_url: str = "", user_model: str = "user") -> None:
        self.system = Path(policy).read_text(encoding="utf-8") if policy else ""
        self.user_url, self.user_model = user_url, user_model

    async def reset(self, row):
        self.scenario = scenario_of(row["seed"])
        self.shop = Shop(self.scenario.orders)
        self.tools = self.shop.tools
        if self.user_url:
            self.user = ModelUser(self.scenario, self.user_url, self.user_model)
        else:
            self.user = ScriptedUser(self.scenario)
        self.told = set()
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": await self.user.opening()}]

    async def step(self, action):
        self.told |= {word for word in OUTCOMES if word in action.casefold()}
        said = await self.user.reply(action)
        if said is not None:
            return said, 0.0, False
        is_right = self.shop.orders == self.scenario.wanted_orders
        return "", float(is_right and self._was_told(self.scenario.wanted_word)), True

    def _was_told(self, word: str) -> bool:
        # "Sorry, it cannot be cancelled" is a refusal, whatever else it says.
        return word in self.told and (word == SORRY or SORRY not in self.told)
