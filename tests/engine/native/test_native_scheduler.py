"""Order and books of the scheduler: who is admitted, who is preempted, and in which order."""

from __future__ import annotations

import pytest
import torch

from areal.api.config.inference import GenerationHyperparameters
from areal.engine.native.kv_cache import PagePool
from areal.engine.native.scheduler import Scheduler
from areal.engine.native.sequence import Sequence


def make_scheduler(num_pages: int, max_running: int = 8) -> Scheduler:
    return Scheduler(PagePool(num_pages, 4), max_running=max_running, max_pages=num_pages)


def add(scheduler: Scheduler, rid: str, prompt: tuple[int, ...]) -> Sequence:
    sequence = Sequence(rid, prompt, GenerationHyperparameters(), 0, frozenset(), max_output=100)
    scheduler.waiting.append(sequence)
    return sequence


def start_decoding(scheduler: Scheduler) -> None:
    """What the engine does for filling sequences, less the tensors."""
    for prefix in scheduler.prefixes.pending:
        scheduler.prefixes.complete(prefix, torch.zeros(1))
    for sequence in list(scheduler.filling):
        scheduler.prefixes.attach(sequence.prefix)
        sequence.prefix = None
        scheduler.promote(sequence)
    draw(scheduler)


def draw(scheduler: Scheduler) -> None:
    for sequence in scheduler.decoding:
        sequence.output_tokens.append(0)
    scheduler.slots.advance(scheduler.decoding_slots(), 1)


def rids(sequences) -> list[str]:
    return [sequence.rid for sequence in sequences]


def test_admission_is_first_come_first_served_within_slots():
    scheduler = make_scheduler(num_pages=50, max_running=2)
    for i in range(3):
        add(scheduler, str(i), (i,))
    scheduler.admit()
    assert rids(scheduler.filling) == ["0", "1"] and rids(scheduler.waiting) == ["2"]


def test_a_long_head_of_the_queue_is_not_overtaken():
    scheduler = make_scheduler(num_pages=5)
    add(scheduler, "long", tuple(range(20)))
    add(scheduler, "short", (1,))
    scheduler.admit()
    assert not scheduler.filling and rids(scheduler.waiting) == ["long", "short"]


def test_the_youngest_gives_way_and_waits_at_the_head():
    scheduler = make_scheduler(num_pages=1 + 6)
    first, second = add(scheduler, "first", (1, 1, 1)), add(scheduler, "second", (2, 2, 2))
    add(scheduler, "third", (3, 3, 3, 3, 3, 3, 3, 3))
    scheduler.admit()
    assert rids(scheduler.waiting) == ["third"]
    start_decoding(scheduler)
    while second.slot is not None:
        scheduler.grow()
        draw(scheduler)
    assert scheduler.num_preemptions == 1
    assert first.slot is not None and rids(scheduler.waiting) == ["second", "third"]
    assert second.pages == [] and len(second.output_tokens) > 4


def test_idle_prefixes_give_way_before_any_sequence():
    scheduler = make_scheduler(num_pages=1 + 3)
    add(scheduler, "a", (1, 2, 3))
    scheduler.admit()
    start_decoding(scheduler)
    for _ in range(8):  # 12 tokens: all three pages
        scheduler.grow()
        draw(scheduler)
    assert scheduler.num_preemptions == 0 and len(scheduler.prefixes) == 0


def test_all_sent_back_keep_their_order():
    scheduler = make_scheduler(num_pages=50, max_running=3)
    for i in range(4):
        add(scheduler, str(i), (i,))
    scheduler.admit()
    scheduler.send_all_back()
    assert rids(scheduler.waiting) == ["0", "1", "2", "3"]
    assert scheduler.num_running == 0 and scheduler.pool.num_free == scheduler.pool.num_usable


def test_at_least_one_must_run():
    with pytest.raises(ValueError, match="max_running must be at least 1, got 0"):
        make_scheduler(num_pages=5, max_running=0)
