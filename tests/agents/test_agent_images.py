"""Agents that show images: through three APIs, in users' messages and tools' results, in trees."""

from __future__ import annotations

import base64
import hashlib
import json

import pytest
import torch
from agent_world import Does, ScriptedEngine, world_of
from engine.train.archon_world import open_engine
from image_prompts import picture, write_seeing_model, write_tokenizer
from sample_agents import ShowsItsRow, ask
from tiny_vision import IMAGE

from areal.agents.sight import Sight, sendable_row
from areal.agents.workflow import check_agent_options
from areal.algorithm.advantage import shift_left
from areal.api.config.inference import AgentConfig
from areal.models.vision.processor import load_processor
from areal.rollout.trajectory import as_tensors, check_trajectory_format, decode, encode
from areal.run.images import ImageStore, with_pixels

A, B, C = (
    picture(seed, height, width) for seed, height, width in ((1, 16, 24), (2, 8, 8), (3, 24, 16))
)
TOKENS = {A: 6, B: 1, C: 6}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def digest(data: str) -> bytes:
    return hashlib.sha256(base64.b64decode(data)).digest()


def url(data: str) -> str:
    return f"data:image/png;base64,{data}"


def shown(*parts: str, role: str = "user", **more):
    """A message of pictures and texts."""
    return {"role": role, "content": [chat_part(part) for part in parts], **more}


def chat_part(part: str):
    if part in TOKENS:
        return {"type": "image_url", "image_url": {"url": url(part)}}
    return {"type": "text", "text": part}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = write_seeing_model(tmp_path_factory.mktemp("model"))
    with world_of(folder, write_tokenizer(folder)) as opened:
        yield opened


@pytest.fixture
def sight(world, tmp_path):
    store = ImageStore(tmp_path / "images")
    return Sight(load_processor(world.folder, world.tokenizer), store)


def run(world, sight, act, *, engine=None, **config):
    with world.open(Does(act), sight=sight, **config) as workflow:
        return world.episode(workflow, engine=engine)


def said(reply):
    return reply.choices[0].message.model_dump(exclude_none=True)


async def branches(client, extra):
    """Three turns of a dialogue, the last with a tool's picture; and a branch from the first."""
    chat = [shown(A, "which is it")]
    chat.append(said(await ask(client, chat)))
    other = [*chat, shown("and", C)]
    chat.append({"role": "user", "content": "are you sure"})
    chat.append(said(await ask(client, chat)))
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat.append({"role": "assistant", "content": "", "tool_calls": [call]})
    chat.append(shown(B, "closer", role="tool", tool_call_id="1"))
    await ask(client, chat)
    await ask(client, other)
    await ask(client, [{"role": "user", "content": "no picture"}])


def test_rows_of_a_tree_have_their_images_and_the_engines_log_probabilities(world, sight):
    result = run(world, sight, branches, export_style="concat")
    rows = as_tensors(result)
    check_trajectory_format(rows)
    images = rows["multi_modal_input"]
    found = [row["image_sha256"].tolist() if row else [] for row in images]
    expected = [[A, B], [A, C], []]
    assert sorted(found) == sorted([[*map(list, map(digest, row))] for row in expected])
    for ids, names in zip(rows["input_ids"], found, strict=True):
        of_name = {tuple(digest(data)): count for data, count in TOKENS.items()}
        assert (ids == IMAGE).sum() == sum(of_name[tuple(name)] for name in names)
    rows = decode(encode(rows))
    filled = with_pixels(rows["multi_modal_input"], sight.store, sight.processor.cut)
    logprobs = open_engine(str(world.folder), "archon:d1").forward_batch(
        {**rows, "multi_modal_input": filled}
    )
    mask = shift_left(rows["loss_mask"]).bool()
    recorded = shift_left(rows["logprobs"])[mask]
    torch.testing.assert_close(logprobs[mask], recorded, rtol=1e-3, atol=1e-3)


