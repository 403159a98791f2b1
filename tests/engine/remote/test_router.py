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
