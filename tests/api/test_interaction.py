"""Interactions of an agent: the prefix tree, rewards and their discount, and rows of tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal.api.interaction import InteractionCache, InteractionWithTokenLogpReward, next_created
from areal.api.io_struct import ModelResponse


def says(role: str, text: str | None, **more) -> dict:
    return {"role": role, "content": text, **more}


def reply_to(input_tokens, output_tokens, *, version=0, stop_reason="stop") -> ModelResponse:
    return ModelResponse(
        input_tokens=list(input_tokens),
        output_tokens=list(output_tokens),
        output_logprobs=[-0.5 - 0.25 * i for i in range(len(output_tokens))],
        output_versions=[version] * len(output_tokens),
        stop_reason=stop_reason,
    )


def interaction(messages, answer="a", parent=None, response=None, template="concat", **more):
    return InteractionWithTokenLogpReward(
        response or reply_to([1], [2]),
        messages=messages,
        output_message_list=[says("assistant", answer)],
        parent=parent,
        chat_template_type=template,
        **more,
    )


def record(cache: InteractionCache, name: str, messages, answer="a", **more):
    item = interaction(messages, answer, cache.find_parent(messages, more.get("tools")), **more)
    cache.add(name, item)
    return item


# Tensors.


def test_one_interaction_as_a_row():
    item = interaction([], response=reply_to([5, 6], [7, 8], version=3), template="hf")
    item.reward = 0.5
    row = item.to_tensor_dict()
    assert row["input_ids"].tolist() == [[5, 6, 7, 8]]
    assert row["loss_mask"].tolist() == [[0, 0, 1, 1]]
    assert row["logprobs"].tolist() == [[0.0, 0.0, -0.5, -0.75]]
    assert row["versions"].tolist() == [[-1, -1, 3, 3]]
    assert row["turn_ids"].tolist() == [[-1, -1, 0, 0]]
    assert row["attention_mask"].tolist() == [[True] * 4]
    assert row["rewards"].tolist() == row["original_rewards"].tolist() == [0.5]
    assert row["seq_no_eos"].tolist() == [False]
    assert row["input_ids"].dtype == row["turn_ids"].dtype == torch.int32


def test_turns_are_stitched_in_front():
    first = interaction([], response=reply_to([5], [7, 8], version=1))
    second = interaction([], parent=first, response=reply_to([5, 7, 8, 9], [4], version=2))
    third = interaction(
        [],
        parent=second,
        response=reply_to([5, 7, 8, 9, 4, 6, 6], [3], version=2, stop_reason="length"),
    )
    third.reward, third.original_reward = -1.0, 0.25
    row = third.to_tensor_dict()
    assert row["input_ids"].tolist() == [[5, 7, 8, 9, 4, 6, 6, 3]]
    assert row["turn_ids"].tolist() == [[-1, 0, 0, -1, 1, -1, -1, 2]]
    assert row["loss_mask"].tolist() == [[0, 1, 1, 0, 1, 0, 0, 1]]
    assert row["logprobs"].tolist() == [[0, -0.5, -0.75, 0, -0.5, 0, 0, -0.5]]
    assert row["versions"].tolist() == [[-1, 1, 1, -1, 2, -1, -1, 2]]
    assert row["rewards"].tolist() == [-1.0] and row["original_rewards"].tolist() == [0.25]
    assert row["seq_no_eos"].tolist() == [True]


def test_an_individual_row_has_its_own_turn_only():
    first = interaction([], response=reply_to([5], [7]), template="hf")
    second = interaction([], parent=first, response=reply_to([5, 7, 9], [4]), template="hf")
    second.reward = 1.0
    assert second.to_tensor_dict()["loss_mask"].tolist() == [[0, 0, 0, 1]]


@given(
    parents=st.lists(st.integers(-1, 8), min_size=1, max_size=9),
    lengths=st.lists(st.integers(1, 3), min_size=9, max_size=9),
    style=st.sampled_from(["individual", "concat"]),
)
def test_every_sampled_token_is_learned_in_exactly_one_sample(parents, lengths, style):
    """Any forest of turns; every sampled token has an id of its own, so it can be counted."""
    cache, turns, fresh = InteractionCache(), [], iter(range(1000, 2000))
    for turn, chosen in enumerate(parents):
        parent = turns[chosen] if 0 <= chosen < turn else None
        before = []
        if parent is not None:
            before = [*parent.model_response.input_tokens, *parent.model_response.output_tokens]
        sampled = [next(fresh) for _ in range(lengths[turn])]
        turns.append(interaction([], parent=parent, response=reply_to([*before, turn], sampled)))
        cache.add(str(1000 + turn), turns[-1])
    cache.set_last_reward(1.0)
    cache.apply_reward_discount(1.0)
    learned = []
    for item in cache.export_interactions(style).values():
        row = {name: x[0].tolist() for name, x in item.to_tensor_dict().items() if x.ndim == 2}
        for token, mask, turn, version in zip(
            row["input_ids"], row["loss_mask"], row["turn_ids"], row["versions"], strict=True
        ):
            assert (mask == 1) == (turn >= 0) == (version >= 0)
            if mask:
                learned.append(token)
        assert 0 in row["turn_ids"]  # turns are numbered from 0 in every sample
    assert sorted(learned) == [
        token for turn in turns for token in turn.model_response.output_tokens
    ]


def test_a_reward_by_turn():
    cache = InteractionCache()
    for name in ("x", "y"):
        record(cache, name, [says("user", name)])
    cache.set_reward(0, 0.5)
    cache.set_reward("1", 2.0)
    assert [item.reward for item in cache.values()] == [0.5, 2.0]
    record(cache, "0", [says("user", "an id of digits")])
    cache.set_reward("0", 3.0)  # an id comes before a number
    assert [item.reward for item in cache.values()] == [0.5, 2.0, 3.0]
    for unknown in (3, -1, "9" * 5000):
        with pytest.raises(ValueError, match=r"no completion .* in this session; it has x, y, 0"):
            cache.set_reward(unknown, 1.0)


def test_tokens_that_do_not_continue_are_refused():
    first = interaction([], response=reply_to([5], [7, 8]))
    second = interaction([], parent=first, response=reply_to([5, 7, 9], [4]), reward=1.0)
    with pytest.raises(ValueError, match="turn 1 does not continue"):
        second.to_tensor_dict()


def test_a_row_needs_a_reward():
    with pytest.raises(ValueError, match="without a reward"):
        interaction([]).to_tensor_dict()


# The prefix tree.


def test_the_parent_is_the_longest_prefix():
    cache = InteractionCache()
    question = [says("user", "q")]
    first = record(cache, "1", question, "a")
    longer = [*question, says("assistant", "a"), says("user", "again")]
    second = record(cache, "2", longer, "b")
    third = record(cache, "3", [*longer, says("assistant", "b"), says("user", "more")])
    other = record(cache, "4", [*question, says("assistant", "other"), says("user", "again")])
    assert (first.parent, second.parent, third.parent, other.parent) == (None, first, second, None)
    assert list(cache.export_interactions("individual")) == ["1", "2", "3", "4"]
    assert list(cache.export_interactions("concat")) == ["3", "4"]


def test_the_newest_of_two_equal_replies_is_continued():
    cache = InteractionCache()
    record(cache, "1", [says("user", "q")])
    retry = record(cache, "2", [says("user", "q")])
    next_turn = [says("user", "q"), says("assistant", "a"), says("user", "x")]
    assert record(cache, "3", next_turn).parent is retry


@pytest.mark.parametrize(
    "echo",
    [
        {"role": "assistant", "content": " a \n", "refusal": None, "annotations": []},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "a", "tool_calls": None},
    ],
)
def test_a_reply_handed_back_in_another_form_is_the_same(echo):
    cache = InteractionCache()
    first = record(cache, "1", [says("user", "q")])
    assert cache.find_parent([says("user", "q"), echo, says("user", "x")]) is first


def test_tool_calls_are_compared_by_what_they_ask():
    def call(arguments, name="f", call_id="x"):
        function = {"name": name, "arguments": arguments}
        return says("assistant", None, tool_calls=[{"id": call_id, "function": function}])

    cache = InteractionCache()
    question, result = says("user", "q"), says("tool", "2", tool_call_id="x")
    first = interaction([question])
    first.output_message_list = [call('{"a": 1, "b": 2}')]
    cache.add("1", first)
    assert cache.find_parent([question, call('{"b":2,"a":1}', call_id="y"), result]) is first
    assert cache.find_parent([question, call('{"a": 2, "b": 2}'), result]) is None
    assert cache.find_parent([question, call('{"a": 1, "b": 2}', name="g"), result]) is None


def test_other_tools_make_another_chat():
    cache = InteractionCache()
    tools = [{"type": "function", "function": {"name": "f"}}]
    first = record(cache, "1", [says("user", "q")], tools=tools)
    longer = [says("user", "q"), says("assistant", "a"), says("user", "x")]
    assert cache.find_parent(longer, tools) is first
    assert cache.find_parent(longer) is None


def test_the_matcher_can_be_replaced():
    cache = InteractionCache(lambda prefix, messages: True)
    first = record(cache, "1", [says("user", "q")])
    unlike = [says("user", "x"), says("user", "y"), says("user", "z")]
    assert cache.find_parent(unlike) is first


# A chat is a path in a tree of small alphabets, so that prefixes are shared often.
turns = st.lists(
    st.tuples(st.sampled_from(["x", "y"]), st.sampled_from("ab")), min_size=1, max_size=4
)


def chat_of(turns) -> list[dict]:
    """The messages of a request: all replies but the last are part of it."""
    chat = []
    for text, answer in turns:
        chat += [says("user", text), says("assistant", answer)]
    return chat[:-1]


@given(st.lists(turns, min_size=1, max_size=8))
def test_parents_and_leaves_of_any_session(chats):
    cache = InteractionCache()
    for number, chat in enumerate(chats):
        record(cache, str(number), chat_of(chat), chat[-1][1])
    items = list(cache.values())
    for number, (item, chat) in enumerate(zip(items, chats, strict=True)):
        before = [c for c in chats[:number] if c == chat[: len(c)] and len(c) < len(chat)]
        longest = max(before, key=len, default=None)
        assert (item.parent is None) == (longest is None)
        if longest is not None:
            newest = max(i for i, c in enumerate(chats[:number]) if c == longest)
            assert item.parent is items[newest]
    leaves = cache.export_interactions("concat")
    assert all(item not in [x.parent for x in items] for item in leaves.values())
    covered = {id(turn) for leaf in leaves.values() for turn in leaf.path()}
    assert covered == {id(item) for item in items}, "every interaction is on the path to a leaf"


def test_a_request_that_ends_with_the_reply_goes_on_from_it():
    cache = InteractionCache()
    question = [says("user", "q")]
    first = record(cache, "1", question, "a")
    second = record(cache, "2", [*question, says("assistant", "a")], "b")
    assert second.parent is first
    assert list(cache.export_interactions("concat")) == ["2"]
    assert cache.find_parent([*question, says("assistant", "other")]) is None


# What an agent adds before it asks again: nothing, or some messages.
additions = st.lists(
    st.lists(st.sampled_from([says("user", "x"), says("tool", "y"), says("system", "z")])),
    min_size=1,
    max_size=6,
)


@given(additions, st.lists(st.sampled_from("ab"), min_size=6, max_size=6))
def test_a_chat_that_only_grows_is_one_sample(additions, answers):
    cache, chat, ids = InteractionCache(), [says("user", "q")], [1]
    for number, (more, answer) in enumerate(zip(additions, answers, strict=False)):
        item = record(
            cache, str(number), list(chat), answer, response=reply_to(ids, [100 + number])
        )
        chat = [*item.whole_chat(), *more]
        ids = [*ids, 100 + number, *[2] * len(more)]
    (leaf,) = cache.export_interactions("concat").values()
    leaf.reward = 1.0
    row = leaf.to_tensor_dict()
    sampled = row["input_ids"][0][row["loss_mask"][0] == 1].tolist()
    assert sampled == [100 + number for number in range(len(cache))]


# Rewards.


def rewarded(rewards) -> InteractionCache:
    cache = InteractionCache()
    for number, reward in enumerate(rewards):
        cache.add(str(number), interaction([says("user", str(number))], reward=reward))
    return cache


def choices(cache, name, messages, *answers):
    created = next_created()
    parent = cache.find_parent(messages)
    for number, answer in enumerate(answers):
        item = interaction(messages, answer, parent, created=created)
        cache.add(f"{name}-{number}" if number else name, item)


def test_the_choices_of_a_request_are_one_turn():
    cache = InteractionCache()
    record(cache, "x", [says("user", "q")])
    question = [says("user", "q"), says("assistant", "a"), says("user", "r")]
    choices(cache, "y", question, "b", "c", "c")
    assert {item.parent for item in cache.values()} == {None, cache["x"]}
    assert cache.drop_retry_orphans() == [], "they were asked for together"
    cache.set_last_reward(2.0)
    assert [item.reward for item in cache.values()] == [None, 2.0, 2.0, 2.0]
    cache.set_reward(1, 3.0)
    cache.set_reward("y-2", 0.0)
    cache.set_reward(0, 1.0)
    assert [item.reward for item in cache.values()] == [1.0, 3.0, 3.0, 0.0]
    with pytest.raises(ValueError, match="no completion 2 in this session; it has x, y, y-1, y-2"):
        cache.set_reward(2, 1.0)
    cache.apply_reward_discount(0.5)
    assert [item.reward for item in cache.values()] == [2.0, 3.0, 3.0, 0.0]
    assert list(cache.leaves()) == ["y", "y-1", "y-2"]


def test_a_choice_that_was_continued():
    cache = InteractionCache()
    choices(cache, "x", [says("user", "q")], "b", "c")
    chat = [says("user", "q"), says("assistant", "b"), says("user", "r")]
    assert record(cache, "y", chat).parent is cache["x"]
    cache.set_last_reward(1.0)
    cache.apply_reward_discount(0.5)
    assert [item.reward for item in cache.values()] == [0.5, 0.5, 1.0]
    learned = cache.export_interactions("concat")
    assert {name: item.learned for name, item in learned.items()} == {"x-1": 1, "y": 2}


def test_discount_by_hand():
    cache = rewarded([None, 1.0, None, 2.0])
    cache.apply_reward_discount(0.5)
    assert [item.reward for item in cache.values()] == [0.75, 1.5, 1.0, 2.0]
    with pytest.raises(RuntimeError, match="discounted already"):
        cache.apply_reward_discount(0.5)


reward = st.none() | st.floats(-10, 10)


@given(st.lists(reward, min_size=1, max_size=12), st.floats(0, 1))
def test_discount_is_the_sum_of_what_follows(rewards, discount):
    cache = rewarded(rewards)
    if all(r is None for r in rewards):
        with pytest.raises(ValueError, match="no completion of this session has a reward"):
            cache.apply_reward_discount(discount)
        return
    cache.apply_reward_discount(discount)
    for start, item in enumerate(cache.values()):
        expected = sum((r or 0.0) * discount**i for i, r in enumerate(rewards[start:]))
        assert item.reward == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("value", [1, True, 0.5])
def test_any_real_number_is_a_reward(value):
    cache = rewarded([None, None])
    cache.set_last_reward(value)
    cache.set_reward("0", value)
    assert [item.reward for item in cache.values()] == [float(value)] * 2


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), [1.0], 10**400])
def test_what_is_not_a_number_is_no_reward(value):
    with pytest.raises(ValueError, match="a reward must be a finite number"):
        rewarded([None]).set_last_reward(value)


def test_a_reward_needs_its_completion():
    with pytest.raises(ValueError, match="no completion 'x'.*it has 0, 1"):
        rewarded([None, None]).set_reward("x", 1.0)
    with pytest.raises(ValueError, match="no completion to reward"):
        InteractionCache().set_last_reward(1.0)


# Retries and styles.


def test_retry_orphans_are_dropped():
    cache = InteractionCache()
    question = [says("user", "q")]
    for name, answer in (("lost", "a"), ("kept", "b"), ("answered", "c")):
        record(cache, name, question, answer)
    record(cache, "next", [*question, says("assistant", "b"), says("user", "x")])
    record(cache, "scored", [says("user", "other")], reward=1.0)
    record(cache, "again", [says("user", "other")])
    assert cache.drop_retry_orphans() == ["lost"]
    assert list(cache) == ["kept", "answered", "next", "scored", "again"]


@given(st.permutations(range(4)))
def test_of_equal_requests_the_one_asked_last_is_kept(completed):
    asked = [interaction([says("user", "q")], str(number)) for number in range(4)]
    cache = InteractionCache()
    for number in completed:  # replies may overtake each other
        cache.add(str(number), asked[number])
    assert list(cache) == ["0", "1", "2", "3"]
    assert cache.drop_retry_orphans() == ["0", "1", "2"]
    cache.set_last_reward(1.0)
    assert asked[3].reward == 1.0


def test_the_order_of_replies_changes_no_reward():
    def discounted(completed):
        asked = [interaction([says("user", str(number))]) for number in range(3)]
        cache = InteractionCache()
        for number in completed:
            cache.add(str(number), asked[number])
        cache.set_last_reward(1.0)
        cache.apply_reward_discount(0.5)
        return {name: item.reward for name, item in cache.items()}

    assert discounted([2, 0, 1]) == discounted([0, 1, 2]) == {"0": 0.25, "1": 0.5, "2": 1.0}


def test_concat_needs_stitched_tokens():
    cache = InteractionCache()
    record(cache, "1", [says("user", "q")], template="hf")
    with pytest.raises(ValueError, match="set chat_template_type to 'concat'"):
        cache.export_interactions("concat")
    with pytest.raises(ValueError, match="got 'both'"):
        cache.export_interactions("both")


def test_an_id_is_recorded_once():
    cache = rewarded([None])
    with pytest.raises(ValueError, match="recorded already"):
        cache.add("0", interaction([]))
