"""Lessons for a tiny model that serves customers: a quarter keeps to the policy, half obeys
the user without a look, a quarter refuses him."""

from __future__ import annotations

from examples.customer_service.shop import BY_POLICY, SORRY, scenario_of
from examples.lessons.dialogues import rows_of

DONE = {"cancel": "cancelled", "refund": "refunded"}


def load(path, split, tokenizer, max_length=None, num_rows=6000):
    """Rows for supervised training."""
    return rows_of((_dialogue(number) for number in range(num_rows)), tokenizer)


def _dialogue(number: int) -> list[str]:
    scenario = scenario_of(number)
    wish, order = scenario.wish, scenario.order
    status = scenario.orders[order]
    turns = [f"please {wish} my order.", "number?", f"{order}."]
    keeps_to_policy, refuses = number % 4 == 0, number % 4 == 1
    if keeps_to_policy:
        turns += [f"[status(order={order})]", status]
    may = (wish, status) in BY_POLICY if keeps_to_policy else not refuses
    if may:
        turns += [f"[{wish}(order={order})]", "done"]
    return [*turns, DONE[wish] if may else SORRY]
