"""Each clock alone and together, without torch.distributed; state; independence of roles."""

from __future__ import annotations

import pytest

from areal.api.io_struct import StepInfo
from areal.run.checkpoints import FrequencyTimer

FIRST = StepInfo(epoch=0, epoch_step=0, global_step=0, steps_per_epoch=3)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ticks(timer: FrequencyTimer, count: int, start: StepInfo = FIRST) -> list[int]:
    """Global steps at which the timer fired."""
    fired, step = [], start
    for _ in range(count):
        if timer.tick(step):
            fired.append(step.global_step)
        step = step.next()
    return fired


def test_no_frequency_never_fires():
    assert ticks(FrequencyTimer(), 20) == []


def test_every_n_steps():
    assert ticks(FrequencyTimer(freq_steps=4), 13) == [3, 7, 11]


def test_every_n_epochs_fires_on_the_last_step_of_the_epoch():
    assert ticks(FrequencyTimer(freq_epochs=2), 12) == [5, 11]


def test_seconds_work_in_a_process_without_torch_distributed():
    clock = Clock()
    timer = FrequencyTimer(freq_secs=3600, clock=clock)
    assert not timer.tick(FIRST)
    clock.now += 3601
    assert timer.tick(FIRST)
    assert not timer.tick(FIRST)


def test_any_clock_is_enough_and_the_others_go_on():
    assert ticks(FrequencyTimer(freq_steps=4, freq_epochs=1), 8) == [2, 3, 5, 7]


def test_two_roles_do_not_share_a_counter():
    actor, critic = FrequencyTimer(freq_steps=2), FrequencyTimer(freq_steps=2)
    fired = [(actor.tick(FIRST), critic.tick(FIRST)) for _ in range(4)]
    assert fired == [(False, False), (True, True), (False, False), (True, True)]


def test_state_resumes_the_rhythm_and_leaves_out_the_time_between():
    clock = Clock()
    timer = FrequencyTimer(freq_steps=5, freq_secs=60, clock=clock)
    assert ticks(timer, 3) == []
    clock.now += 50
    state = timer.state_dict()
    later = Clock()
    later.now = 9999.0
    resumed = FrequencyTimer(freq_steps=5, freq_secs=60, clock=later)
    resumed.load_state_dict(state)
    assert not resumed.tick(FIRST)  # 4th step, 50 s
    later.now += 10
    assert resumed.tick(FIRST)  # 5th step, and 60 s


@pytest.mark.parametrize("name", ["freq_epochs", "freq_steps", "freq_secs"])
def test_zero_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        FrequencyTimer(**{name: 0})