async def three_apis(client, extra):
    """The same picture begins a chat, and goes on in each API."""
    first = said(await ask(client, [shown(A, "first")]))
    source = {"type": "base64", "media_type": "image/png", "data": B}
    result = {"type": "tool_result", "content": [{"type": "image", "source": source}]}
    history = [
        {
            "role": "user",
            "content": [
                {"type": "image", "source": {**source, "data": A}},
                {"type": "text", "text": "first"},
            ],
        },
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    http, url_ = extra["http_client"], extra["base_url"]
    key = {"Authorization": f"Bearer {extra['api_key']}"}
    body = {"messages": history, "max_tokens": 4}
    answer = await http.post(f"{url_}/messages", json=body, headers=key)
    assert answer.status_code == 200, answer.text
    counted = await http.post(
        f"{url_}/messages/count_tokens", json={"messages": history}, headers=key
    )
    assert counted.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]
    started = await client.responses.create(
        model="policy",
        input=[{"role": "user", "content": [{"type": "input_image", "image_url": url(C)}]}],
    )
    output = [{"type": "input_image", "image_url": url(A)}, {"type": "input_text", "text": "now"}]
    await client.responses.create(
        model="policy",
        previous_response_id=started.id,
        input=[{"type": "function_call_output", "call_id": "1", "output": output}],
    )


def test_every_api_shows_images_and_continues_what_another_began(world, sight):
    engine = ScriptedEngine(world.tokenizer, "one", "two", "three", "four")
    result = run(world, sight, three_apis, engine=engine, export_style="concat")
    assert [[one.sha256 for one in item.images] for item in result.values()] == [
        [digest(A), digest(B)],
        [digest(C), digest(A)],
    ]
    assert [request.image_data for request in engine.requests] == [[A], [A, B], [C], [C, A]]
    first, second, third, fourth = (request.input_ids for request in engine.requests)
    assert second[: len(first)] == first and fourth[: len(third)] == third
    assert [ids.count(IMAGE) for ids in (first, second, third, fourth)] == [6, 7, 6, 12]
    # A record names the file of an image.
    (part, _), folder = next(iter(result.values())).messages[0]["content"], sight.store.folder
    assert part == {"type": "image", "image": f"sha256:{digest(A).hex()}"}
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        digest(x).hex() for x in (A, B, C)
    )


def same_texts(prefix, messages):
    """A client's own rule: old pictures may be left out."""
    texts = [json.dumps([m["role"], text_of(m)]) for m in (*prefix, *messages)]
    return texts[: len(prefix)] == texts[len(prefix) : 2 * len(prefix)]


def text_of(message):
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def test_a_chat_whose_old_pictures_were_left_out_keeps_their_tokens(world, sight):
    async def act(client, extra):
        reply = said(await ask(client, [shown(A, "first")]))
        await ask(client, [{"role": "user", "content": "first"}, reply, shown("then", B)])

    engine = ScriptedEngine(world.tokenizer, "one", "two")
    matcher = "agents.test_agent_images.same_texts"
    (last,) = run(
        world, sight, act, engine=engine, export_style="concat", prefix_matcher=matcher
    ).values()
    assert [one.sha256 for one in last.images] == [digest(A), digest(B)]
    assert engine.requests[1].image_data == [A, B]


def test_tokens_may_go_on_behind_images_but_not_forge_them(world, sight):
    async def act(client, extra):
        asked = {"return_token_ids": True}
        reply = await ask(client, [shown(A, "first")], extra_body=asked)
        tokens = [*reply.prompt_token_ids, *reply.choices[0].token_ids, 5]
        await client.completions.create(model="policy", prompt=tokens)
        for forged in ([*tokens, IMAGE], [5, IMAGE]):
            with pytest.raises(Exception, match="image tokens are those of a completion"):
                await client.completions.create(model="policy", prompt=forged)

    engine = ScriptedEngine(world.tokenizer, "one", "two")
    (last,) = run(world, sight, act, engine=engine, export_style="concat").values()
    assert [request.image_data for request in engine.requests] == [[A], [A]]
    assert [one.sha256 for one in last.images] == [digest(A)]


