"""The domain: a database of orders, the tools over it, and what the policy wants (policy.md).

status     open, sent, lost; cancelled and refunded by the tools
wish       of the user: cancel or refund
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from areal.environments.tools import ToolError

STATUSES = ("open", "sent", "lost")
WISHES = ("cancel", "refund")
# (wish, status) -> status afterwards, and the word that the user must be told
BY_POLICY = {("cancel", "open"): "cancelled", ("refund", "lost"): "refunded"}
SORRY = "sorry"
OUTCOMES = (*BY_POLICY.values(), SORRY)  # what a user can be told


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the user wants, and the orders as they stand."""

    wish: str
    order: int
    orders: dict[int, str]

    @property
    def wanted_orders(self) -> dict[int, str]:
        changed = BY_POLICY.get((self.wish, self.orders[self.order]))
        return {**self.orders, self.order: changed} if changed else self.orders

    @property
    def wanted_word(self) -> str:
        return BY_POLICY.get((self.wish, self.orders[self.order]), SORRY)


def scenario_of(seed: int) -> Scenario:
    rng = random.Random(seed)
    orders = {number: rng.choice(STATUSES) for number in range(10)}
    return Scenario(rng.choice(WISHES), rng.randrange(10), orders)


class Shop:
    """The tools do what they are told: to keep to the policy is the agent's part."""

    def __init__(self, orders: dict[int, str]) -> None:
        self.orders = dict(orders)
        self.tools = [self.status, self.cancel, self.refund]

    async def status(self, order: int) -> str:
        """The status of an order: open, sent, lost, cancelled or refunded."""
        return self._known(order)

    async def cancel(self, order: int) -> str:
        """Cancel an order."""
        return self._set(order, "cancelled")

    async def refund(self, order: int) -> str:
        """Pay an order back."""
        return self._set(order, "refunded")

    def _known(self, order: int) -> str:
        if order not in self.orders:
            raise ToolError(f"there is no order {order}")
        return self.orders[order]

    def _set(self, order: int, status: str) -> str:
        self._known(order)
        self.orders[order] = status
        return "done"
