"""RequestRouter: samples of a prompt stay together, the rest goes where least is in flight."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from areal.engine.remote.router import RequestRouter, retry_delay_s


def test_by_hand():
    router = RequestRouter(["a", "b"])
    first = router.take([1], 100)
    assert router.take([1], 100) is first  # its prompt is there already, whatever the load
    second = router.take([2], 10)
    assert second is not first
    assert router.take([3], 10) is second
    for _ in range(2):
        router.give_back(first, [1], 100)
    assert router.take([4], 10) is first
    assert router.take([1], 100) is first  # 10 in flight against 20


def test_a_prompt_leaves_a_server_that_is_avoided():
    router = RequestRouter(["a", "b"])
    lost = router.take([1], 5)
    router.take([1], 5)
    router.avoid(lost)
    other = router.take([1], 5)
    assert other is not lost
    router.avoid(other)
    assert router.take([1], 5) in router.servers  # nowhere else to go


def test_servers_come_and_go():
    router = RequestRouter(["a"])
    first = router.take([1], 5)
    router.follow(["a", "b"])
    second = router.take([2], 5)
    assert second.address == "b" and router.take([1], 5) is first
    router.follow(["b"])
    assert router.take([1], 5) is second
    router.avoid(first)  # its connection breaks; that does not make it one of them again
    assert first.avoided_until == math.inf
    router.follow(["b", "a"])  # started again at the same address
    assert router.take([3], 5) not in (first, second)
    for _ in range(2):
        router.give_back(first, [1], 5)
    assert first.tokens_in_flight == 0 and second.tokens_in_flight == 10


def test_the_next_turn_goes_where_the_turn_before_was():
    router = RequestRouter(["a", "b", "c"])
    chats = [[chat] * 70 for chat in range(6)]
    homes = []
    for chat in chats:
        homes.append(router.take(chat, 100))
    for home, chat in zip(homes, chats, strict=True):
        router.give_back(home, chat, 100)
    assert {home.address for home in homes} == {"a", "b", "c"}
    for home, chat in reversed(list(zip(homes, chats, strict=True))):
        assert router.take([*chat, 7, 8, 9], 120) is home


def test_a_beginning_does_not_hold_where_there_is_too_much_to_do():
    router = RequestRouter(["a", "b"])
    chat = [1] * 130
    home = router.take(chat, 200)
    router.give_back(home, chat, 200)
    router.take([2], 128)  # as much as both blocks of the beginning save
    router.take([3], 1)
    assert router.take([*chat, 4], 10) is home, "128 in flight against 1, less 128 to compute"
    router.take([*chat, 4], 1000)  # in flight there already
    idle = router.take([*chat, 7], 10)
    assert idle is not home
    assert router.take([*chat, 7, 7], 10) is idle, "the beginning has moved"


def test_one_beginning_of_all_is_no_reason_to_leave_servers_idle():
    router = RequestRouter(["a", "b", "c", "d"])
    for number in range(64):
        router.take([*[0] * 640, number], 700)
    loads = [server.tokens_in_flight for server in router.servers]
    assert max(loads) <= 1.25 * min(loads) + 2 * 700


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50), st.booleans()), max_size=60))
def test_what_was_given_back_weighs_nothing(calls):
    router = RequestRouter(["a", "b", "c"])
    taken = []
    for prompt, tokens, ends in calls:
        taken.append((router.take([prompt], tokens), [prompt], tokens))
        if ends:
            router.give_back(*taken.pop(0))
    for one in taken:
        router.give_back(*one)
    assert [server.tokens_in_flight for server in router.servers] == [0, 0, 0]
    assert not router._groups


def test_retries_wait_longer_up_to_a_bound():
    assert [retry_delay_s(n) for n in (1, 2, 3)] == [0.1, 0.2, 0.4]
    assert retry_delay_s(30) == 10.0