def test_what_is_no_image_is_the_callers_fault_and_not_recorded(world, sight, tmp_path):
    file = tmp_path / "seen" / "a.png"
    file.parent.mkdir()
    file.write_bytes(base64.b64decode(A))
    broken = base64.b64encode(base64.b64decode(A)[:60]).decode()
    bad = [
        ("http://127.0.0.1:1/a.png", "not fetched from the network"),
        (url(broken), "image 0: the image cannot be decoded"),
        ("data:text/html;base64,AAAA", "begins with data:image/TYPE;base64"),
        (f"sha256:{digest(B).hex()}", "an image is base64"),
        (file.as_uri(), "files are not read"),
    ]

    async def act(client, extra):
        for source, message in bad:
            part = {"type": "image_url", "image_url": {"url": source}}
            with pytest.raises(Exception, match=message) as raised:
                await ask(client, [{"role": "user", "content": [part]}])
            assert raised.value.status_code == 400
        with pytest.raises(Exception, match="has 2 image tokens for 1 images"):
            await ask(client, [shown(A, "<|image_pad|>")])
        with pytest.raises(Exception, match="has 1 image tokens for 0 images"):
            await ask(client, [{"role": "user", "content": "<|image_pad|>"}])
        with pytest.raises(Exception, match="257 images, at most 256"):
            await ask(client, [shown(*[B] * 257)])
        with pytest.raises(Exception, match="no images, only users' and tools'"):
            await ask(client, [shown(A, role="system")])
        await ask(client, [shown(A, "at last")])

    engine = ScriptedEngine(world.tokenizer, "one")
    assert len(run(world, sight, act, engine=engine)) == 1 == len(engine.requests)


def test_a_session_shows_only_so_many_images(world, sight, tmp_path):
    sizes = [len(base64.b64decode(data)) for data in (A, B)]
    limit = sum(sizes) / (1 << 20)

    async def act(client, extra):
        for _ in range(3):  # each is counted once
            await ask(client, [shown(A, B, "what is it?")])
        for _ in range(2):
            with pytest.raises(Exception, match="MB of images, .*agent.max_image_mb=") as no:
                await ask(client, [shown(A, C, "and this?")])
            assert no.value.status_code == 413
        await ask(client, [shown(B, "and that?")])

    engine = ScriptedEngine(world.tokenizer, *["one"] * 4)
    assert run(world, sight, act, engine=engine, max_image_mb=limit) and len(engine.requests) == 4
    kept = {file.name for file in (tmp_path / "images").iterdir()}
    assert kept == {digest(A).hex(), digest(B).hex()}


def test_files_below_a_permitted_folder_are_read(world, sight, tmp_path):
    file = tmp_path / "seen" / "a.png"
    file.parent.mkdir()
    file.write_bytes(base64.b64decode(A))
    permitted = Sight(sight.processor, sight.store, [str(file.parent)])

    async def act(client, extra):
        part = {"type": "image_url", "image_url": {"url": file.as_uri()}}
        await ask(client, [{"role": "user", "content": [part]}])
        file.write_bytes(base64.b64decode(B))  # another picture, hence another chat
        await ask(client, [{"role": "user", "content": [part]}])

    engine = ScriptedEngine(world.tokenizer, "one", "two")
    assert len(run(world, permitted, act, engine=engine)) == 2
    assert [request.image_data for request in engine.requests] == [[A], [B]]
    with pytest.raises(ValueError, match="rollout.agent.image_folders: .*missing' is no folder"):
        check_agent_options(AgentConfig(image_folders=[str(tmp_path / "missing")]))


def test_an_agent_in_a_process_of_its_own_gets_the_images_of_its_row(world, sight):
    parts = [{"type": "image"}, {"type": "text", "text": "which"}]
    row = {"messages": [{"role": "user", "content": parts}], "images": [base64.b64decode(A)]}
    engine = ScriptedEngine(world.tokenizer, "one")
    with world.open(ShowsItsRow, sight=sight, mode="subproc") as workflow:
        (item,) = world.episode(workflow, row, engine=engine).values()
    assert engine.requests[0].image_data == [A] and item.reward == 1


def test_a_row_with_images_is_sent_to_clients_from_outside():
    data = base64.b64decode(A)
    row = {"images": [data, {"bytes": data}], "answer": "red", "number": 7}
    assert sendable_row(row) == {
        "images": [url(A), {"bytes": url(A)}],
        "answer": "red",
        "number": 7,
    }
    with pytest.raises(ValueError, match="the image begins with b'pickle'"):
        sendable_row({"images": [b"pickle"]})
